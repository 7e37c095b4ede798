"""Estimate how far one case moved, from the best ground its two sides offer.

In order: a noise floor learned from neighbouring commits; the medians of independent processes;
raw samples of unknown processes, which look more certain than they are and are widened by the
noise that runs usually have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from db import two_samples
from db.numbers import count_text
from db.two_samples import Shift

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from db.cases import CaseResult, Policy

NOISIER_THAN_HISTORY = 2.0  # standard errors, in those of the history, that a run cannot owe to it


@dataclass(frozen=True, slots=True)
class Estimate:
    """The change of a case with what it rests on."""

    shift: Shift  # of the log
    deviation: float  # standard deviation of the log of one process
    ground: str  # what the interval rests on


def noise_floor(base: CaseResult, head: CaseResult) -> float | None:
    """Take the larger of the known floors: neither side may vouch for the other."""
    known = [side.noise_rel for side in (base, head) if side.noise_rel is not None]
    return max(known, default=None)


def missing_history(base: CaseResult, head: CaseResult, policy: Policy) -> str | None:
    """Say which side is too short to be judged; None where both can be."""
    if noise_floor(base, head) is not None:
        return None
    for side, result in (("baseline", base), ("contender", head)):
        if result.status == "single-sample":
            return f"the {side} is a single sample and no noise floor is known"
        by_process = result.num_processes is not None
        least = policy.min_processes if by_process else policy.min_samples
        if len(result.samples) < least:
            noun, plural = ("process", "processes") if by_process else ("sample", "samples")
            held = count_text(len(result.samples), noun, plural)
            return f"the {side} has {held} of the {least} needed and no noise floor is known"
    return None


def estimate(base: CaseResult, head: CaseResult, policy: Policy) -> Estimate:
    """Estimate the change of the log; both sides hold values above 0 and enough history."""
    a, b = np.log(base.samples), np.log(head.samples)
    centre = math.log((head.value or math.nan) / (base.value or math.nan))
    found = _estimate(centre, a, b, _Grounds(base, head, policy))
    shift = found.shift
    spanning = Shift(centre, min(shift.low, centre), max(shift.high, centre), shift.p_value)
    return Estimate(spanning, found.deviation, found.ground)


@dataclass(frozen=True, slots=True)
class _Grounds:
    """What the two sides offer to judge by."""

    base: CaseResult
    head: CaseResult
    policy: Policy

    @property
    def noise(self) -> float | None:
        return noise_floor(self.base, self.head)

    @property
    def has_processes(self) -> bool:
        sides = (self.base, self.head)
        return all(
            side.num_processes is not None and len(side.samples) >= self.policy.min_processes
            for side in sides
        )


def _estimate(
    centre: float, a: NDArray[np.float64], b: NDArray[np.float64], grounds: _Grounds
) -> Estimate:
    confidence, noise = grounds.policy.confidence, grounds.noise
    if noise is not None and not (grounds.has_processes and _is_noisier(a, b, noise)):
        learned = two_samples.by_noise(centre, noise, confidence)
        return Estimate(learned, noise, "the noise floor of neighbouring commits")
    own = two_samples.by_samples(a, b, confidence)
    deviation = two_samples.pooled_deviation(a, b)
    if noise is not None:
        return Estimate(own, deviation, "its own processes, which scatter more than its history")
    if grounds.has_processes:
        return Estimate(own, deviation, "its own processes")
    assumed = grounds.policy.assumed_noise_rel
    widened = two_samples.hull(two_samples.by_noise(centre, assumed, confidence), own)
    ground = f"samples of unknown processes and an assumed noise of {assumed:.2%} between runs"
    return Estimate(widened, max(deviation, assumed), ground)


def _is_noisier(a: NDArray[np.float64], b: NDArray[np.float64], noise: float) -> bool:
    """Whether a run's own scatter is beyond what its history explains."""
    return two_samples.standard_error(a, b) > NOISIER_THAN_HISTORY * math.sqrt(2.0) * noise
