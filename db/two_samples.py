"""How far one side of a comparison lies from the other, with an interval and a p-value.

Works on logarithms, so a change is a ratio and a factor of 2 is as far up as down. Three grounds,
each exact under what it assumes: ranks (independent samples of any distribution), Welch's t (few
process medians, normal on the log scale), and a noise floor learned from neighbouring commits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtr, stdtrit

from db.rank_test import rank_p_value, shift_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MIN_RANK_SAMPLES = 8  # a side; below, ranks cannot reach a p-value that survives many cases
NOISE_DEGREES = 9.0  # a learned noise floor is itself an estimate, and real noise has heavy tails
MIN_P_VALUE = 1e-15  # what float64 can still tell from 0; no p-value is 0


@dataclass(frozen=True, slots=True)
class Shift:
    """Change of the log from baseline to contender."""

    centre: float
    low: float
    high: float
    p_value: float


def by_samples(base: NDArray[np.float64], head: NDArray[np.float64], confidence: float) -> Shift:
    """Compare log samples by what they alone can tell: ranks if there are enough, else Welch."""
    if min(len(base), len(head)) >= MIN_RANK_SAMPLES:
        centre, low, high = shift_interval(base, head, confidence)
        return Shift(centre, low, high, max(rank_p_value(base, head), MIN_P_VALUE))
    return _by_welch(base, head, confidence)


def by_noise(centre: float, noise: float, confidence: float) -> Shift:
    """Compare two single results whose own noise is known from elsewhere."""
    return _by_t(centre, math.sqrt(2.0) * noise, NOISE_DEGREES, confidence)


def hull(a: Shift, b: Shift) -> Shift:
    """Keep what both grounds support: the wider interval and the larger p-value."""
    return Shift(a.centre, min(a.low, b.low), max(a.high, b.high), max(a.p_value, b.p_value))


def standard_error(base: NDArray[np.float64], head: NDArray[np.float64]) -> float:
    """Give the standard error of the difference of the means; needs two samples a side."""
    return math.sqrt(_variance_of_mean(base) + _variance_of_mean(head))


def pooled_deviation(base: NDArray[np.float64], head: NDArray[np.float64]) -> float:
    """Give the standard deviation of one sample, from both sides together."""
    squares = sum(float(((side - side.mean()) ** 2).sum()) for side in (base, head))
    return math.sqrt(squares / max(len(base) + len(head) - 2, 1))


def needed_samples(deviation: float, distance: float, confidence: float, limit: int) -> int | None:
    """Count the samples a side whose interval is shorter than `distance`; None beyond `limit`."""
    for n in range(2, limit + 1):
        quantile = float(stdtrit(2.0 * n - 2.0, 0.5 + confidence / 2.0))
        if quantile * deviation * math.sqrt(2.0 / n) < distance:
            return n
    return None


def false_discovery_rates(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Benjamini and Hochberg): q <= 0.05 are 5 % false."""
    order = np.argsort(p_values)[::-1]
    num = len(p_values)
    scaled = np.asarray(p_values, dtype=np.float64)[order] * num / np.arange(num, 0, -1)
    q_values = np.empty(num)
    q_values[order] = np.minimum(np.minimum.accumulate(scaled), 1.0)
    return [float(q) for q in q_values]


def _by_welch(base: NDArray[np.float64], head: NDArray[np.float64], confidence: float) -> Shift:
    """Compare the means of two small samples without assuming equal scatter."""
    a, b = _variance_of_mean(base), _variance_of_mean(head)
    centre = float(head.mean() - base.mean())
    spread = a**2 / (len(base) - 1) + b**2 / (len(head) - 1)
    degrees = (a + b) ** 2 / spread if spread > 0.0 else float(len(base) + len(head) - 2)
    return _by_t(centre, math.sqrt(a + b), degrees, confidence)


def _by_t(centre: float, error: float, degrees: float, confidence: float) -> Shift:
    """Give the t interval around `centre`."""
    half = float(stdtrit(degrees, 0.5 + confidence / 2.0)) * error
    if error > 0.0:
        p_value = 2.0 * float(stdtr(degrees, -abs(centre) / error))
    else:
        p_value = 1.0 if centre == 0.0 else MIN_P_VALUE
    return Shift(centre, centre - half, centre + half, max(p_value, MIN_P_VALUE))


def _variance_of_mean(samples: NDArray[np.float64]) -> float:
    return float(samples.var(ddof=1)) / len(samples)
