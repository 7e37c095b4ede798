"""How many times the time of one case another takes, and whether that is beyond a margin.

Two grounds carry an interval: the medians of independent processes, and the rounds of one process
that measured both cases; where it did so in turns, drift cancels pair by pair. A process for each
side is no ground: what it was given (memory, core, clock) looks like a difference of the cases.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from scipy.special import bdtr

from db.cases import Policy
from db.evidence import Outcome, Ratio
from db.numbers import count_text, digits
from db.two_samples import MIN_P_VALUE, Shift, by_samples, false_discovery_rates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from db.evidence import EvidencePoint

    Vector = NDArray[np.float64]

POLICY: Final = Policy()
SHOWN: Final = 4  # digits, so that a few percent show their interval
IN_TURNS: Final = "interleaved"  # validity code: one process measured all cases of the suite
MIN_ROUNDS: Final = 6  # fewer leave no 95 % interval for a median


@dataclass(frozen=True, slots=True)
class _Sides:
    """Logs of what two cases took, and what they are."""

    slow: Vector
    fast: Vector
    in_turns: bool  # one of each a round
    ground: str

    def shift(self, offset: float = 0.0) -> Shift:
        """Estimate how far the slow side lies above the fast one, raised by `offset`."""
        if self.in_turns:
            return _by_signs(self.slow - self.fast - offset)
        return by_samples(self.fast + offset, self.slow, POLICY.confidence)


def ratio_of(slow: EvidencePoint, fast: EvidencePoint, margin: float) -> Ratio:
    """Give the time of `slow` over that of `fast`, with the p-value of it lying within `margin`.

    Parameters
    ----------
    margin : ratio, above 1; up to it, or down to its reciprocal, a factor does not matter
    """
    value = slow.time_s / fast.time_s
    sides = _sides(slow, fast)
    if isinstance(sides, str):
        return Ratio(value, None, None, None, sides)
    shift = sides.shift()
    centre = shift.centre if sides.in_turns else math.log(value)
    beyond = math.copysign(math.log(margin), centre)
    return Ratio(
        value=math.exp(centre),
        low=math.exp(min(shift.low, centre)),
        high=math.exp(max(shift.high, centre)),
        p_value=sides.shift(beyond).p_value if abs(centre) > abs(beyond) else 1.0,
        ground=sides.ground,
    )


def judged(ratios: Sequence[Ratio], margin: float) -> list[Ratio]:
    """Say of each ratio whether its factor matters, the false discovery rate of all controlled."""
    tested = [one for one in ratios if one.p_value is not None]
    q_values = iter(false_discovery_rates([one.p_value or 0.0 for one in tested]))
    return [one if one.p_value is None else _judged(one, next(q_values), margin) for one in ratios]


def with_interval(ratio: Ratio) -> str:
    """Write a ratio for people: `1.021 [1.018, 1.025]`."""
    if ratio.low is None or ratio.high is None:
        return digits(ratio.value, SHOWN)
    low, high = digits(ratio.low, SHOWN), digits(ratio.high, SHOWN)
    return f"{digits(ratio.value, SHOWN)} [{low}, {high}]"


def _judged(ratio: Ratio, q_value: float, margin: float) -> Ratio:
    low, high = ratio.low or 0.0, ratio.high or math.inf
    outcome = Outcome.UNDECIDED
    if q_value <= POLICY.fdr:
        outcome = Outcome.MATTERS
    elif 1.0 / margin <= low and high <= margin:
        outcome = Outcome.NO_MATTER
    return replace(ratio, q_value=q_value, outcome=outcome)


def _sides(slow: EvidencePoint, fast: EvidencePoint) -> _Sides | str:
    """Give the logs to compare, or the reason why there are none."""
    processes = (slow.process_samples_s, fast.process_samples_s)
    if any(sample <= 0.0 for side in processes for samples in side for sample in samples):
        return "a sample is not above 0"
    if all(IN_TURNS in side.validity for side in (slow, fast)):
        return _rounds(slow, fast)
    least = min(len(side) for side in processes)
    if least < POLICY.min_processes:
        sides = count_text(least, "process", "processes")
        return f"{sides} a side of the {POLICY.min_processes} needed"
    slow_s, fast_s = (np.asarray([statistics.median(one) for one in side]) for side in processes)
    ground = f"medians of {len(slow_s)} and {len(fast_s)} processes"
    return _Sides(np.log(slow_s), np.log(fast_s), in_turns=False, ground=ground)


def _rounds(slow: EvidencePoint, fast: EvidencePoint) -> _Sides | str:
    processes = (slow.process_samples_s, fast.process_samples_s)
    lengths = [[len(samples) for samples in side] for side in processes]
    if lengths[0] != lengths[1]:
        return f"rounds that do not match: {lengths[0]} and {lengths[1]}"
    num_rounds = sum(lengths[0])
    if num_rounds < MIN_ROUNDS:
        return f"{count_text(num_rounds, 'round')} of the {MIN_ROUNDS} needed"
    slow_s, fast_s = (np.concatenate([np.asarray(one) for one in side]) for side in processes)
    ground = f"{num_rounds} rounds of one process"
    return _Sides(np.log(slow_s), np.log(fast_s), in_turns=True, ground=ground)


def _by_signs(differences: Vector) -> Shift:
    """Estimate the median of paired differences from their signs alone: no noise is assumed.

    Source: Hollander, Wolfe, Chicken, Nonparametric Statistical Methods (2013), section 3.4 to 3.6.
    """
    ordered = np.sort(differences)
    n = len(ordered)
    above = float((ordered > 0.0).sum()) + 0.5 * float((ordered == 0.0).sum())
    p_value = min(1.0, 2.0 * float(bdtr(math.ceil(min(above, n - above)), n, 0.5)))
    tails = [2.0 * float(bdtr(k, n, 0.5)) for k in range(n // 2)]
    cut = max(sum(tail <= 1.0 - POLICY.confidence for tail in tails) - 1, 0)
    low, high = float(ordered[cut]), float(ordered[n - 1 - cut])
    return Shift(float(np.median(ordered)), low, high, max(p_value, MIN_P_VALUE))
