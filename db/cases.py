"""Records of a comparison: cases, their results on one side, and what was concluded.

Knows nothing of statistics, files or databases. `to_dict` gives plain values that strict JSON
can hold: a number that is not finite becomes null.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from db.errors import DbError

if TYPE_CHECKING:
    from collections.abc import Mapping

Direction = Literal["lower", "higher"]
ResultStatus = Literal["ok", "failed", "skipped", "single-sample"]


class DuplicateCaseError(DbError):
    """One side of a comparison holds two results of one case."""


class Verdict(StrEnum):
    """What a comparison concludes about one case."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    NO_CHANGE = "no change"
    INCONCLUSIVE = "inconclusive"
    NOT_ENOUGH_HISTORY = "not enough history"
    FAILED = "failed"
    NEW = "new"
    REMOVED = "removed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, order=True)
class CaseKey:
    """Identity of a case: results with equal keys may be compared."""

    benchmark: str
    version: str
    params: str  # canonical, "context=1024, page_size=16"; empty without parameters
    metric: str
    machine: str
    variant: str

    @property
    def name(self) -> str:
        """The benchmark with its parameters, as people write it."""
        return f"{self.benchmark}({self.params})" if self.params else self.benchmark


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All that is known of one case on one side of a comparison."""

    key: CaseKey
    unit: str
    direction: Direction  # which way is better
    status: ResultStatus
    value: float | None  # the median, in `unit`; None unless something was measured
    samples: tuple[float, ...]  # process medians where `num_processes` is known, else raw samples
    n: int  # raw samples behind `value`
    ci_low: float | None = None
    ci_high: float | None = None
    environment: str | None = None  # label of the runner environment
    noise_rel: float | None = None  # standard deviation of this series' results around their level
    num_processes: int | None = None  # None: the samples' processes are not known


@dataclass(frozen=True, slots=True)
class Policy:
    """What counts as relevant, and how sure a verdict must be."""

    relevance_rel: float = 0.03  # least change worth acting on
    fdr: float = 0.05  # share of false ones tolerated among the flagged cases
    confidence: float = 0.95  # of every interval
    min_samples: int = 4  # raw samples on each side where processes are not known
    min_processes: int = 2  # process medians on each side
    assumed_noise_rel: float = 0.0075  # between runs, where only samples of unknown processes exist
    max_processes: int = 200  # a longer confirmation is not proposed


@dataclass(frozen=True, slots=True)
class CaseComparison:
    """The verdict on one case, with its number, its interval and its reason."""

    key: CaseKey
    unit: str
    direction: Direction
    verdict: Verdict
    base_value: float | None
    head_value: float | None
    relative_change: float | None  # (head - base) / base
    interval_low: float | None  # of the relative change
    interval_high: float | None
    noise_rel: float | None
    n_base: int
    n_head: int
    p_value: float | None
    q_value: float | None  # after the false-discovery-rate correction over all cases
    needed_processes: int | None  # a side, to decide an inconclusive case; None where it cannot be
    environment_differs: bool
    reason: str
    confirmed: bool = False  # only fresh, interleaved data confirm; until then it is screened
    is_deleted: bool = False  # the base's suites have it and the head's do not: measured nowhere

    @property
    def was_at_base(self) -> bool:
        """Whether the base has it, measured or not."""
        return self.base_value is not None or self.is_deleted

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        plain: dict[str, Any] = jsonable(asdict(self))
        return {
            **plain,
            "case": self.key.name,
            "tier": "confirmed" if self.confirmed else "screened",
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """All cases of two commits, the gravest first, and the verdict on the whole."""

    cases: tuple[CaseComparison, ...]
    counts: Mapping[Verdict, int]  # every verdict, zeros included
    verdict: Verdict
    policy: Policy = field(default_factory=Policy)

    @property
    def environment_differs(self) -> bool:
        """Whether any case was measured in two runner environments."""
        return any(case.environment_differs for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        return {
            "verdict": self.verdict.value,
            "counts": {verdict.value: count for verdict, count in self.counts.items()},
            "environment_differs": self.environment_differs,
            "policy": asdict(self.policy),
            "cases": [case.to_dict() for case in self.cases],
        }


def jsonable(value: Any) -> Any:  # noqa: ANN401 - it walks values of any type
    """Replace what strict JSON cannot hold: non-finite numbers, tuples, enums, mappings."""
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value
