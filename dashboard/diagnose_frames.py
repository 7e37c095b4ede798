"""Rows of a diagnosis for its charts: roofline, distance, line over context, ladder.

Numbers are those of `db.diagnose`; what has not both bytes and FLOP is on no roofline.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd

from dashboard.selection import parse_params
from dashboard.words import case_name
from db.evidence import CaseDiagnosis, Claim, Diagnosis, Evidence, LadderReading, LineFit, Place
from db.numbers import digits
from db.scaling import sweeps

_LINE_STEPS: Final = 40
_ROOF_MARGIN: Final = 4.0  # times beyond the outermost case to which a roof is drawn
# What the columns of two frames are called in the tables beside their charts.
ROOFLINE: Final = {
    "case": "Case",
    "intensity": "FLOP a byte",
    "tflops": "Rate (TFLOP/s)",
    "time_ms": "Time (ms)",
    "floor_ratio": "Times its floor",
    "bound": "Bound by",
}
LINE: Final = {
    "context_tokens": "Context (tokens)",
    "gigabytes": "Bytes to read (GB)",
    "time_ms": "Time (ms)",
    "line_ms": "On the line (ms)",
    "n": "Samples",
}
PLACES: Final = (Place.ALONE, Place.IN_ORDER, Place.REMOVED)


def roofline_cases(evidence: Evidence, diagnosis: Diagnosis) -> pd.DataFrame:
    """Give each case that has its work recorded: FLOP a byte, FLOP a second, share of its roof."""
    floors = {(case.benchmark, case.params): case for case in diagnosis.cases}
    rows = []
    for point in evidence.points:
        case = floors.get((point.benchmark, point.params))
        if case is None or not point.bytes or not point.flops:
            continue
        rows.append(
            {
                "case": point.name,
                "benchmark": point.benchmark,
                "intensity": point.flops / point.bytes,
                "tflops": point.flops / point.time_s / 1e12,
                "time_ms": case.time_ms,
                "floor_ratio": case.floor_ratio,
                "bound": case.bound or "not told",
            }
        )
    columns = ("case", "benchmark", "intensity", "tflops", "time_ms", "floor_ratio", "bound")
    return pd.DataFrame(rows, columns=list(columns))


def roof(evidence: Evidence, cases: pd.DataFrame) -> pd.DataFrame:
    """Give the two roofs over the span of the cases; nothing without both ceilings."""
    read, matmul = evidence.ceilings.read_bytes_per_s, evidence.ceilings.matmul_flops_per_s
    if read is None or matmul is None or cases.empty:
        return pd.DataFrame({"intensity": [], "tflops": []})
    ridge = matmul / read
    low = min(float(cases["intensity"].min()), ridge) / _ROOF_MARGIN
    high = max(float(cases["intensity"].max()), ridge) * _ROOF_MARGIN
    at = [low, ridge, high]
    return pd.DataFrame({"intensity": at, "tflops": [min(one * read, matmul) / 1e12 for one in at]})


def distances(diagnosis: Diagnosis, most: int) -> pd.DataFrame:
    """Give the cases farthest from their floor, the farthest first."""
    known = [case for case in diagnosis.cases if case.floor_ratio is not None]
    known.sort(key=lambda case: -(case.floor_ratio or 0.0))
    known = known[:most]
    settings = [set(parse_params(case.params).items()) for case in known]
    shared = set.intersection(*settings) if settings else set()
    return pd.DataFrame(
        [
            {
                "case": _short_name(case, shared),
                "floor_ratio": case.floor_ratio,
                "text": f"{digits(case.floor_ratio, 3)}\N{MULTIPLICATION SIGN}",
                "time_ms": case.time_ms,
                "floor_ms": case.floor_ms,
                "basis": case.floor_basis,
                "bound": case.bound or "not told",
            }
            for case in known
        ],
        columns=["case", "floor_ratio", "text", "time_ms", "floor_ms", "basis", "bound"],
    )


def _short_name(case: CaseDiagnosis, shared: set[tuple[str, str]]) -> str:
    """Name a case by the parameters that not all others have too."""
    own = parse_params(case.params).items()
    return case_name(
        case.benchmark,
        ", ".join(f"{name}={value}" for name, value in own if (name, value) not in shared),
    )


def fits_table(fits: Sequence[LineFit]) -> pd.DataFrame:
    """Give every line over context, or why it was refused."""
    return pd.DataFrame(
        [
            {
                "case": fit.label,
                "contexts": fit.n_points,
                "t0_ms": fit.t0_ms,
                "t0_low_ms": fit.t0_low_ms,
                "t0_high_ms": fit.t0_high_ms,
                "bandwidth_gb_s": fit.bandwidth_gb_s,
                "bandwidth_low_gb_s": fit.bandwidth_low_gb_s,
                "bandwidth_high_gb_s": fit.bandwidth_high_gb_s,
                "refused": fit.refused or "",
            }
            for fit in fits
        ]
    )


def fitted_cases(evidence: Evidence, fit: LineFit) -> pd.DataFrame:
    """Give the cases a line was laid through, with their bytes and what the line says of each."""
    rows = [
        {
            "context_tokens": point.context_tokens,
            "gigabytes": num_bytes / 1e9,
            "time_ms": point.time_s * 1e3,
            "line_ms": _on_line(fit, float(num_bytes)),
            "n": point.n,
        }
        for sweep in sweeps(evidence.points)
        if sweep.label == fit.label
        for point, num_bytes in zip(sweep.points, sweep.num_bytes, strict=True)
    ]
    columns = ["context_tokens", "gigabytes", "time_ms", "line_ms", "n"]
    return pd.DataFrame(rows, columns=columns).sort_values("gigabytes", ignore_index=True)


def _on_line(fit: LineFit, num_bytes: float) -> float | None:
    if fit.t0_ms is None or not fit.bandwidth_gb_s:
        return None
    return fit.t0_ms + num_bytes / fit.bandwidth_gb_s / 1e6


def line_of(fit: LineFit, cases: pd.DataFrame) -> pd.DataFrame:
    """Give the line from no bytes to the largest case; nothing where it was refused."""
    if fit.refused is not None or cases.empty:
        return pd.DataFrame({"gigabytes": [], "line_ms": []})
    at = np.linspace(0.0, float(cases["gigabytes"].max()), _LINE_STEPS)
    return pd.DataFrame(
        {"gigabytes": at, "line_ms": [_on_line(fit, float(one) * 1e9) for one in at]}
    )


def ladders(readings: Sequence[LadderReading]) -> list[tuple[str, int | None]]:
    """Name each ladder with its context, in the order in which they were read."""
    return list(dict.fromkeys((one.ladder, one.context_tokens) for one in readings))


def waterfall(readings: Sequence[LadderReading]) -> pd.DataFrame:
    """Give the steps of one ladder in the fixed order: each from the time before to that after."""
    steps = [one for one in readings if one.place is Place.IN_ORDER]
    return pd.DataFrame(
        [
            {
                "place": place,
                "factor": one.factor,
                "before_ms": one.before.time_s * 1e3,
                "after_ms": one.after.time_s * 1e3,
                "text": f"{one.ratio.value:.3g}\N{MULTIPLICATION SIGN}",
                "is_faster": "faster" if one.ratio.value >= 1.0 else "slower",
                "outcome": one.ratio.outcome.value,
            }
            for place, one in enumerate(steps)
        ]
    )


def three_readings(readings: Sequence[LadderReading]) -> pd.DataFrame:
    """Give what each factor is worth alone, in the fixed order, and when it is removed."""
    return pd.DataFrame(
        [
            {
                "factor": one.factor,
                "place": one.place.value,
                "worth": one.ratio.value,
                "low": _finite(one.ratio.low),
                "high": _finite(one.ratio.high),
                "outcome": one.ratio.outcome.value,
                "before_ms": one.before.time_s * 1e3,
                "after_ms": one.after.time_s * 1e3,
                "ground": one.ratio.ground,
            }
            for one in readings
        ]
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def cases_table(cases: Sequence[CaseDiagnosis]) -> pd.DataFrame:
    """Give every case of a diagnosis with its floors."""
    return pd.DataFrame(
        [
            {
                "benchmark": case.benchmark,
                "params": case.params,
                "context (tokens)": case.context_tokens,
                "time (ms)": case.time_ms,
                "samples": case.n,
                "rate (GB/s)": case.effective_gb_s,
                "KV-read floor (ms)": case.kv_floor_ms,
                "above KV floor": case.kv_floor_ratio,
                "floor (ms)": case.floor_ms,
                "above floor": case.floor_ratio,
                "bound by": case.bound,
                "commit length": case.commit_length,
            }
            for case in cases
        ]
    )


def claims_table(claims: Sequence[Claim]) -> pd.DataFrame:
    """Give every claim with its status, its number and its evidence."""
    return pd.DataFrame(
        [
            {
                "status": claim.status.value,
                "claim": claim.statement,
                "value": claim.value,
                "unit": claim.unit,
                "case": claim.case or "",
                "evidence": claim.evidence,
            }
            for claim in claims
        ]
    )
