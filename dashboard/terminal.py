"""Verdicts, diagnosis and ingest reports as a terminal shows them.

Renders records with rich; decides nothing. Names and reasons are never read as markup, and where
no terminal listens the lines are wide, so that logs keep them whole.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dashboard.units import change_text, commit_text, display_unit
from dashboard.verdicts import headline, is_screened, why
from dashboard.words import case_name
from db.compare import Verdict
from db.diagnose import Status
from db.numbers import MISSING, digits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from db.compare import CaseComparison, Comparison
    from db.diagnose import CaseDiagnosis, Claim, Diagnosis
    from db.ingest import IngestReport

LOG_WIDTH: Final = 160  # columns where no terminal says how wide it is
LEAST_WIDTH: Final = 140  # a narrower terminal breaks lines itself
MOST_ROWS: Final = 40  # of a table; the rest is counted

WORDS: Final = frozenset({"case", "machine", "verdict", "why", "bound"})  # columns of text

VERDICT_STYLES: Final = {
    Verdict.REGRESSION: "bold red",
    Verdict.FAILED: "bold red",
    Verdict.IMPROVEMENT: "bold green",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.NOT_ENOUGH_HISTORY: "yellow",
}
STATUS_STYLES: Final = {
    Status.SUPPORTED: "bold green",
    Status.CONSISTENT: "yellow",
    Status.UNTESTED: "dim",
}
TOLD_BY_TABLE: Final = "distance_from_floor"  # a claim that is a column of the table above it


def console(*, error: bool = False) -> Console:
    """Return a console that takes text literally and is wide enough not to cut a number."""
    made = Console(markup=False, highlight=False, emoji=False, stderr=error)
    is_log = not made.is_terminal and "COLUMNS" not in os.environ
    made.width = LOG_WIDTH if is_log else max(made.width, LEAST_WIDTH)
    return made


def print_report(to: Console, report: IngestReport) -> None:
    """Print what an ingest found and stored; what it refused is an error's to tell."""
    to.print(
        f"{report.files} files, {report.values} values: {report.new_results} results new, "
        f"{report.unchanged} known, {report.failed} failed, {report.skipped} skipped"
    )
    if report.windows_joined or report.windows_unjoined:
        to.print(
            f"telemetry: {report.windows_joined} windows joined to their results, "
            f"{report.windows_unjoined} not"
        )
    to.print(f"order of commits: by {report.order_basis}", style="dim")


def print_comparison(to: Console, comparison: Comparison, *, base: str | None, head: str) -> None:
    """Print the verdict, the cases it rests on, and what it does not say."""
    style = VERDICT_STYLES.get(comparison.verdict, "bold")
    commits = f"({f'{commit_text(base)} → ' if base else ''}{commit_text(head)})"
    to.print(Text.assemble((headline(comparison), style), " ", commits))
    if comparison.cases:
        to.print(_comparison_table(comparison.cases[:MOST_ROWS]))
        _print_rest(to, len(comparison.cases))
    if comparison.environment_differs:
        to.print("† the runner environment differs between the two commits", style="yellow")
    if is_screened(comparison):
        to.print("screened, not confirmed: only a fresh, interleaved re-run confirms", style="dim")


def print_diagnosis(to: Console, diagnosis: Diagnosis) -> None:
    """Print every case against its floor, then each claim with its evidence and status."""
    to.print(Text.assemble((diagnosis.label, "bold"), f" · {diagnosis.gpu or 'no GPU'}"))
    if diagnosis.cases:
        to.print(_diagnosis_table(diagnosis.cases[:MOST_ROWS]))
        _print_rest(to, len(diagnosis.cases))
    to.print(f"peak rates: {diagnosis.peak_source or 'unknown'}", style="dim")
    to.print(_claims(claim for claim in diagnosis.claims if claim.name != TOLD_BY_TABLE))
    to.print()


def _comparison_table(cases: Sequence[CaseComparison]) -> Table:
    titles = ("case", "machine", "verdict", "base", "head", "change", "interval", "n", "why")
    table = _table(*titles, names=[case.key.name for case in cases])
    for case in cases:
        unit = display_unit(case.unit, case.head_value or case.base_value)
        mark = " †" if case.environment_differs else ""
        bounds = f"{change_text(case.interval_low)} … {change_text(case.interval_high)}"
        table.add_row(
            case.key.name,
            case.key.machine,
            Text(case.verdict.value, VERDICT_STYLES.get(case.verdict, "")),
            unit.text(case.base_value),
            unit.text(case.head_value),
            change_text(case.relative_change) + mark,
            MISSING if case.interval_low is None else bounds,
            f"{case.n_base}/{case.n_head}",
            why(case),
        )
    return table


def _diagnosis_table(cases: Sequence[CaseDiagnosis]) -> Table:
    names = [case_name(case.benchmark, case.params) for case in cases]
    titles = ("case", "time", "floor", "over floor", "rate", "of peak", "tokens", "n", "bound")
    table = _table(*titles, names=names)
    for name, case in zip(names, cases, strict=True):
        ratio = case.floor_ratio if case.floor_ratio is not None else case.kv_floor_ratio
        floor = case.floor_ms if case.floor_ms is not None else case.kv_floor_ms
        table.add_row(
            name,
            _number(case.time_ms, 4, " ms"),
            _number(floor, 3, " ms"),
            _number(ratio, 3, "\N{MULTIPLICATION SIGN}"),
            _number(case.effective_gb_s, 3, " GB/s"),
            MISSING if case.fraction_of_peak is None else f"{100 * case.fraction_of_peak:.2f} %",
            _number(case.commit_length, 2),
            str(case.n),
            case.bound or MISSING,
        )
    return table


def _claims(claims: Iterable[Claim]) -> Table:
    """Lay out each claim beside its status, an exclamation mark at what calls for action."""
    table = Table.grid(padding=(0, 1))
    for claim in claims:
        about = f"{claim.case}: " if claim.case else ""
        table.add_row(
            Text("!" if claim.is_alarm else " ", "bold red"),
            Text(claim.status.value, STATUS_STYLES[claim.status]),
            Text.assemble(about, claim.statement, (f" · {claim.evidence}", "dim")),
        )
    return table


def _table(*titles: str, names: Iterable[str]) -> Table:
    """Lay out columns of which only names and reasons may break, names last."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    longest = max((len(name) for name in names), default=0)
    for title in titles:
        side: Literal["left", "right"] = "left" if title in WORDS else "right"
        table.add_column(
            title,
            justify=side,
            overflow="fold",
            no_wrap=title not in {"case", "why"},
            min_width=min(longest, LEAST_WIDTH // 3) if title == "case" else None,
        )
    return table


def _print_rest(to: Console, count: int) -> None:
    if count > MOST_ROWS:
        to.print(f"… and {count - MOST_ROWS} more (--json gives all)", style="dim")


def _number(value: float | None, count: int, unit: str = "") -> str:
    return MISSING if value is None else f"{digits(value, count)}{unit}"
