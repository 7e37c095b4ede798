"""Find where a series changed its level, and what the change belongs to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Cause = Literal["code", "dependency", "environment", "clock", "hardware", "noise", "unknown"]


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """The first result of a new level."""

    index: int  # into the values as given, gaps included
    before: float  # centre of the level before, in the values' unit
    after: float
    relative_change: float  # (after - before) / before
    p_value: float  # never 0
    cause: Cause

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        return asdict(self)
