"""Exact rank statistics of two samples, free of any assumption on the noise but independence.

The null distribution of Mann and Whitney's U is a Gaussian binomial coefficient, so it is counted
instead of simulated: nothing here is random. A p-value is never 0 (one is added to the count of
arrangements at least as extreme and to their total).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_EXACT_CELLS = 2500  # size product up to which U is counted exactly


@lru_cache(maxsize=4096)
def _cumulative_counts(m: int, n: int) -> NDArray[np.float64]:
    """Count the arrangements with U <= u, for u = 0..m*n.

    The product over i = 1..m of (1 - q^(n+i)) / (1 - q^i), coefficient by coefficient. Low
    coefficients depend on lower ones only, so the tail that a p-value needs is exact in float64.
    """
    size = m * n + 1
    counts = np.zeros(size)
    counts[0] = 1.0
    for i in range(1, m + 1):
        product = counts.copy()
        product[n + i :] -= counts[: max(size - n - i, 0)]
        padded = np.zeros(-(-size // i) * i)
        padded[:size] = product
        counts = padded.reshape(-1, i).cumsum(axis=0).ravel()[:size]
    cumulative: NDArray[np.float64] = counts.cumsum()
    cumulative.flags.writeable = False
    return cumulative


def rank_p_value(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Give the two-sided p-value of `a` and `b` having one distribution; ties count half."""
    cells = len(a) * len(b)
    ordered = b.copy()
    ordered.sort()
    lost = ordered.searchsorted(a) + ordered.searchsorted(a, "right")  # in halves
    wins = cells - 0.5 * float(lost.sum())
    u = min(wins, cells - wins)
    if cells > MAX_EXACT_CELLS:
        return _normal_p_value(u, len(a), len(b))
    cumulative = _cumulative_counts(*sorted((len(a), len(b))))
    total = float(cumulative[-1])
    return min(1.0, (2.0 * float(cumulative[math.ceil(u)]) + 1.0) / (total + 1.0))


def _normal_p_value(u: float, m: int, n: int) -> float:
    """Approximate the p-value of a large sample, continuity corrected, by its smallest if 0."""
    deviation = math.sqrt(m * n * (m + n + 1) / 12.0)
    p_value = 2.0 * float(ndtr((u + 0.5 - m * n / 2.0) / deviation))
    return min(1.0, max(p_value, math.ulp(0.0)))


def shift_interval(
    a: NDArray[np.float64], b: NDArray[np.float64], confidence: float
) -> tuple[float, float, float]:
    """Estimate how far `b` lies above `a`: centre, low, high (Hodges and Lehmann).

    Source: Hollander, Wolfe, Chicken, Nonparametric Statistical Methods (2013), section 4.3.
    The interval covers the shift with at least `confidence` where the samples allow it; too small
    a sample gives the whole range of the differences.
    """
    differences = np.sort((b[None, :] - a[:, None]).ravel())
    cells = len(differences)
    cut = _tail_cut(len(a), len(b), (1.0 - confidence) / 2.0)
    low, high = float(differences[cut]), float(differences[cells - 1 - cut])
    return float(np.median(differences)), low, high


def _tail_cut(m: int, n: int, tail: float) -> int:
    """Count the differences to drop at each end so that a tail holds at most `tail`."""
    cells = m * n
    if cells > MAX_EXACT_CELLS:
        deviation = math.sqrt(cells * (m + n + 1) / 12.0)
        return max(math.floor(cells / 2.0 + float(ndtri(tail)) * deviation) - 1, 0)
    cumulative = _cumulative_counts(*sorted((m, n)))
    within = int(np.searchsorted(cumulative / cumulative[-1], tail, side="right"))
    return max(within - 1, 0)
