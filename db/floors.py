"""Hold one case against its floors: the least time its bytes and its arithmetic can take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from db.evidence import CaseDiagnosis

if TYPE_CHECKING:
    from db.evidence import Bound, Ceilings, Evidence, EvidencePoint

NEAR_A_CEILING_PCT = 60.0  # of a peak, from where it bounds the case
STARVED_SHARE = 0.5  # of the time some kernel was resident, in which an SM had work
MOSTLY_RESIDENT_PCT = 80.0
RESET_IN_WINDOW = "reset_in_window"  # validity code: counters include work between the samples
ALL_BYTES = "all bytes"
KV_ALONE = "KV bytes alone"


def diagnose_case(point: EvidencePoint, evidence: Evidence) -> CaseDiagnosis:
    """Compute where a case stands against its floors."""
    ceilings = evidence.ceilings
    num_bytes, basis = work(point)
    kv_floor = _over(point.kv_bytes, ceilings.read_bytes_per_s)
    by_bytes = _over(num_bytes, ceilings.read_bytes_per_s)
    by_flops = _over(point.flops, ceilings.matmul_flops_per_s)
    floor = max((time for time in (by_bytes, by_flops) if time is not None), default=None)
    limiting = basis if floor == by_bytes else "FLOP"
    return CaseDiagnosis(
        benchmark=point.benchmark,
        params=point.params,
        context_tokens=point.context_tokens,
        n=point.n,
        time_ms=point.time_s * 1e3,
        commit_length=point.commit_length,
        effective_gb_s=None if num_bytes is None else num_bytes / point.time_s / 1e9,
        bytes_basis=basis,
        fraction_of_peak=_over(by_bytes, point.time_s),
        kv_floor_ms=_scaled(kv_floor, 1e3),
        kv_floor_ratio=_over(point.time_s, kv_floor),
        floor_ms=_scaled(floor, 1e3),
        floor_ratio=_over(point.time_s, floor),
        floor_basis=None if floor is None else f"{limiting} against a {evidence.peak_source} peak",
        bound=bound(point, ceilings),
        stage_shares=_shares(point),
        version=point.version,
    )


def work(point: EvidencePoint) -> tuple[int | None, str | None]:
    """Give the bytes of a case and what they are; all of them where they are known."""
    if point.bytes is not None and point.bytes != point.kv_bytes:
        return point.bytes, ALL_BYTES
    return (None, None) if point.kv_bytes is None else (point.kv_bytes, KV_ALONE)


def bound(point: EvidencePoint, ceilings: Ceilings) -> Bound | None:
    """Name what a case is bound by, as far as rates and counters show it."""
    if bandwidth_pct(point, ceilings) >= NEAR_A_CEILING_PCT:
        return "bandwidth"
    if compute_pct(point, ceilings) >= NEAR_A_CEILING_PCT:
        return "compute"
    if is_starved(point):
        return "too little parallelism"
    resident = point.counters.get("utilization_gpu_pct")
    if resident is not None and 0.0 < resident < 100.0 * STARVED_SHARE:
        return "launches"
    return None


def bandwidth_pct(point: EvidencePoint, ceilings: Ceilings) -> float:
    """Give the share of the read peak, by bytes or by GPM, whichever saw more."""
    by_bytes = _rate_pct(point.bytes, point.time_s, ceilings.read_bytes_per_s)
    if RESET_IN_WINDOW in point.validity:
        return by_bytes
    return max(by_bytes, point.counters.get("gpm_dram_bandwidth_pct", 0.0))


def compute_pct(point: EvidencePoint, ceilings: Ceilings) -> float:
    """Give the share of the matmul peak, by FLOP or by GPM, whichever saw more."""
    by_flops = _rate_pct(point.flops, point.time_s, ceilings.matmul_flops_per_s)
    return max(by_flops, point.counters.get("gpm_tensor_pct", 0.0))


def is_starved(point: EvidencePoint) -> bool:
    """Whether GPM saw most SMs without work while a kernel was resident."""
    active = point.counters.get("gpm_sm_active_pct")
    resident = point.counters.get("utilization_gpu_pct")
    if active is None or resident is None or resident < MOSTLY_RESIDENT_PCT:
        return False
    return active <= STARVED_SHARE * resident


def _rate_pct(amount: int | None, time_s: float, peak: float | None) -> float:
    return 0.0 if amount is None or peak is None else 100.0 * amount / time_s / peak


def _over(amount: float | None, rate: float | None) -> float | None:
    return None if amount is None or not rate else amount / rate


def _scaled(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor


def _shares(point: EvidencePoint) -> dict[str, float] | None:
    """Give each stage's share of the stages' sum."""
    stages = point.stage_seconds or {}
    total = sum(stages.values())
    return {stage: seconds / total for stage, seconds in stages.items()} if total > 0.0 else None
