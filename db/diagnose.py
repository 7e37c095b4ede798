"""Say why a case is slow: its floor, what its counters support, and what nobody tested.

Every line carries its number, its evidence and its status. A counter that agrees with a cause is
not a test of it: what no factor was varied for is `consistent` or `untested`, however obvious.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from db.counters import FAR_FROM_FLOOR, counter_claims, is_slow
from db.evidence import (
    CaseDiagnosis,
    Ceilings,
    Claim,
    Diagnosis,
    Evidence,
    EvidencePoint,
    LadderReading,
    LineFit,
    Status,
)
from db.floors import KV_ALONE, bandwidth_pct, compute_pct, diagnose_case
from db.ladder import is_rung, ladder_readings
from db.ladder_claims import ladder_claims
from db.numbers import count_text, digits
from db.page_size import page_size_claim
from db.peers import is_peer
from db.scaling import context_findings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "CaseDiagnosis",
    "Ceilings",
    "Claim",
    "Diagnosis",
    "Evidence",
    "EvidencePoint",
    "LadderReading",
    "LineFit",
    "Status",
    "diagnose",
]

UNDER_THE_FLOOR = 0.95  # of the floor: a ceiling is itself measured, a few percent are forgiven


def diagnose(evidence: Evidence) -> Diagnosis:
    """Hold every case against its floor and say what the evidence as a whole supports.

    Peers have their distance from the floor, but nothing is claimed of other people's code.
    """
    points = tuple(point for point in evidence.points if point.time_s > 0.0)
    cases = tuple(diagnose_case(point, evidence) for point in points)
    claims: list[Claim] = []
    both = zip(points, cases, strict=True)
    own = [(point, case) for point, case in both if not is_peer(point.benchmark, point.params)]
    for point, case in own:
        claims += _case_claims(point, case, evidence)
    ours = [point for point, _ in own]
    claims = _agreeing_once(claims, ours)
    slow = [point for point, case in own if is_slow(point, case)]
    fits, context_claims = context_findings([point for point in ours if not is_rung(point)])
    readings = ladder_readings(ours)
    whole = [_partial_floor([case for _, case in own], evidence), page_size_claim(slow, ours)]
    claims += ladder_claims(ours, readings)
    claims += [claim for claim in whole if claim is not None] + context_claims
    return Diagnosis(
        label=evidence.label,
        gpu=evidence.gpu,
        peak_source=evidence.peak_source,
        cases=cases,
        claims=tuple(claims),
        fits=tuple(fits),
        ladder=readings,
    )


def _agreeing_once(claims: Sequence[Claim], points: Sequence[EvidencePoint]) -> list[Claim]:
    """Tell what merely agrees once, for the case with most counters: repeating proves nothing."""
    agreeing = [claim for claim in claims if claim.status is Status.CONSISTENT]
    if not agreeing:
        return list(claims)
    counters = {point.name: len(point.counters) for point in points}
    kept = max(agreeing, key=lambda claim: counters.get(claim.case or "", 0))
    verb = "agrees" if len(points) == 1 else "agree"
    tally = f"{len(agreeing):,} of {count_text(len(points), 'case')} {verb}"
    told = replace(kept, evidence=f"{kept.evidence}; {tally}")
    return [
        told if claim is kept else claim
        for claim in claims
        if claim is kept or claim not in agreeing
    ]


def _case_claims(point: EvidencePoint, case: CaseDiagnosis, evidence: Evidence) -> list[Claim]:
    """Apply the rules of a single case; a rung is slow on purpose, which its ladder explains."""
    if is_rung(point):
        doubt = _under_the_floor(point, case, evidence)
        return [] if doubt is None else [doubt]
    rules: tuple[Callable[[EvidencePoint, CaseDiagnosis, Evidence], Claim | None], ...] = (
        _distance,
        _under_the_floor,
        _bound,
        _largest_stage,
    )
    found = [rule(point, case, evidence) for rule in rules]
    return [claim for claim in found if claim is not None] + counter_claims(point, case, evidence)


def _distance(point: EvidencePoint, case: CaseDiagnosis, evidence: Evidence) -> Claim | None:
    """Give the distance from the floor, and what that floor leaves out."""
    if case.floor_ratio is None or case.floor_ms is None:
        return None
    floor = "KV-read floor" if case.bytes_basis == KV_ALONE else "floor"
    return Claim(
        name="distance_from_floor",
        statement=(
            f"{digits(case.time_ms, 4)} ms is {digits(case.floor_ratio, 3)} times its {floor} of "
            f"{digits(case.floor_ms, 3)} ms ({case.floor_basis})"
        ),
        value=case.floor_ratio,
        unit="times the floor",
        evidence=_rate(case, evidence),
        status=Status.SUPPORTED,
        case=point.name,
        is_alarm=case.floor_ratio >= FAR_FROM_FLOOR,
    )


def _partial_floor(cases: Sequence[CaseDiagnosis], evidence: Evidence) -> Claim | None:
    """Say so where the floors are less than the whole work, or held against a datasheet."""
    partial = [case for case in cases if case.bytes_basis == KV_ALONE and case.kv_floor_ratio]
    if not partial:
        return None
    worst = max(case.kv_floor_ratio or 0.0 for case in partial)
    of, verb = count_text(len(cases), "case"), "records" if len(cases) == 1 else "record"
    return Claim(
        name="floor_is_partial",
        statement=(
            f"these floors are KV bytes alone against a {evidence.peak_source} peak; a step's "
            "whole floor, with the weights it must read, is several times larger, so the step as "
            "a whole is nearer to it"
        ),
        value=worst,
        unit="times the floor, at most",
        evidence=f"{len(partial):,} of {of} {verb} no bytes but their KV",
        status=Status.UNTESTED,
    )


def _rate(case: CaseDiagnosis, evidence: Evidence) -> str:
    if case.effective_gb_s is None or case.fraction_of_peak is None:
        return f"n = {case.n}, {case.floor_basis or 'no floor is known'}"
    return (
        f"{case.bytes_basis}: {digits(case.effective_gb_s, 3)} GB/s, "
        f"{case.fraction_of_peak:.2%} of the {evidence.peak_source} peak, n = {case.n}"
    )


def _under_the_floor(point: EvidencePoint, case: CaseDiagnosis, evidence: Evidence) -> Claim | None:
    """Doubt a time in which the work cannot have been done."""
    if case.floor_ratio is None or case.floor_ratio >= UNDER_THE_FLOOR:
        return None
    return Claim(
        name="under_the_floor",
        statement=(
            f"{digits(case.time_ms, 4)} ms is under its floor of {digits(case.floor_ms, 4)} ms: "
            "this is not the time of this work, or the work came from a cache"
        ),
        value=case.floor_ratio,
        unit="times the floor",
        evidence=_rate(case, evidence),
        status=Status.SUPPORTED,
        case=point.name,
        is_alarm=True,
    )


def _bound(point: EvidencePoint, case: CaseDiagnosis, evidence: Evidence) -> Claim | None:
    """Name what the case is bound by where rates or counters show it."""
    shares = {
        "bandwidth": (bandwidth_pct(point, evidence.ceilings), "% of the read peak"),
        "compute": (compute_pct(point, evidence.ceilings), "% of the matmul peak"),
        "too little parallelism": (point.counters.get("gpm_sm_active_pct", 0.0), "% SM active"),
        "launches": (
            point.counters.get("utilization_gpu_pct", 0.0),
            "% of the time some kernel was resident",
        ),
    }
    if case.bound is None:
        return None
    value, unit = shares[case.bound]
    return Claim(
        name="bound_by",
        statement=f"bound by {case.bound}: {value:.3g} {unit}",
        value=value,
        unit=unit,
        evidence=_rate(case, evidence),
        status=Status.SUPPORTED,
        case=point.name,
    )


def _largest_stage(point: EvidencePoint, case: CaseDiagnosis, _evidence: Evidence) -> Claim | None:
    """Say where the time of a step goes."""
    if not case.stage_shares or not point.stage_seconds:
        return None
    stage = max(case.stage_shares, key=lambda name: (case.stage_shares or {})[name])
    share = case.stage_shares[stage]
    listed = ", ".join(f"{name} {digits(s * 1e3, 4)} ms" for name, s in point.stage_seconds.items())
    return Claim(
        name="largest_stage",
        statement=f"{stage} takes {share:.0%} of the step",
        value=100.0 * share,
        unit="% of the step",
        evidence=listed,
        status=Status.SUPPORTED,
        case=point.name,
    )
