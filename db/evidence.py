"""Records of a diagnosis: what was measured, what it is held against, and what it supports.

Knows nothing of rules, files or databases. Times are in seconds inside and in milliseconds where
they are reported; rates are bytes or FLOP per second inside and GB/s where they are reported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from db.cases import jsonable

if TYPE_CHECKING:
    from collections.abc import Mapping

PeakSource = Literal["measured", "datasheet"]
Bound = Literal["bandwidth", "compute", "launches", "too little parallelism"]


class Status(StrEnum):
    """How far the evidence carries a claim."""

    SUPPORTED = "supported"  # measured here, and it could have come out otherwise
    CONSISTENT = "consistent"  # what was measured agrees, and nothing here tested it
    UNTESTED = "untested"  # nothing measured here decides it


class Outcome(StrEnum):
    """What a tested ratio says of the factor that differs between its two cases."""

    MATTERS = "matters"  # beyond the margin on either side, the false discovery rate controlled
    NO_MATTER = "does not matter"  # the whole interval lies within the margin
    UNDECIDED = "undecided"


class Place(StrEnum):
    """Where on a ladder a factor was read."""

    IN_ORDER = "in the fixed order"  # added to all the factors before it
    ALONE = "alone"  # added to none
    REMOVED = "removed"  # taken from all


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best rates of the machine; None where nobody knows them."""

    read_bytes_per_s: float | None = None
    matmul_flops_per_s: float | None = None
    dtype: str | None = None  # of the matmul rate


@dataclass(frozen=True, slots=True)
class EvidencePoint:
    """One measured case with its work and its counters; None where it was not recorded."""

    benchmark: str
    params: str  # canonical, "context=1024, page_size=16"
    context_tokens: int | None
    time_s: float
    n: int  # samples behind `time_s`
    bytes: int | None = None  # all bytes the case must move
    kv_bytes: int | None = None  # the part that is latent KV
    flops: int | None = None
    stage_seconds: Mapping[str, float] | None = None
    commit_length: float | None = None
    programs: int | None = None  # launched by the dominant kernel
    num_sms: int | None = None
    counters: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    validity: tuple[str, ...] = ()
    version: str | None = None  # of the benchmark; times of two versions are not comparable
    process_samples_s: tuple[
        tuple[float, ...], ...
    ] = ()  # of each process, in order of their start

    @property
    def name(self) -> str:
        """The benchmark with its parameters."""
        return f"{self.benchmark}({self.params})" if self.params else self.benchmark

    @property
    def settings(self) -> dict[str, str]:
        """The parameters by name, values as asv writes them."""
        return dict(item.split("=", 1) for item in self.params.split(", ") if "=" in item)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one run on one machine measured, with the ceilings it is held against."""

    label: str
    gpu: str | None  # None: a run without a GPU
    ceilings: Ceilings
    peak_source: PeakSource | None  # None where `ceilings` is empty
    points: tuple[EvidencePoint, ...]
    power_limit_w: float | None = None
    source: str | None = None  # where numbers stand that were not measured by us
    runs_with: str | None = None  # what its commit decides beside the code: dependencies, runtime
    imposed: str | None = None  # what the machine decides: driver, power limit, clock policy
    device: str | None = None  # which one of its kind


@dataclass(frozen=True, slots=True)
class LineFit:
    """time = t0 + bytes / bandwidth over the contexts of one case, or why it was refused."""

    label: str  # the benchmark and the parameters held fixed
    n_points: int
    t0_ms: float | None
    t0_low_ms: float | None
    t0_high_ms: float | None
    bandwidth_gb_s: float | None
    bandwidth_low_gb_s: float | None
    bandwidth_high_gb_s: float | None
    refused: str | None = None  # the reason; every estimate is None then


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times the time of one case another takes; None where nothing can be said of it."""

    value: float
    low: float | None
    high: float | None
    p_value: float | None  # that the truth lies within the margin
    ground: str  # what the interval rests on, or why there is none
    q_value: float | None = None  # after the correction for all ratios judged together
    outcome: Outcome = Outcome.UNDECIDED


@dataclass(frozen=True, slots=True)
class LadderReading:
    """What one factor is worth at one place of a ladder: the time before over the time after."""

    ladder: str  # the benchmark and the parameters held fixed
    factor: str
    place: Place
    before: EvidencePoint  # without the factor
    after: EvidencePoint  # with it
    ratio: Ratio

    @property
    def context_tokens(self) -> int | None:
        """Committed rows that both cases attend."""
        return self.after.context_tokens

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        return {
            "ladder": self.ladder,
            "context_tokens": self.context_tokens,
            "factor": self.factor,
            "place": self.place.value,
            "before": self.before.params,
            "after": self.after.params,
            "before_ms": self.before.time_s * 1e3,
            "after_ms": self.after.time_s * 1e3,
            **jsonable(asdict(self.ratio)),
        }


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of a diagnosis: a statement, its number, its evidence and its status."""

    name: str  # stable, for programs: "starvation"
    statement: str
    value: float
    unit: str
    evidence: str
    status: Status
    case: str | None = None  # None: the claim is about the whole evidence
    is_alarm: bool = False  # something to act on, as against something to know

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        plain: dict[str, Any] = jsonable(asdict(self))
        return plain


@dataclass(frozen=True, slots=True)
class CaseDiagnosis:
    """Where one case stands against its floors; None where the numbers for it are missing."""

    benchmark: str
    params: str
    context_tokens: int | None
    n: int
    time_ms: float
    commit_length: float | None
    effective_gb_s: float | None  # bytes of the case (`bytes_basis`) over its time
    bytes_basis: str | None  # "all bytes" or "KV bytes alone"
    fraction_of_peak: float | None
    kv_floor_ms: float | None
    kv_floor_ratio: float | None  # time over the KV-read floor
    floor_ms: float | None
    floor_ratio: float | None  # time over the floor
    floor_basis: str | None  # which work against which peak
    bound: Bound | None  # None where the evidence names none
    stage_shares: Mapping[str, float] | None
    version: str | None = None  # of the benchmark


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Every case against its floor, and what the evidence as a whole supports."""

    label: str
    gpu: str | None
    peak_source: PeakSource | None
    cases: tuple[CaseDiagnosis, ...]
    claims: tuple[Claim, ...]
    fits: tuple[LineFit, ...] = ()
    ladder: tuple[LadderReading, ...] = ()

    @property
    def fit(self) -> LineFit | None:
        """The fit over most contexts."""
        return max(self.fits, key=lambda fit: fit.n_points, default=None)

    @property
    def alarms(self) -> tuple[Claim, ...]:
        """The claims that call for action."""
        return tuple(claim for claim in self.claims if claim.is_alarm)

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        return {
            "label": self.label,
            "gpu": self.gpu,
            "peak_source": self.peak_source,
            "cases": [_case_dict(case) for case in self.cases],
            "claims": [claim.to_dict() for claim in self.claims],
            "fit": None if self.fit is None else jsonable(asdict(self.fit)),
            "fits": [jsonable(asdict(fit)) for fit in self.fits],
            "ladder": [reading.to_dict() for reading in self.ladder],
        }


def _case_dict(case: CaseDiagnosis) -> dict[str, Any]:
    """Copy field by field: `asdict` cannot copy a read-only mapping."""
    shares = None if case.stage_shares is None else dict(case.stage_shares)
    plain = {name: getattr(case, name) for name in CaseDiagnosis.__dataclass_fields__}
    return {name: jsonable(value) for name, value in {**plain, "stage_shares": shares}.items()}
