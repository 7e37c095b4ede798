"""Cut a series of log values into levels: propose many boundaries, keep those that hold up.

`propose` is generous: penalised least squares on values whose lone outliers were pulled in.
`judge` is strict and looks at the values as they are: a boundary stays if the levels differ
relevantly, beyond the noise on both sides, and by a rank test. The weakest boundary falls first
and its neighbours are judged again without it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from db.rank_test import rank_p_value

Logs = NDArray[np.float64]

MIN_SEGMENT = 3  # results of a level before it is one
REACH = 30  # results on each side of a boundary that are looked at
PENALTY = 3.0  # of a boundary, in log(n) noise variances
CLIP_SIGMAS = 3.0  # how far a lone result may lie from its neighbours when proposing
MIN_NOISE = 1e-4  # of the log; asv rounds its statistics to about five digits
MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Strictness:
    """What a boundary must show to stay."""

    relevance_rel: float = 0.02  # least relative change of the level
    min_sigmas: float = 2.0  # least change in robust standard deviations of either side
    max_p_value: float = 5e-4  # of the rank test
    min_segment: int = MIN_SEGMENT


@dataclass(frozen=True, slots=True)
class Boundary:
    """A candidate: where a level may begin, and what speaks for it."""

    index: int
    shift: float  # of the log level
    p_value: float
    strength: float  # 1 or more: it stays


def segment(logs: Logs, strictness: Strictness) -> list[Boundary]:
    """Find the boundaries between levels, in order."""
    proposed = propose(logs, strictness.min_segment)
    known: dict[tuple[int, int, int], Boundary] = {}
    while proposed:
        edges = [0, *proposed, len(logs)]
        spans = list(zip(edges, edges[1:], edges[2:], strict=False))
        for span in spans:
            if span not in known:
                known[span] = judge(logs, span, strictness)
        weakest = min((known[span] for span in spans), key=lambda found: found.strength)
        if weakest.strength >= 1.0:
            return [known[span] for span in spans]
        proposed.remove(weakest.index)
    return []


def propose(logs: Logs, min_segment: int = MIN_SEGMENT) -> list[int]:
    """Propose boundaries by exact penalised least squares; quadratic in the length.

    Source: Jackson et al., An algorithm for optimal partitioning of data on an interval (2005).
    """
    size = len(logs)
    noise = noise_of(logs)
    scaled = pull_in_outliers(logs, noise)
    scaled = (scaled - scaled.mean()) / noise
    sums = np.concatenate(([0.0], scaled.cumsum()))
    penalty = PENALTY * float(np.log(size))
    # best[t] is the least cost of the first t values, less their sum of squares.
    best = np.full(size + 1, np.inf)
    best[0] = 0.0
    starts = np.zeros(size + 1, dtype=np.int64)
    lengths = np.arange(size, -1, -1, dtype=np.float64)
    for end in range(min_segment, size + 1):
        last = end - min_segment + 1
        gains = sums[end] - sums[:last]
        gains *= gains
        gains /= lengths[size - end : size - end + last]
        costs = best[:last] - gains
        start = int(costs.argmin())
        best[end], starts[end] = costs[start] + penalty, start
    boundaries = []
    while size > 0:
        size = int(starts[size])
        boundaries.append(size)
    return boundaries[-2::-1]


def judge(logs: Logs, span: tuple[int, int, int], strictness: Strictness) -> Boundary:
    """Weigh the boundary in the middle of `span` by the values close to it."""
    start, index, end = span
    before = logs[max(start, index - REACH) : index]
    after = logs[index : min(end, index + REACH)]
    shift = median(after) - median(before)
    if min(len(before), len(after)) < strictness.min_segment:
        return Boundary(index, shift, 1.0, 0.0)
    p_value = rank_p_value(before, after)
    needed = max(
        float(np.log1p(strictness.relevance_rel)),
        strictness.min_sigmas * _scatter(before, after),
    )
    certainty = float(np.log(p_value) / np.log(strictness.max_p_value))
    return Boundary(index, shift, p_value, min(abs(shift) / needed, certainty))


def noise_of(logs: Logs) -> float:
    """Estimate the noise of a series from neighbours, so that its levels do not count."""
    steps = median(np.abs(np.diff(logs))) if len(logs) > 1 else 0.0
    return max(MIN_NOISE, MAD_TO_SIGMA * steps / float(np.sqrt(2.0)))


def pull_in_outliers(logs: Logs, noise: float) -> Logs:
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
    ordered = np.sort(values)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2.0)


def _scatter(before: Logs, after: Logs) -> float:
    """Take the noisier side; a side too short to tell its noise is not asked."""
    sides = [side for side in (before, after) if len(side) >= 5] or [before, after]
    return max(MAD_TO_SIGMA * median(np.abs(side - median(side))) for side in sides)
