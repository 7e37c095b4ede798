"""Rows of a comparison as tables and charts take them; verdicts are those of `db.compare`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from dashboard.markdown import head, row
from dashboard.selection import choices, parse_params
from dashboard.units import change_text, display_unit
from dashboard.verdicts import why
from dashboard.words import escaped, unbroken
from db.compare import SEVERITY, CaseComparison, Verdict
from db.numbers import MISSING

# Verdicts by a sign as well as a colour.
SIGNS: Final = {
    Verdict.REGRESSION: "▲",
    Verdict.FAILED: "✖",
    Verdict.REMOVED: "−",  # noqa: RUF001 - a minus sign, as wide as the others
    Verdict.INCONCLUSIVE: "?",
    Verdict.NOT_ENOUGH_HISTORY: "…",
    Verdict.IMPROVEMENT: "▼",
    Verdict.NO_CHANGE: "=",
    Verdict.NEW: "+",
    Verdict.SKIPPED: "○",
}
ACROSS: Final = ("context", "context_tokens")
DOWN: Final = ("page_size",)
MOST_INTERVALS: Final = 30
# What a reader is told of first: cases by their numbers, and by their names where they have none.
NUMBERED: Final = (Verdict.REGRESSION, Verdict.INCONCLUSIVE, Verdict.IMPROVEMENT)
NAMED: Final = (Verdict.FAILED, Verdict.REMOVED)
MOST_LINES: Final = 12
MOST_NAMES: Final = 4
_LINE: Final = ("Change", "Case", "Before", "After", "Interval", "Verdict")


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Changes of one benchmark on one machine over two parameters, all others fixed."""

    title: str
    across: str
    down: str
    cells: pd.DataFrame  # across, down, change_pct, worse_pct, text, verdict, order_*


def gravest(cases: Sequence[CaseComparison]) -> list[CaseComparison]:
    """Give the first cases of each verdict that rests on a change, as many of each."""
    told = [[case for case in cases if case.verdict is verdict] for verdict in NUMBERED]
    met = [found for found in told if found]
    return [case for found in met for case in found[: MOST_LINES // len(met)]]


def lines(cases: Sequence[CaseComparison]) -> str:
    """Write cases and their numbers as a table in Markdown."""
    names = _names(cases)
    shown = (
        row(
            [
                unbroken(f"{SIGNS[case.verdict]} {change_text(case.relative_change)}"),
                escaped(name),
                *(
                    unbroken(display_unit(case.unit, value).text(value))
                    for value in (case.base_value, case.head_value)
                ),
                unbroken(_interval(case)),
                escaped(case.verdict.value),
            ]
        )
        for case, name in zip(cases, names, strict=True)
    )
    return "\n".join((head(_LINE, right=("Change", *_LINE[2:5])), *shown))


def names_line(cases: Sequence[CaseComparison], verdict: Verdict) -> str | None:
    """Name the first cases of a verdict, as Markdown; None where no case has it."""
    found = [case for case in cases if case.verdict is verdict]
    if not found:
        return None
    names = ", ".join(escaped(name) for name in _names(found[:MOST_NAMES]))
    more = f" and {len(found) - MOST_NAMES:,} more" if len(found) > MOST_NAMES else ""
    return f"**{SIGNS[verdict]} {len(found):,} {verdict.value}**: {names}{more}"


def _names(cases: Sequence[CaseComparison]) -> list[str]:
    if len({case.key.machine for case in cases}) == 1:
        return [case.key.name for case in cases]
    return [f"{case.key.name} · {case.key.machine}" for case in cases]


def _interval(case: CaseComparison) -> str:
    if case.interval_low is None:
        return MISSING
    return f"{change_text(case.interval_low)} to {change_text(case.interval_high)}"


def table_of(cases: Sequence[CaseComparison]) -> pd.DataFrame:
    """Give a row for each case: numbers as numbers, so that a browser sorts them."""
    return pd.DataFrame(
        [
            {
                "verdict": f"{SIGNS[case.verdict]} {case.verdict.value}",
                "benchmark": case.key.benchmark,
                "params": case.key.params,
                "machine": case.key.machine,
                "change_pct": _pct(case.relative_change),
                "low_pct": _pct(case.interval_low),
                "high_pct": _pct(case.interval_high),
                "noise_pct": _pct(case.noise_rel),
                "before": display_unit(case.unit, case.base_value).text(case.base_value),
                "after": display_unit(case.unit, case.head_value).text(case.head_value),
                "n_before": case.n_base,
                "n_after": case.n_head,
                "why": why(case) or case.reason,
            }
            for case in cases
        ],
        columns=[
            *("verdict", "benchmark", "params", "machine", "change_pct", "low_pct", "high_pct"),
            *("noise_pct", "before", "after", "n_before", "n_after", "why"),
        ],
    )


def intervals(cases: Sequence[CaseComparison]) -> pd.DataFrame:
    """Give the gravest cases that have an interval, for a chart of them, the gravest first."""
    known = [case for case in cases if case.interval_low is not None][:MOST_INTERVALS]
    has_many = len({case.key.machine for case in known}) > 1
    return pd.DataFrame(
        [
            {
                "case": f"{case.key.name} · {case.key.machine}" if has_many else case.key.name,
                "place": place,
                "machine": case.key.machine,
                "change_pct": _pct(case.relative_change),
                "low_pct": _pct(case.interval_low),
                "high_pct": _pct(case.interval_high),
                "noise_low_pct": None if case.noise_rel is None else -100 * case.noise_rel,
                "noise_pct": _pct(case.noise_rel),
                "verdict": case.verdict.value,
            }
            for place, case in enumerate(known)
        ]
    )


def heat_maps(cases: Sequence[CaseComparison]) -> list[HeatMap]:
    """Lay the cases of each benchmark out over context and page size, one map for each regime.

    A benchmark without these parameters takes the two with most values; a map of one cell is none.
    """
    rows = pd.DataFrame([_parsed(case) for case in cases])
    if rows.empty:
        return []
    maps: list[HeatMap] = []
    for (benchmark, machine), group in rows.groupby(["benchmark", "machine"], sort=False):
        names = {name for params in group["params"] for name in params}
        across = _axis(group, names, ACROSS)
        down = _axis(group, names - {across}, DOWN)
        if across is None or down is None:
            continue
        fixed = [_fixed(params, {across, down}) for params in group["params"]]
        for rest, part in group.groupby(fixed, sort=False):
            title = " · ".join(filter(None, (str(benchmark), str(rest), str(machine))))
            found = HeatMap(title, across, down, _cells(part, across, down))
            maps += [found] if len(found.cells) > 1 else []
    return maps


def _parsed(case: CaseComparison) -> dict[str, object]:
    change = case.relative_change
    # On a scale on which twice and half are as far from nothing.
    ratio = None if change is None or change <= -1 else 100 * math.log1p(change)
    is_better_down = case.direction == "lower"
    return {
        "benchmark": case.key.benchmark,
        "machine": case.key.machine,
        "params": parse_params(case.key.params),
        "change_pct": _pct(change),
        "worse_pct": None if ratio is None else ratio if is_better_down else -ratio,
        "text": f"{SIGNS[case.verdict]} {change_text(change)}",
        "verdict": case.verdict.value,
        "severity": SEVERITY.index(case.verdict),
    }


def _axis(group: pd.DataFrame, names: set[str | None], wanted: Sequence[str]) -> str | None:
    for name in wanted:
        if name in names:
            return name
    counts = {
        name: len({params.get(name) for params in group["params"]})
        for name in sorted(map(str, names))
    }
    varied = [name for name, count in counts.items() if count > 1]
    return max(varied, key=lambda name: counts[name], default=None)


def _fixed(params: dict[str, str], varied: set[str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in params.items() if name not in varied)


def _cells(part: pd.DataFrame, across: str, down: str) -> pd.DataFrame:
    """Give one cell for each pair of values, the gravest where variants or metrics share it."""
    cells = part.assign(
        across=[params.get(across, "") for params in part["params"]],
        down=[params.get(down, "") for params in part["params"]],
    )
    cells = cells.sort_values("severity", kind="stable").drop_duplicates(["across", "down"])
    for name in ("across", "down"):
        places = {value: place for place, value in enumerate(choices(cells, name))}
        cells[f"order_{name}"] = cells[name].map(places)
    return cells.drop(columns=["params", "severity"]).reset_index(drop=True)


def _pct(relative: float | None) -> float | None:
    return None if relative is None else 100 * relative
