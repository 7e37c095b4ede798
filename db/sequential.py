"""Decide between two commits while pairs of fresh measurements come in, with stated error.

Each pair is one process of either commit, run one after the other; its log ratio is judged. Looks
are few and named before anything runs. Each spends its share of `alpha`, so that over all looks two
equal commits are called different with at most that probability (Bonferroni, Student's t on the
log ratios: exact for normal noise, cautious for heavy tails).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import stdtrit

from db.cases import Verdict, jsonable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from db.cases import Direction


@dataclass(frozen=True, slots=True)
class Plan:
    """When is looked, and how much may be wrong."""

    looks: tuple[int, ...] = (4, 6, 8, 12, 16, 24)  # pairs
    alpha: float = 0.01  # of a false verdict over all looks, for each case
    relevance_rel: float = 0.03  # least change worth acting on

    @property
    def confidence(self) -> float:
        """Of the interval at each look."""
        return 1.0 - self.alpha / len(self.looks)

    @property
    def most_pairs(self) -> int:
        """After so many nothing more is measured."""
        return self.looks[-1]


@dataclass(frozen=True, slots=True)
class Decision:
    """Where one case stands after a look; its verdict is inconclusive while pairs are missing."""

    verdict: Verdict
    pairs: int
    relative_change: float
    low: float  # of the relative change, at the confidence of one look
    high: float

    @property
    def is_open(self) -> bool:
        """Whether more pairs might decide it."""
        return self.verdict is Verdict.INCONCLUSIVE

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        plain: dict[str, Any] = jsonable(asdict(self))
        return plain


def decide(
    base: Sequence[float],
    head: Sequence[float],
    plan: Plan,
    direction: Direction = "lower",
) -> Decision:
    """Judge the pairs that are there: changed, unchanged or still open.

    A change is called where the whole interval lies beyond no change and its centre beyond the
    relevance; "no change" where the whole interval lies within the relevance.
    """
    centre, low, high = shift_of(base, head, plan)
    margin = math.log1p(plan.relevance_rel)
    verdict = Verdict.INCONCLUSIVE
    if -margin <= low and high <= margin:
        verdict = Verdict.NO_CHANGE
    elif (low > 0.0 or high < 0.0) and abs(centre) >= margin:
        is_worse = (centre > 0.0) == (direction == "lower")
        verdict = Verdict.REGRESSION if is_worse else Verdict.IMPROVEMENT
    return Decision(verdict, len(base), math.expm1(centre), math.expm1(low), math.expm1(high))


def is_beyond(base: Sequence[float], head: Sequence[float], log_half: float, plan: Plan) -> bool:
    """Whether the shift lies wholly on the far side of `log_half`, which has the shift's sign."""
    _, low, high = shift_of(base, head, plan)
    return low > log_half if log_half > 0.0 else high < log_half


def is_short_of(base: Sequence[float], head: Sequence[float], log_half: float, plan: Plan) -> bool:
    """Whether the shift lies wholly on the near side of `log_half`."""
    _, low, high = shift_of(base, head, plan)
    return high < log_half if log_half > 0.0 else low > log_half


def shift_of(
    base: Sequence[float], head: Sequence[float], plan: Plan
) -> tuple[float, float, float]:
    """Give centre, low and high of the log ratio at the confidence of one look."""
    ratios = np.log(head) - np.log(base)
    centre = float(ratios.mean())
    if len(ratios) < 2:
        return centre, -math.inf, math.inf
    quantile = float(stdtrit(len(ratios) - 1.0, 0.5 + plan.confidence / 2.0))
    half = quantile * float(ratios.std(ddof=1)) / math.sqrt(len(ratios))
    return centre, centre - half, centre + half
