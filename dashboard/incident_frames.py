"""Rows of a diagnosis as the charts of the incident page take them.

Numbers are those of `db.diagnose`; what a counter can and cannot say is written down here once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import pandas as pd

from dashboard.selection import parse_params
from db.evidence import CaseDiagnosis, Diagnosis, Evidence, EvidencePoint
from db.numbers import digits

_CASE_COLUMNS: Final = ("context_tokens", "time_ms", "floor_ms", "ratio_text", "n", "series")
_READING_COLUMNS: Final = ("counter", "share_pct", "text", "meaning", "role")
_FULL_PCT: Final = 100.0


@dataclass(frozen=True, slots=True)
class CounterMeaning:
    """What a counter is called and what a reader may take from it."""

    label: str
    meaning: str
    role: Literal["misleads", "evidence"] = "evidence"


PERCENT_COUNTERS: Final[Mapping[str, CounterMeaning]] = {
    "utilization_gpu_pct": CounterMeaning(
        "util.gpu",
        "share of the time in which some kernel was resident; says nothing of how much it did",
        "misleads",
    ),
    "gpm_sm_active_pct": CounterMeaning(
        "GPM SM active", "share of SM cycles with at least one warp: how much of the GPU had work"
    ),
    "gpm_tensor_pct": CounterMeaning(
        "GPM tensor active", "share of cycles in which tensor cores were busy"
    ),
    "gpm_dram_bandwidth_pct": CounterMeaning(
        "GPM DRAM bandwidth", "share of the DRAM's peak rate that was used"
    ),
    "utilization_memory_pct": CounterMeaning(
        "util.memory", "share of the time in which DRAM was read or written; not why it was idle"
    ),
}


def cases_over_context(
    diagnosis: Diagnosis, *, prefix: str = "", only_kv: bool = False
) -> pd.DataFrame:
    """Give one row for each case with a context, named by what is fixed while context varies.

    Parameters
    ----------
    prefix : beginning of the benchmarks wanted
    only_kv : hold cases against the KV-read floor alone, not against their whole floor
    """
    rows = []
    for case in diagnosis.cases:
        if case.context_tokens is None or not case.benchmark.startswith(prefix):
            continue
        floor_ms, ratio = (
            (case.kv_floor_ms, case.kv_floor_ratio)
            if only_kv
            else (case.floor_ms, case.floor_ratio)
        )
        rows.append(
            (
                case.context_tokens,
                case.time_ms,
                floor_ms,
                "" if ratio is None else f"{digits(ratio, 3)}\N{MULTIPLICATION SIGN}",
                case.n,
                case,
            )
        )
    frame = pd.DataFrame(rows, columns=list(_CASE_COLUMNS))
    frame["floor_ms"] = frame["floor_ms"].astype(float)
    frame["series"] = _names(frame["series"].tolist())
    return frame.sort_values(["series", "context_tokens"], kind="stable", ignore_index=True)


def _names(cases: list[CaseDiagnosis]) -> list[str]:
    """Name cases by what is fixed while the context varies, the benchmark where they differ."""
    one_benchmark = len({case.benchmark for case in cases}) == 1
    texts = []
    for case in cases:
        fixed = series_name(case)
        params = fixed.removeprefix(case.benchmark).removeprefix(" · ")
        texts.append(params if one_benchmark and params else fixed)
    return texts


def series_name(case: CaseDiagnosis) -> str:
    """Name a case by its benchmark and every parameter but the context."""
    fixed = [
        f"{name}={value}"
        for name, value in parse_params(case.params).items()
        if not name.startswith("context")
    ]
    return " · ".join([case.benchmark, *fixed])


def telling_cases(
    evidence: Evidence, diagnosis: Diagnosis, *, prefix: str = ""
) -> list[tuple[EvidencePoint, CaseDiagnosis]]:
    """Pick of each series the case with the most counters, those farthest from their floor first.

    Series without any counter come last; among equals the case farthest from its KV floor counts.
    """
    points = {(point.benchmark, point.params): point for point in evidence.points}
    pairs = [
        (points[case.benchmark, case.params], case)
        for case in diagnosis.cases
        if case.benchmark.startswith(prefix)
    ]
    best: dict[str, tuple[EvidencePoint, CaseDiagnosis]] = {}
    for pair in sorted(pairs, key=_says, reverse=True):
        best.setdefault(series_name(pair[1]), pair)
    return list(best.values())


def _says(pair: tuple[EvidencePoint, CaseDiagnosis]) -> tuple[int, float]:
    point, case = pair
    return len(point.counters), case.kv_floor_ratio or 0.0


def counter_readings(
    point: EvidencePoint, case: CaseDiagnosis, power_limit_w: float | None
) -> pd.DataFrame:
    """Give the counters of a case as shares of the most that each could read."""
    rows = [
        (
            known.label,
            point.counters[name],
            f"{point.counters[name]:.3g} %",
            known.meaning,
            known.role,
        )
        for name, known in PERCENT_COUNTERS.items()
        if name in point.counters
    ]
    power_w = point.counters.get("power_w")
    if power_w is not None and power_limit_w:
        share = _FULL_PCT * power_w / power_limit_w
        text = f"{power_w:.3g} W of {power_limit_w:.3g} W"
        rows.append(("power", share, text, "of the board's limit: work costs power", "evidence"))
    if case.fraction_of_peak is not None and case.effective_gb_s is not None:
        share = _FULL_PCT * case.fraction_of_peak
        rows.append(
            (
                "bytes it had to read",
                share,
                f"{digits(case.effective_gb_s, 3)} GB/s, {digits(share, 2)} % of peak",
                f"{case.bytes_basis} over the time they took",
                "evidence",
            )
        )
    return pd.DataFrame(rows, columns=list(_READING_COLUMNS))
