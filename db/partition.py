"""Propose where a series of log values may change its level: penalised least squares, generously.

Lone outliers are pulled in first, so that one wild result is no level. Many series are cut in one
pass, because the work is a loop over results whatever their number of series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Logs = NDArray[np.float64]

MIN_SEGMENT = 3  # results of a level before it is one
PENALTY = 3.0  # of a boundary, in log(n) noise variances
CLIP_SIGMAS = 3.0  # how far a lone result may lie from its neighbours when proposing
MIN_NOISE = 1e-4  # of the log; asv rounds its statistics to about five digits
MAD_TO_SIGMA = 1.4826  # of a normal distribution
FEW = 8  # series up to which each is cut by itself, a few ends at once
ENDS_AT_ONCE = 16
TOO_LATE = np.where(np.tri(ENDS_AT_ONCE, k=-1, dtype=np.bool_), 0.0, np.inf)  # by end and start
LEAST_WEIGHT = 1e-300
BATCH_CELLS = 16_384  # results that are cut together: their costs fit the second-level cache


def propose(logs: Logs, min_segment: int = MIN_SEGMENT, spreads: Logs | None = None) -> list[int]:
    """Propose boundaries for one series; quadratic in its length."""
    return propose_many([Tamed.of(logs, spreads)], min_segment)[0]


def propose_many(series: Sequence[Tamed], min_segment: int = MIN_SEGMENT) -> list[list[int]]:
    """Propose boundaries for many series, those of about one length together."""
    order = sorted(range(len(series)), key=lambda index: len(series[index].logs))
    found: list[list[int]] = [[] for _ in series]
    while order:
        longest = max(len(series[order[-1]].logs), 1)
        taken = order[-max(BATCH_CELLS // longest, 1) :]
        del order[-len(taken) :]
        starts = _Batch.of([series[index] for index in taken]).best_starts(min_segment)
        for row, index in enumerate(taken):
            found[index] = _walk_back(starts[row], len(series[index].logs))
    return found


@dataclass(frozen=True, slots=True)
class Tamed:
    """A series without lone outliers; results whose samples lay far apart weigh less."""

    logs: Logs
    weights: Logs | None  # None where each is 1
    noise: float  # of a calm result

    @classmethod
    def of(cls, logs: Logs, spreads: Logs | None = None) -> Tamed:
        """Pull lone outliers in; `spreads` say how far the samples around each result lay apart."""
        weights = None if spreads is None or not len(logs) else _weights(spreads)
        root = np.ones(len(logs)) if weights is None else np.sqrt(weights)
        noise = noise_of(logs, root)
        return cls(pull_in_outliers(logs, noise / root), weights, noise)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Series that are cut together, padded to the longest."""

    sums: Logs  # [series, 1 + longest] of the weighed values before each place
    weights: Logs | None  # the same of the weights; None where each is 1
    penalties: Logs  # [series]

    @classmethod
    def of(cls, parts: Sequence[Tamed]) -> _Batch:
        """Scale, weigh and add up."""
        longest = max(len(part.logs) for part in parts)
        sums = np.zeros((len(parts), 1 + longest))
        counts = np.tile(np.arange(1 + longest, dtype=np.float64), (len(parts), 1))
        for row, part in enumerate(parts):
            size = len(part.logs)
            if not size:
                continue
            scaled = (part.logs - np.average(part.logs, weights=part.weights)) / part.noise
            if part.weights is not None:
                scaled *= part.weights
                counts[row, 1 : 1 + size] = part.weights.cumsum()
                counts[row, 1 + size :] += counts[row, size] - size
            sums[row, 1 : 1 + size] = scaled.cumsum()
        is_weighed = any(part.weights is not None for part in parts)
        penalties = PENALTY * np.log([max(len(part.logs), 1) for part in parts])
        return cls(sums, counts if is_weighed else None, penalties)

    def best_starts(self, min_segment: int) -> NDArray[np.int64]:
        """Give for each series and each end where the last of the best levels up to it begins.

        Source: Jackson et al., An algorithm for optimal partitioning of data on an interval (2005).
        """
        if len(self.sums) <= FEW:
            every = range(len(self.sums))
            return np.stack([self._starts_of_one(row, min_segment) for row in every])
        return self._starts_of_all(min_segment)

    def _starts_of_all(self, min_segment: int) -> NDArray[np.int64]:
        """Go from end to end, all series at once."""
        sums, weights = self.sums, self.weights
        size = sums.shape[1] - 1
        # best[:, t] is the least cost of the first t values, less their sum of squares.
        best = np.full_like(sums, np.inf)
        best[:, 0] = 0.0
        starts = np.zeros(sums.shape, dtype=np.int64)
        lengths = np.arange(size, -1, -1, dtype=np.float64)
        rows = np.arange(len(sums))
        for end in range(min_segment, size + 1):
            last = end - min_segment + 1
            gains = sums[:, end, None] - sums[:, :last]
            gains *= gains
            if weights is None:
                gains /= lengths[size - end : size - end + last]
            else:
                gains /= weights[:, end, None] - weights[:, :last]
            np.subtract(best[:, :last], gains, out=gains)
            chosen = gains.argmin(axis=1)
            best[:, end], starts[:, end] = gains[rows, chosen] + self.penalties, chosen
        return starts

    def _starts_of_one(self, row: int, min_segment: int) -> NDArray[np.int64]:
        """Take some ends at once, as calls cost more than the work in them: the same, bit by bit.

        Starts before the first of these ends serve all of them. Those among them are looked at
        afterwards: it is seldom that a level so short is best, and then they are gone through.
        """
        sums, size, penalty = self.sums[row], self.sums.shape[1] - 1, float(self.penalties[row])
        best = np.full(1 + size, np.inf)
        best[0] = 0.0
        starts = np.zeros(1 + size, dtype=np.int64)
        rows = np.arange(ENDS_AT_ONCE)
        lengths = self._lengths(row)
        for first in range(min_segment, size + 1, ENDS_AT_ONCE):
            after = min(first + ENDS_AT_ONCE, size + 1)
            last, known = after - min_segment, first - min_segment + 1
            gains = sums[first:after, None] - sums[:last]
            gains *= gains
            gains /= lengths(first, after, last)
            costs = best[:known] - gains[:, :known]
            chosen = costs.argmin(axis=1)
            lowest = costs[rows[: len(costs)], chosen]
            best[first:after] = lowest + penalty
            young = best[known:last] - gains[:, known:]
            young += TOO_LATE[: len(young), : young.shape[1]]
            if (young < lowest[:, None]).any():
                costs_before = best[known:first].tolist()
                found = _gone_through(costs_before, gains[:, known:], lowest.tolist(), penalty)
                best[first:after] = costs_before[min_segment - 1 :]
                for place, start in found.items():
                    chosen[place] = known + start
            starts[first:after] = chosen
        return starts

    def _lengths(self, row: int) -> Callable[[int, int, int], Logs]:
        """Give what tells the lengths, or weights, from the first starts to each of some ends.

        Those from a start that is later than the end are no lengths, and above 0.
        """
        size = self.sums.shape[1] - 1
        if self.weights is not None:
            weights = self.weights[row]
            return lambda first, after, last: np.maximum(
                weights[first:after, None] - weights[:last], LEAST_WEIGHT
            )
        falling = np.maximum(np.arange(size, -size, -1, dtype=np.float64), 1.0)
        to_end = sliding_window_view(falling, max(size, 1))  # row `size - end` is of `end`
        return lambda first, after, last: to_end[size - after + 1 : size - first + 1][::-1, :last]


def _gone_through(
    costs: list[float], gains: Logs, lowest: Sequence[float], penalty: float
) -> dict[int, int]:
    """Give the starts among some ends that are best for one of them; append each end's cost."""
    found = {}
    for place, (low, row) in enumerate(zip(lowest, gains.tolist(), strict=True)):
        least = low
        for start, (cost, gain) in enumerate(zip(costs[:place], row, strict=False)):
            if cost - gain < least:
                least, found[place] = cost - gain, start
        costs.append(least + penalty)
    return found


def _weights(spreads: Logs) -> Logs:
    """Let a stretch of results weigh less the wider their samples lay apart; a calm one has 1."""
    weights: Logs = np.minimum(1.0, (np.quantile(spreads, 0.25) / spreads) ** 2)
    return weights


def _walk_back(starts: NDArray[np.int64], end: int) -> list[int]:
    """Give the boundaries of the best levels up to `end`."""
    boundaries = []
    while end > 0:
        end = int(starts[end])
        boundaries.append(end)
    return boundaries[-2::-1]


def noise_of(logs: Logs, calmness: Logs) -> float:
    """Estimate the noise of a calm result from neighbours, so that levels do not count."""
    steps = np.abs(np.diff(logs)) * np.minimum(calmness[1:], calmness[:-1])
    usual = median(steps) if len(steps) else 0.0
    return max(MIN_NOISE, MAD_TO_SIGMA * usual / float(np.sqrt(2.0)))


def pull_in_outliers(logs: Logs, noise: Logs) -> Logs:
    """Pull lone outliers in to a few sigmas from the median of five; a level of three stays."""
    middle = rolling_median(logs, 5)
    return np.clip(logs, middle - CLIP_SIGMAS * noise, middle + CLIP_SIGMAS * noise)


def rolling_median(values: Logs, width: int) -> Logs:
    """Give the median around each value; at the ends of what there is, gaps left out."""
    padded = np.pad(values, width // 2, constant_values=np.nan)
    ordered = np.sort(sliding_window_view(padded, width), axis=1)
    known = (~np.isnan(ordered)).sum(axis=1)
    rows = np.arange(len(values))
    middle: Logs = (ordered[rows, np.maximum(known - 1, 0) // 2] + ordered[rows, known // 2]) / 2.0
    return middle


def median(values: Logs) -> float:
    """Give the median; far quicker than numpy's on the short arrays here."""
    ordered = values.copy()
    ordered.sort()
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0)
