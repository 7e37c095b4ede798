"""How far a run is, what is left of it, and whether the next unit still fits its time limit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dashboard.words import count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dashboard.asv_journal import Durations
    from dashboard.asv_units import Unit


@dataclass(slots=True)
class Progress:
    """Counts units and seconds; tells the user before each unit."""

    durations: Durations
    num_commits: int
    time_limit_s: float | None
    echo: Callable[[str], None]
    now_s: Callable[[], float] = time.monotonic
    num_measured: int = 0
    num_kept: int = 0
    _started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._started_s = self.now_s()

    def has_time_for(self, unit: Unit) -> bool:
        """Say whether a unit ends in time, as far as known; the first one of a call always runs."""
        if self.time_limit_s is None or not self.num_measured:
            return True
        elapsed_s = self.now_s() - self._started_s
        return elapsed_s + (self.durations.estimate_s(unit) or 0.0) <= self.time_limit_s

    def tell(self, commit_number: int, commit: str, units: Sequence[Unit], number: int) -> None:
        """Say which unit begins (both numbers count from 0), and how long the rest may take."""
        unit = units[number]
        which = f"commit {commit_number + 1}/{self.num_commits} {commit[:8]}, "
        self.echo(
            f"[{which if self.num_commits > 1 else ''}{number + 1}/{len(units)}] {unit.label}"
            f"{_cases(unit)}; {self._left(commit_number, units, number)}"
        )

    def measured(self, unit: Unit, seconds: float) -> None:
        """Count a unit and remember what it took."""
        self.num_measured += 1
        self.durations.add(unit, seconds)

    def _left(self, commit_number: int, units: Sequence[Unit], number: int) -> str:
        """Estimate the rest; later commits are taken to have the units of this one."""
        rest = [self.durations.estimate_s(unit) for unit in units[number:]]
        all_ = [self.durations.estimate_s(unit) for unit in units]
        known = [seconds for seconds in (*rest, *all_) if seconds is not None]
        if len(known) < len(rest) + len(all_):
            return "time left unknown, none of it was measured here before"
        later = (self.num_commits - commit_number - 1) * sum(known[len(rest) :])
        return f"about {duration_text(sum(known[: len(rest)]) + later)} left"


def _cases(unit: Unit) -> str:
    return f" ({count_text(len(unit.cases), 'case')})" if unit.benchmarks else ""


def duration_text(seconds: float) -> str:
    """Write a duration as one says it: "40 s", "7 min", "2 h 5 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
