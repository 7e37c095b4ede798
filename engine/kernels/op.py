"""The records an op of the engine is described by: what it computes, costs and is tested on.

Owns the vocabulary of the op table. Knows no op and imports no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Cost:
    """What a case cannot do without: bytes that must move, arithmetic that must happen."""

    bytes: int  # each operand moved once, cached latent rows included
    flops: int  # multiply and add count as two
    kv_bytes: int = 0  # the part of `bytes` that is cached latent rows


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an implementation may stray from the reference, and why that far."""

    output_rel: float  # ‖out - reference‖ / ‖reference‖ of one output row
    lse_abs: float  # |lse - reference|, natural log
    reason: str


@dataclass(frozen=True, slots=True)
class Case:
    """One problem an op is tested on; ops add its sizes."""

    name: str
    reason: str  # what this case alone would catch


CaseT = TypeVar("CaseT", bound=Case)


@dataclass(frozen=True, slots=True)
class Op(Generic[CaseT]):
    """One row of the op table.

    `reference` is the definition; every entry of `implementations` (the reference among them)
    takes the same arguments and owes the same result within `tolerance(dtype)`.
    `inputs(case, device=…, dtype=…)` gives these arguments by name, the same for the same seed.
    """

    name: str
    reference: Callable[..., Any]
    implementations: Mapping[str, Callable[..., Any]]
    cases: tuple[CaseT, ...]
    inputs: Callable[..., dict[str, Any]]
    cost: Callable[..., Cost]
    tolerance: Callable[..., Tolerance]
