"""Find where a series changed its level, and what the change belongs to.

Three steps: take out what runner, environment and clocks explain; cut the rest into levels; look
for the levels of what was explained. Nothing is random, a rising and a falling series are treated
alike, and what makes a change good or bad is not known here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from db.explained import clock_effect, identity_effect, switches
from db.partition import MIN_SEGMENT, Logs, median
from db.segmentation import REACH, Boundary, Seen, Strictness, judge, segment, segment_many
from db.series import Labels, Series, SeriesInputError, usable_series

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import ArrayLike

__all__ = ["Cause", "ChangePoint", "Observed", "SeriesInputError", "detect", "detect_many"]

Cause = Literal["code", "dependency", "environment", "clock", "hardware", "noise", "unknown"]

RESTLESS = 3.0  # times the spread before, from where a run is disturbed
MIN_RESULTS = 6  # two levels of three
# A clock has no noise of its own, so a short run of one value is no level yet.
CLOCK_STRICTNESS = Strictness(min_segment=8)


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


def detect(
    values: ArrayLike,
    *,
    spread: ArrayLike | None = None,
    covariates: Mapping[str, ArrayLike] | None = None,
    epochs: Sequence[Hashable] | None = None,
    runners: Sequence[Hashable] | None = None,
    dependencies: Sequence[Hashable] | None = None,
) -> list[ChangePoint]:
    """Find the change points of one series, in order; quadratic in its length.

    Parameters
    ----------
    values : [n] float, in the order of the commits. A value that is missing, not finite or not
        above 0 is a gap.
    spread : [n] float, how far each value's samples lie apart, in the values' unit. A result that
        scattered far more than its neighbours did is left out.
    covariates : name to [n] float, clocks and the like: what, moving by the same ratio, explains.
    epochs : [n], the runner environment of each value.
    runners : [n], the runner of each value.
    dependencies : [n], what the code of each value was run with, such as `torch 2.11`.

    A change is `environment`, `hardware`, `dependency` or `clock` where one of those moved with it;
    `noise` where the samples of the new level lie as far apart as the levels do, and did not
    before; `code` where what was recorded did not move, and `unknown` where nothing was recorded.

    Raises
    ------
    SeriesInputError
        An array is not one-dimensional or its length is not that of the values.
    """
    return detect_many([Observed(values, spread, covariates, epochs, runners, dependencies)])[0]


@dataclass(frozen=True, slots=True)
class Observed:
    """The arguments of `detect` for one of many series."""

    values: ArrayLike
    spread: ArrayLike | None = None
    covariates: Mapping[str, ArrayLike] | None = None
    epochs: Sequence[Hashable] | None = None
    runners: Sequence[Hashable] | None = None
    dependencies: Sequence[Hashable] | None = None


def detect_many(observed: Sequence[Observed]) -> list[list[ChangePoint]]:
    """Find the change points of many series, each as `detect` does, faster than one by one."""
    usable = [
        usable_series(
            one.values,
            one.spread,
            one.covariates or {},
            Labels(one.epochs, one.runners, one.dependencies),
        )
        for one in observed
    ]
    enough = [series for series in usable if len(series.logs) >= MIN_RESULTS]
    effects = [_explain(series) for series in enough]
    rests = [
        series.logs - sum((effect.curve for effect in explained), np.zeros_like(series.logs))
        for series, explained in zip(enough, effects, strict=True)
    ]
    levels = segment_many(rests, [series.spreads for series in enough], Strictness())
    points = (_points(*one) for one in zip(enough, effects, rests, levels, strict=True))
    return [next(points) if len(series.logs) >= MIN_RESULTS else [] for series in usable]


def _points(
    series: Series, effects: Sequence[_Effect], rest: Logs, levels: list[Boundary]
) -> list[ChangePoint]:
    """Tell the levels that are explained from those that are left."""
    found: dict[int, ChangePoint] = {}
    for effect in effects:
        found.update(_explained_points(series, effect, rest, levels))
    cause: Cause = "code" if series.is_witnessed else "unknown"
    spans = _spans([boundary.index for boundary in levels], len(rest))
    # What is left after all that is explained outweighs it where both meet.
    for boundary, span in zip(levels, spans, strict=True):
        told: Cause = "noise" if _is_noise(series, span, boundary.shift) else cause
        point = _point(series, rest, span, boundary.p_value, told)
        found[point.index] = point
    return [found[index] for index in sorted(found)]


def _is_noise(series: Series, span: tuple[int, int, int], shift: float) -> bool:
    """Whether the runs themselves became restless by as much as the level moved."""
    if series.spreads is None:
        return False
    start, index, end = span
    before = median(series.spreads[max(start, index - REACH) : index])
    after = median(series.spreads[index : min(end, index + REACH)])
    return after >= RESTLESS * before and after >= abs(shift)


@dataclass(frozen=True, slots=True)
class _Effect:
    """A curve that something other than the code explains, and where its levels begin."""

    curve: Logs
    starts: list[int]
    cause: Cause


def _explain(series: Series) -> list[_Effect]:
    """Find what environments, runners and clocks explain, each of what the former left."""
    rest, effects = series.logs, []
    identities: list[tuple[list[Hashable] | None, Cause]] = [
        (series.epochs, "environment"),
        (series.runners, "hardware"),
        (series.dependencies, "dependency"),
    ]
    for labels, cause in identities:
        starts = switches(labels or [])
        if labels is not None and starts:
            effects.append(_Effect(identity_effect(rest, labels), starts, cause))
            rest = rest - effects[-1].curve
    for clock in series.clocks:
        curve = clock_effect(rest, clock)
        if curve is not None:
            starts = [boundary.index for boundary in segment(curve, CLOCK_STRICTNESS)]
            effects.append(_Effect(curve, starts, "clock"))
            rest = rest - curve
    return effects


def _explained_points(
    series: Series, effect: _Effect, rest: Logs, levels: list[Boundary]
) -> dict[int, ChangePoint]:
    """Report the starts of an effect at which the level really changed."""
    logs = rest + effect.curve
    seen = Seen(logs, logs, series.spreads)
    edges = sorted({*effect.starts, *(boundary.index for boundary in levels)})
    points = {}
    for span in _spans(edges, len(logs)):
        boundary = judge(seen, span, Strictness())
        if span[1] in effect.starts and boundary.strength >= 1.0:
            point = _point(series, logs, span, boundary.p_value, effect.cause)
            points[point.index] = point
    return points


def _spans(edges: list[int], size: int) -> list[tuple[int, int, int]]:
    """Give each edge with the edges beside it."""
    around = [0, *edges, size]
    return list(zip(around, around[1:], around[2:], strict=False))


def _point(
    series: Series, logs: Logs, span: tuple[int, int, int], p_value: float, cause: Cause
) -> ChangePoint:
    """Describe a boundary in the values' unit, as it looks under what holds after it."""
    start, index, end = span
    before = logs[max(start, index - REACH) : index]
    after = logs[index : min(end, index + REACH)]
    others = median((series.logs - logs)[index : index + MIN_SEGMENT])
    low, high = median(before) + others, median(after) + others
    return ChangePoint(
        index=_first_of_level(series, span),
        before=float(np.exp(low)),
        after=float(np.exp(high)),
        relative_change=float(np.expm1(high - low)),
        p_value=p_value,
        cause=cause,
    )


def _first_of_level(series: Series, span: tuple[int, int, int]) -> int:
    """Give where a level begins: with what was left out just before it, if that lies there.

    Such a result is too uncertain to show a change; where one is shown it tells its side.
    """
    start, index, end = span
    low = median(series.logs[max(start, index - REACH) : index])
    high = median(series.logs[index : min(end, index + REACH)])
    first = int(series.indices[index])
    for place in range(first - 1, int(series.indices[index - 1]), -1):
        if np.isnan(series.given[place]):
            continue
        if abs(series.given[place] - high) >= abs(series.given[place] - low):
            break
        first = place
    return first
