"""Fit time = t0 + bytes / bandwidth over the contexts of one case, and refuse where it lies.

Times scatter by a share of themselves, so each point is weighed by its own time and t0, which the
short contexts tell, is not drowned by the long ones. A fit is refused where a straight line would
begin below zero, where the points bend, or where they lie too far from any line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

from db.evidence import LineFit
from db.numbers import digits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

MIN_POINTS = 4  # two parameters, and two points to contradict them
CONFIDENCE = 0.95
NEGATIVE_T0 = 0.02  # share of the longest time by which a line may begin below zero
BEND_CONFIDENCE = 0.99  # that the points bend
MIN_BEND = 0.02  # largest relative residual that is no bend worth naming
MAX_RESIDUAL = 0.15  # relative; a point further off is not described
ON_THE_LINE = 0.03  # of the longest time: how close the others must lie to call one point off
OFF_THE_LINE = 0.15  # relative departure that is called off


@dataclass(frozen=True, slots=True)
class OffTheLine:
    """One point that leaves the line of all others."""

    index: int
    ratio: float  # its time over that of the line


@dataclass(frozen=True, slots=True)
class _Weighted:
    """A least-squares solution with each point weighed by its own time."""

    coefficients: Vector  # of time over bytes / largest bytes, rising powers
    errors: Vector  # standard errors; nan without degrees of freedom
    residuals: Vector  # relative to the measured time
    degrees: int


def fit_line(label: str, num_bytes: Vector, times_s: Vector) -> LineFit:
    """Fit the line with its intervals, or give the reason why there is none."""
    refused = refusal(num_bytes, times_s)
    if refused is not None:
        return LineFit(label, len(times_s), None, None, None, None, None, None, refused)
    line = _weighted(num_bytes, times_s, powers=2)
    half = float(stdtrit(line.degrees, 0.5 + CONFIDENCE / 2.0)) * line.errors
    t0, slope = (float(value) for value in line.coefficients)
    scale = float(num_bytes.max()) / 1e9  # GB that `slope` seconds stand for
    slowest, fastest = slope + float(half[1]), slope - float(half[1])
    return LineFit(
        label=label,
        n_points=len(times_s),
        t0_ms=t0 * 1e3,
        t0_low_ms=(t0 - float(half[0])) * 1e3,
        t0_high_ms=(t0 + float(half[0])) * 1e3,
        bandwidth_gb_s=scale / slope,
        bandwidth_low_gb_s=scale / slowest,
        bandwidth_high_gb_s=scale / fastest if fastest > 0.0 else None,
    )


def refusal(num_bytes: Vector, times_s: Vector) -> str | None:
    """Say why no straight line describes the points; None where one does."""
    distinct = len(np.unique(num_bytes))
    if distinct < MIN_POINTS:
        return f"expected {MIN_POINTS} contexts or more, got {distinct}"
    t0, slope = straight_line(num_bytes, times_s)
    line = _weighted(num_bytes, times_s, powers=2)
    furthest = float(np.abs(line.residuals).max())
    reasons = []
    # Either may round to just above zero where all times are alike.
    if min(slope, float(line.coefficients[1])) <= 0.0:
        reasons.append("the time does not grow with the bytes")
    if t0 < -NEGATIVE_T0 * float(times_s.max()):
        reasons.append(
            f"t0 < 0: a straight line through the {len(times_s)} points begins at "
            f"{digits(t0 * 1e3, 3)} ms"
        )
    if furthest > MIN_BEND and _bends(num_bytes, times_s):
        reasons.append("the points bend")
    if furthest > MAX_RESIDUAL:
        reasons.append(f"a point lies {furthest:.0%} off the best line")
    return "; ".join(reasons) or None


def straight_line(num_bytes: Vector, times_s: Vector) -> tuple[float, float]:
    """Give intercept and slope of the plain least-squares line, every point alike."""
    x = num_bytes - num_bytes.mean()
    slope = float((x * times_s).sum() / (x * x).sum())
    return float(times_s.mean()) - slope * float(num_bytes.mean()), slope


def fixed_part(num_bytes: Vector, times_s: Vector) -> float:
    """Give the seconds that the shortest points leave for what does not grow with the bytes."""
    return float(_weighted(num_bytes, times_s, powers=2).coefficients[0])


def off_the_line(num_bytes: Vector, times_s: Vector) -> OffTheLine | None:
    """Find the one point that leaves the line of all others, if the others are on one."""
    if len(np.unique(num_bytes)) < MIN_POINTS:
        return None
    best, closest = None, ON_THE_LINE
    for index in range(len(times_s)):
        others = np.arange(len(times_s)) != index
        t0, slope = straight_line(num_bytes[others], times_s[others])
        residuals = times_s[others] - t0 - slope * num_bytes[others]
        apart = float(np.abs(residuals).max() / times_s[others].max())
        predicted = t0 + slope * float(num_bytes[index])
        if apart <= closest and predicted > 0.0:
            best, closest = OffTheLine(index, float(times_s[index]) / predicted), apart
    return best if best is not None and abs(best.ratio - 1.0) >= OFF_THE_LINE else None


def _bends(num_bytes: Vector, times_s: Vector) -> bool:
    """Whether a square term stands out from the scatter that it leaves."""
    curve = _weighted(num_bytes, times_s, powers=3)
    if curve.degrees < 1:
        return False
    quantile = float(stdtrit(curve.degrees, 0.5 + BEND_CONFIDENCE / 2.0))
    return bool(abs(curve.coefficients[2]) > quantile * curve.errors[2])


def _weighted(num_bytes: Vector, times_s: Vector, powers: int) -> _Weighted:
    columns = (num_bytes / num_bytes.max())[:, None] ** np.arange(powers) / times_s[:, None]
    inverse = np.linalg.pinv(columns)
    coefficients = inverse @ np.ones_like(times_s)
    residuals = 1.0 - columns @ coefficients
    degrees = len(times_s) - powers
    variance = float((residuals**2).sum()) / degrees if degrees > 0 else np.nan
    errors = np.sqrt(variance * (inverse**2).sum(axis=1))
    return _Weighted(coefficients, errors, residuals, degrees)
