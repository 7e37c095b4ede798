"""What the counters of one case support, and which of them mislead.

A window with one of the validity codes in `DOUBTS` supports no claim about the work of a case: its
counters are of less than the case alone, or of a GPU that was not itself. Its clocks are what they
were all the same. Source of the definitions: NVML API reference, nvmlUtilization_t and GPM metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from db.evidence import Claim, Status
from db.floors import MOSTLY_RESIDENT_PCT, STARVED_SHARE, is_starved
from db.numbers import count_text, digits

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from db.evidence import CaseDiagnosis, Evidence, EvidencePoint

FAR_FROM_FLOOR = 3.0  # times its floor, from where a case is slow and wants a reason
DRAM_IDLE_PCT = 10.0
LOW_POWER_SHARE = 0.5  # of the limit
# NVML clocks event reasons that hold a clock down: power cap, hardware, thermal, power brake.
CAPPING_REASONS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
REASONS = "clock_event_reasons"
CLOCKS = frozenset({REASONS, "sm_clock_mhz", "memory_clock_mhz"})
# Validity codes that take a window's counters their weight, and why.
CAPPED = "throttled"
DOUBTS = {
    "window_too_short": "it was too short",
    "sampling_gap": "a part of it was not read",
    CAPPED: "a clock was held down in it",
    "clock_moved": "a clock moved in it",
    "other_process": "another process was on the GPU",
}
INTERRUPTED = "counter_interrupted:"  # then the name of a counter that was lost in the window


def supporting(counters: Mapping[str, float], validity: Collection[str]) -> dict[str, float]:
    """Give those counters of a window that a claim may rest on."""
    lost = {code.removeprefix(INTERRUPTED) for code in validity if code.startswith(INTERRUPTED)}
    kept = CLOCKS if DOUBTS.keys() & validity else counters.keys()
    return {name: value for name, value in counters.items() if name in kept and name not in lost}


def counter_claims(point: EvidencePoint, case: CaseDiagnosis, evidence: Evidence) -> list[Claim]:
    """Read the counters of one case; nothing without a GPU."""
    if evidence.gpu is None:
        return []
    claims = [
        _doubted_window(point),
        _gpu_utilization(point, case, evidence),
        _dram_idle(point, case, evidence),
        _starvation(point, case, evidence),
        _capped_clock(point),
    ]
    return [claim for claim in claims if claim is not None]


def is_slow(point: EvidencePoint, case: CaseDiagnosis) -> bool:
    """Whether a case wants a reason: most SMs were idle, or it is far from its floor."""
    if "gpm_sm_active_pct" in point.counters and "utilization_gpu_pct" in point.counters:
        return is_starved(point)
    return (case.floor_ratio or 0.0) >= FAR_FROM_FLOOR


def _doubted_window(point: EvidencePoint) -> Claim | None:
    """Say why the counters of a case are not used."""
    codes = [code for code in DOUBTS if code in point.validity]
    if not codes:
        return None
    return Claim(
        name="window_doubted",
        statement=(
            "its telemetry window supports no claim about its work: "
            + ", ".join(DOUBTS[code] for code in codes)
        ),
        value=float(len(codes)),
        unit="doubts",
        evidence=f"validity codes {', '.join(codes)}, in every window of the case",
        status=Status.UNTESTED,
        case=point.name,
    )


def _gpu_utilization(point: EvidencePoint, case: CaseDiagnosis, evidence: Evidence) -> Claim | None:
    resident = point.counters.get("utilization_gpu_pct")
    if resident is None or resident < MOSTLY_RESIDENT_PCT or not is_slow(point, case):
        return None
    return Claim(
        name="gpu_utilization_misleads",
        statement=(
            f"utilization.gpu {resident:.4g} % is no evidence of work: it is the share of time "
            "in which some kernel was resident"
        ),
        value=resident,
        unit="%",
        evidence=_what_else_was_seen(point, case, evidence),
        status=Status.SUPPORTED,
        case=point.name,
        is_alarm=True,
    )


def _dram_idle(point: EvidencePoint, case: CaseDiagnosis, evidence: Evidence) -> Claim | None:
    busy = point.counters.get("utilization_memory_pct")
    if busy is None or busy > DRAM_IDLE_PCT or not is_slow(point, case):
        return None
    return Claim(
        name="dram_idle",
        statement=f"utilization.memory {busy:.4g} % says that DRAM was idle, not why",
        value=busy,
        unit="%",
        evidence=_what_else_was_seen(point, case, evidence),
        status=Status.SUPPORTED,
        case=point.name,
    )


def _starvation(point: EvidencePoint, case: CaseDiagnosis, evidence: Evidence) -> Claim | None:
    """Say that SMs lacked work: seen by GPM, or only agreeing with programs and power."""
    if not is_slow(point, case):
        return None
    if is_starved(point):
        active = point.counters["gpm_sm_active_pct"]
        return Claim(
            name="starvation",
            statement=f"starvation: {100.0 - active:.3g} % of the SM time had nothing to do",
            value=active,
            unit="% SM active",
            evidence=_what_else_was_seen(point, case, evidence),
            status=Status.SUPPORTED,
            case=point.name,
            is_alarm=True,
        )
    few = _program_share(point)
    power = _power_share(point, evidence)
    signs = [
        share
        for share, limit in ((few, STARVED_SHARE), (power, LOW_POWER_SHARE))
        if share is not None and share < limit
    ]
    if not signs:
        return None
    return Claim(
        name="starvation",
        statement="starvation (too few programs for the SMs): consistent, untested on this card",
        value=100.0 * signs[0],
        unit="% of the SMs" if few == signs[0] else "% of the power limit",
        evidence=f"{_what_else_was_seen(point, case, evidence)}; no GPM counters of this run",
        status=Status.CONSISTENT,
        case=point.name,
        is_alarm=True,
    )


def _capped_clock(point: EvidencePoint) -> Claim | None:
    reasons = int(point.counters.get(REASONS, 0.0)) & CAPPING_REASONS
    clock = point.counters.get("sm_clock_mhz")
    if not reasons or clock is None:
        return None
    return Claim(
        name="clock_capped",
        statement=f"the SM clock was held down, to {clock:.4g} MHz",
        value=clock,
        unit="MHz",
        evidence=f"clocks event reasons {reasons:#x}",
        status=Status.SUPPORTED,
        case=point.name,
    )


def _program_share(point: EvidencePoint) -> float | None:
    if point.programs is None or not point.num_sms:
        return None
    return point.programs / point.num_sms


def _power_share(point: EvidencePoint, evidence: Evidence) -> float | None:
    power = point.counters.get("power_w")
    if power is None or not evidence.power_limit_w:
        return None
    return power / evidence.power_limit_w


def _what_else_was_seen(point: EvidencePoint, case: CaseDiagnosis, evidence: Evidence) -> str:
    """List, in one sentence, the numbers that bear on whether the SMs had work."""
    counters, seen = point.counters, []
    if "gpm_sm_active_pct" in counters:
        seen.append(f"GPM SM active {counters['gpm_sm_active_pct']:.3g} %")
    if "gpm_dram_bandwidth_pct" in counters:
        seen.append(f"GPM DRAM bandwidth {counters['gpm_dram_bandwidth_pct']:.3g} %")
    if point.programs is not None and point.num_sms is not None:
        seen.append(f"{count_text(point.programs, 'program')} on {count_text(point.num_sms, 'SM')}")
    if "power_w" in counters:
        limit = "" if evidence.power_limit_w is None else f" of {evidence.power_limit_w:.4g} W"
        seen.append(f"power {counters['power_w']:.4g} W{limit}")
    if case.effective_gb_s is not None and case.fraction_of_peak is not None:
        seen.append(
            f"{digits(case.effective_gb_s, 3)} GB/s, {case.fraction_of_peak:.2%} of the "
            f"{evidence.peak_source} peak"
        )
    return ", ".join(seen) or "no other counter was recorded"
