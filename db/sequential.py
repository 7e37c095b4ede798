"""Decide between two commits while pairs of fresh measurements come in, with stated error.

Each pair is one process of either commit; its log ratio is judged. Looks are few and named before
anything runs. Each spends its share of `alpha`, so that over all looks two equal commits are called
different with at most that probability (Bonferroni, Student's t on the log ratios: exact for normal
noise, cautious for heavy tails). Cases that are judged at once share it where one is called
changed, so that a pull request of many cases claims no more than one of few.

A search asks less of each commit it tries: at which of two known levels it lies, with as good as no
shift or with that of the bad end. Both are weighed by what they leave unexplained, together with
all that was told before, so that a large change takes two pairs a commit (`Levels`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from scipy.special import stdtrit

from db.cases import Verdict, jsonable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from db.cases import Direction

LEAST_PAIRS: Final = 2  # of a commit that a search tries, so that no single pair names a culprit
NEARER: Final = 0.15  # of the change, that a commit must lie past half-way to either level
CLOCK_REL: Final = 1e-4  # noise that is there even where none is seen


@dataclass(frozen=True, slots=True)
class Plan:
    """When is looked, and how much may be wrong."""

    looks: tuple[int, ...] = (4, 6, 8, 12, 16, 24)  # pairs
    alpha: float = 0.01  # of a false verdict over all looks, for each case; of a change, for all
    relevance_rel: float = 0.03  # least change worth acting on
    num_cases: int = 1  # judged at once, which share `alpha` where one is called changed

    @property
    def confidence(self) -> float:
        """Of the interval at each look."""
        return 1.0 - self.alpha / len(self.looks)

    @property
    def confidence_of_change(self) -> float:
        """Of the interval that must lie beyond no change, at each look."""
        return 1.0 - self.alpha / len(self.looks) / self.num_cases

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


def decide(ratios: Sequence[float], plan: Plan, direction: Direction = "lower") -> Decision:
    """Judge the pairs that are there: changed, unchanged or still open.

    A change is called where the whole interval lies beyond no change and its centre beyond the
    relevance; "no change" where the whole interval lies within the relevance.

    Parameters
    ----------
    ratios : of each pair, the second commit's time over the first one's
    """
    logs = np.log(ratios)
    centre, low, high = _interval(logs, plan.confidence)
    _, surely_above, surely_below = _interval(logs, plan.confidence_of_change)
    margin = math.log1p(plan.relevance_rel)
    verdict = Verdict.INCONCLUSIVE
    if -margin <= low and high <= margin:
        verdict = Verdict.NO_CHANGE
    elif (surely_above > 0.0 or surely_below < 0.0) and abs(centre) >= margin:
        is_worse = (centre > 0.0) == (direction == "lower")
        verdict = Verdict.REGRESSION if is_worse else Verdict.IMPROVEMENT
    return Decision(verdict, len(ratios), math.expm1(centre), math.expm1(low), math.expm1(high))


def _interval(logs: NDArray[np.float64], confidence: float) -> tuple[float, float, float]:
    """Give centre, low and high."""
    centre = float(logs.mean())
    if len(logs) < 2:
        return centre, -math.inf, math.inf
    quantile = float(stdtrit(len(logs) - 1.0, 0.5 + confidence / 2.0))
    half = quantile * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return centre, centre - half, centre + half


@dataclass(slots=True)
class Levels:
    """The two levels of a search, as log ratios to its good end, and how far they scatter.

    Which level new pairs belong to is told by the ratio of marginal likelihoods: normal noise of
    unknown spread, the good level at 0, the bad one where its pairs say. It is stopped at 1 - error
    to error, so a commit at one of the levels is told wrongly with about that probability at most,
    however often it is looked (Wald 1945; simulated with heavier tails in the tests).
    """

    bad: list[float]  # of commits told as changed; those of the bad end to begin with
    good: list[float] = field(default_factory=list)  # of commits told as before

    def tell(self, ratios: Sequence[float], error: float) -> bool | None:
        """Say whether a commit is changed, and keep its pairs once it is told; None is open.

        Parameters
        ----------
        ratios : of each pair so far, the commit's time over the good end's
        error : accepted probability that the answer is wrong
        """
        logs = [math.log(ratio) for ratio in ratios]
        level, mean = sum(self.bad) / len(self.bad), sum(logs) / len(logs)
        if len(logs) < LEAST_PAIRS or abs(mean / level - 0.5) < NEARER:
            return None  # between the levels, as a commit with a part of the change is
        evidence = self._evidence(logs)
        if abs(evidence) < math.log((1.0 - error) / error):
            return None
        is_bad = evidence > 0.0
        (self.bad if is_bad else self.good).extend(logs)
        return is_bad

    def _evidence(self, logs: list[float]) -> float:
        """Give the log of how much more likely the pairs are at the bad level."""
        count = len(self.bad) + len(self.good) + len(logs)
        rest = sum(one * one for one in self.good) + count * CLOCK_REL**2
        if_bad = rest + _scatter([*self.bad, *logs])
        if_good = rest + _scatter(self.bad) + sum(one * one for one in logs)
        informed = math.log1p(len(logs) / len(self.bad))  # more pairs inform the bad level
        return 0.5 * ((count - 1) * math.log(if_good / if_bad) - informed)


def _scatter(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)
