"""Cut a series of log values into levels: propose many boundaries, keep those that hold up.

`db.partition` proposes generously. `judge` is strict and looks at the values as they are: a
boundary stays if the levels differ relevantly, beyond the noise on both sides, and by a rank test,
which may be a stricter one without lone outliers.
The weakest boundary falls first and its neighbours are judged again without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from db.partition import MIN_SEGMENT, Logs, Tamed, median, propose_many
from db.rank_test import rank_p_value

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MIN_SEGMENT",
    "REACH",
    "Boundary",
    "Seen",
    "Strictness",
    "judge",
    "segment",
    "segment_many",
]

SHORT = 8  # results of a level that may be no more than an odd stretch
SETTLED = 6  # results of a level that is not young any more
TELLING = 5  # results that tell their own noise
FAR_APART = 3.0  # times the noise of the other side
CALM = 2.0  # times the spread of the calmest third, beyond which a result is left out
REACH = 30  # results on each side of a boundary that are looked at
MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Strictness:
    """What a boundary must show to stay."""

    relevance_rel: float = 0.02  # change of the level that is worth acting on
    least_rel: float = 0.015  # least relative change of the level
    min_sigmas: float = 2.0  # least change in robust standard deviations of either side
    min_young_sigmas: float = 3.5  # the same of a level that is young, or of a small change
    max_p_value: float = 6e-4  # of the rank test
    max_small_p_value: float = 4e-4  # the same of a change that does not leave the noise clearly
    max_tamed_p_value: float = 2e-5  # the same without lone outliers, which makes it optimistic
    large_rel: float = 2.0  # thrice the level, as no machine's moods make it
    min_large_sigmas: float = 6.0  # of such a change, for which the next limit holds
    max_large_p_value: float = 5e-3  # few results cannot rank any lower, however far apart they lie
    min_segment: int = MIN_SEGMENT


@dataclass(frozen=True, slots=True)
class Seen:
    """A series as it is, without its lone outliers, and the usual spread around each result."""

    logs: Logs
    tamed: Logs
    spreads: Logs | None = None
    _sides: dict[tuple[int, int], _Side] = field(default_factory=dict, repr=False, compare=False)

    def side(self, start: int, end: int) -> _Side:
        """Give what a stretch shows; most are asked for by several boundaries."""
        found = self._sides.get((start, end))
        if found is None:
            found = self._sides[start, end] = _Side.of(self, slice(start, end))
        return found


@dataclass(frozen=True, slots=True)
class Boundary:
    """A candidate: where a level may begin, and what speaks for it."""

    index: int
    shift: float  # of the log level
    p_value: float
    strength: float  # 1 or more: it stays


def segment(logs: Logs, strictness: Strictness) -> list[Boundary]:
    """Find the boundaries between levels, in order."""
    return segment_many([logs], [None], strictness)[0]


def segment_many(
    series: Sequence[Logs], spreads: Sequence[Logs | None], strictness: Strictness
) -> list[list[Boundary]]:
    """Find the boundaries of many series, faster than one by one.

    `spreads` say of each result of a series how far its samples lay apart, relative to it.
    """
    tamed = [Tamed.of(*one) for one in zip(series, spreads, strict=True)]
    proposals = propose_many(tamed, strictness.min_segment)
    every = zip(series, tamed, spreads, proposals, strict=True)
    return [
        _Judging(Seen(logs, tame.logs, apart), strictness).keep(proposed)
        for logs, tame, apart, proposed in every
    ]


@dataclass(slots=True)
class _Judging:
    """Boundaries of one series that fall one after the other, the weakest first."""

    seen: Seen
    strictness: Strictness
    known: dict[tuple[int, int, int], Boundary] = field(default_factory=dict)

    def keep(self, proposed: Sequence[int]) -> list[Boundary]:
        """Drop boundaries until every one that is left holds up."""
        edges = [0, *proposed, len(self.seen.logs)]
        found = [self._at(edges, place) for place in range(1, len(edges) - 1)]
        while found:
            weakest = min(found, key=_strength)
            if weakest.strength >= 1.0:
                break
            gone = edges.index(self._to_drop(edges, edges.index(weakest.index)))
            del edges[gone], found[gone - 1]
            for place in range(max(gone - 1, 1), min(gone, len(found)) + 1):
                found[place - 1] = self._at(edges, place)
        return found

    def _to_drop(self, edges: list[int], place: int) -> int:
        """Drop a neighbour instead where that lets the weakest hold, better than the reverse.

        A few odd results before a step make a level of their own, too short to tell the step.
        """
        dropped, best = edges[place], 1.0
        for neighbour in (place - 1, place + 1):
            is_close = abs(edges[neighbour] - edges[place]) < SHORT
            if is_close and 0 < neighbour < len(edges) - 1:
                alone = self._without(edges, place, neighbour)
                reverse = self._without(edges, neighbour, place)
                if alone.strength > max(best, reverse.strength):
                    dropped, best = edges[neighbour], alone.strength
        return dropped

    def _without(self, edges: list[int], place: int, gone: int) -> Boundary:
        kept = [*edges[:gone], *edges[gone + 1 :]]
        return self._at(kept, place - (gone < place))

    def _at(self, edges: list[int], place: int) -> Boundary:
        index = edges[place]
        start, end = max(edges[place - 1], index - REACH), min(edges[place + 1], index + REACH)
        found = self.known.get((start, index, end))
        if found is None:
            found = judge(self.seen, (start, index, end), self.strictness)
            self.known[start, index, end] = found
        return found


def _strength(boundary: Boundary) -> float:
    return boundary.strength


def judge(seen: Seen, span: tuple[int, int, int], strictness: Strictness) -> Boundary:
    """Weigh the boundary in the middle of `span` by the values close to it."""
    start, index, end = span
    start, end = max(start, index - REACH), min(end, index + REACH)
    before, after = seen.side(start, index), seen.side(index, end)
    shift = after.level - before.level
    least = min(len(before.logs), len(after.logs))
    if least < strictness.min_segment:
        return Boundary(index, shift, 1.0, 0.0)
    scatter = _scatter(before, after)
    size = abs(shift) / _needed(scatter, strictness, is_young=least < SETTLED)
    if size < 1.0:  # it falls whatever its ranks say
        return Boundary(index, shift, 1.0, size)
    most = _max_p_value(abs(shift), scatter, strictness), strictness.max_tamed_p_value
    certainty, p_value = _certainty([(one.logs, one.tamed) for one in (before, after)], most)
    if end - start > len(before.logs) + len(after.logs):
        every = [(seen.logs[a:b], seen.tamed[a:b]) for a, b in ((start, index), (index, end))]
        # What is left out makes no step less certain.
        certainty, p_value = max((certainty, p_value), _certainty(every, most))
    return Boundary(index, shift, p_value, min(size, certainty))


def _max_p_value(shift: float, scatter: float, strictness: Strictness) -> float:
    """Give the limit of the rank test: the less a change leaves the noise, the lower."""
    if shift < strictness.min_young_sigmas * scatter:
        return strictness.max_small_p_value
    large = max(math.log1p(strictness.large_rel), strictness.min_large_sigmas * scatter)
    return strictness.max_p_value if shift < large else strictness.max_large_p_value


def _certainty(
    sides: Sequence[tuple[Logs, Logs]], most: tuple[float, float]
) -> tuple[float, float]:
    """Say how far the ranks of two sides are beyond what is asked, and their larger p-value."""
    (before, tamed_before), (after, tamed_after) = sides
    found = rank_p_value(before, after), rank_p_value(tamed_before, tamed_after)
    certainty = max(math.log(one) / math.log(limit) for one, limit in zip(found, most, strict=True))
    return certainty, max(found)


@dataclass(frozen=True, slots=True)
class _Side:
    """The results of one side that are judged by, with how far their samples usually lie apart."""

    logs: Logs
    tamed: Logs
    level: float
    scatter: float  # robust standard deviation
    spread: float | None

    @classmethod
    def of(cls, seen: Seen, where: slice) -> _Side:
        """Leave out what scattered far more than the calmest third, if enough is left."""
        logs, tamed, spread = seen.logs[where], seen.tamed[where], None
        if seen.spreads is not None and seen.spreads[where].size:
            here = seen.spreads[where]
            calm = here <= CALM * np.sort(here)[(len(here) - 1) // 3]
            if int(calm.sum()) < SETTLED:
                calm[:] = True
            logs, tamed, spread = logs[calm], tamed[calm], median(here[calm])
        level = median(logs)
        return cls(logs, tamed, level, MAD_TO_SIGMA * median(np.abs(logs - level)), spread)


def _needed(scatter: float, strictness: Strictness, *, is_young: bool) -> float:
    """Give the least change: a small one, and one to a young level, must leave the noise clearly.

    A change that is large enough to act on needs fewer standard deviations once it has lasted.
    """
    clear = max(math.log1p(strictness.least_rel), strictness.min_young_sigmas * scatter)
    if is_young:
        return clear
    relevant = min(math.log1p(strictness.relevance_rel), clear)
    return max(relevant, strictness.min_sigmas * scatter)


def _scatter(before: _Side, after: _Side) -> float:
    """Take the noisier side; one too short to tell its noise has its samples' instead.

    Where even its few results lie far apart, as those of a burst of outliers do, they count.
    """
    sides = [side for side in (before, after) if len(side.logs) >= TELLING]
    known = [side.scatter for side in sides or (before, after)]
    if len(sides) == 1:
        short = before if sides[0] is after else after
        if before.spread and after.spread:
            known.append(known[0] * max(before.spread, after.spread) / (sides[0].spread or 1.0))
        if short.scatter > FAR_APART * max(known):
            known.append(short.scatter)
    return max(known)
