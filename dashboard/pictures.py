"""Pictures in characters, for what shows no image: terminals, mail, and comments on any forge.

A forge shows images that somebody hosts, and its mail not even those. These are text in a span of
code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from db.cases import CaseComparison

WIDTH: Final = 25  # characters of an interval
WIDEST_REL: Final = 3.0  # of an axis; what lies beyond ends in an arrow
LEVELS: Final = "▁▂▃▄▅▆▇█"
EMPTY, NOISE, LINE, POINT, ZERO = "·", "░", "─", "●", "│"  # no space: forges fold several into one
LEFT, RIGHT = "◂", "▸"


@dataclass(frozen=True, slots=True)
class Axis:
    """The relative changes that one column of pictures spans, zero among them."""

    low: float
    high: float

    def place(self, value: float) -> int:
        """Return the character of a value; those beyond the ends are at the ends."""
        share = (value - self.low) / (self.high - self.low)
        return min(max(round(share * (WIDTH - 1)), 0), WIDTH - 1)


def axis_of(cases: Iterable[CaseComparison], relevance_rel: float) -> Axis:
    """Return the axis that shows every interval and what counts as a change on either side."""
    ends = [
        value
        for case in cases
        for value in (case.interval_low, case.interval_high, case.relative_change)
        if value is not None and math.isfinite(value)
    ]
    low, high = min([-relevance_rel, *ends]), max([relevance_rel, *ends])
    return Axis(max(low, -1.0), min(high, WIDEST_REL))


def interval_text(case: CaseComparison, axis: Axis) -> str:
    """Draw a case's interval over its noise; empty where it has no interval."""
    if case.interval_low is None or case.interval_high is None or case.relative_change is None:
        return ""
    marks = [EMPTY] * WIDTH
    if case.noise_rel is not None:
        for place in range(axis.place(-case.noise_rel), axis.place(case.noise_rel) + 1):
            marks[place] = NOISE
    marks[axis.place(0.0)] = ZERO
    for place in range(axis.place(case.interval_low), axis.place(case.interval_high) + 1):
        marks[place] = LINE
    marks[axis.place(case.relative_change)] = POINT
    if case.interval_low < axis.low:
        marks[0] = LEFT
    if case.interval_high > axis.high:
        marks[-1] = RIGHT
    return "".join(marks)


def levels_text(values: Sequence[float]) -> str:
    """Draw values in their order, the least as the lowest mark; equal ones are one low line."""
    least, most = min(values), max(values)
    scale = (len(LEVELS) - 1) / (most - least) if most > least else 0.0
    return "".join(LEVELS[round((value - least) * scale)] for value in values)
