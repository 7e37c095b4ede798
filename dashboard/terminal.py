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
from db.evidence import Outcome, Place, Status
from db.ladder import VARIANT
from db.numbers import MISSING, digits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from db.compare import CaseComparison, Comparison
    from db.diagnose import CaseDiagnosis, Claim, Diagnosis, LadderReading
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
TIMES: Final = "\N{MULTIPLICATION SIGN}"
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
    if report.unexplained:
        named = ", ".join(report.unexplained)
        to.print(f"left out, as nobody says which way is better: {named} (--config says it)")
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
    """Print every case against its floor, each ladder, and each claim with evidence and status."""
    to.print(Text.assemble((diagnosis.label, "bold"), f" · {diagnosis.gpu or 'no GPU'}"))
    rungs = {(one.benchmark, one.params) for r in diagnosis.ladder for one in (r.before, r.after)}
    cases = [case for case in diagnosis.cases if (case.benchmark, case.params) not in rungs]
    if cases:
        to.print(_diagnosis_table(cases[:MOST_ROWS]))
        _print_rest(to, len(cases))
    for label in dict.fromkeys(reading.ladder for reading in diagnosis.ladder):
        to.print(_ladder_table(label, [one for one in diagnosis.ladder if one.ladder == label]))
    to.print(f"peak rates: {diagnosis.peak_source or 'unknown'}", style="dim")
    to.print(_claims(claim for claim in diagnosis.claims if claim.name != TOLD_BY_TABLE))
    to.print()


def print_claims(to: Console, claims: Iterable[Claim]) -> None:
    """Print claims with their status and evidence, one below the other."""
    to.print(_claims(claims))


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
            _number(ratio, 3, TIMES),
            _number(case.effective_gb_s, 3, " GB/s"),
            MISSING if case.fraction_of_peak is None else f"{100 * case.fraction_of_peak:.2f} %",
            _number(case.commit_length, 2),
            str(case.n),
            case.bound or MISSING,
        )
    return table


def _ladder_table(label: str, readings: Sequence[LadderReading]) -> Table:
    """Lay out what each factor is worth at its three places, and the time once it is on."""
    table = _table(label, *Place, "time", names=[label])
    table.columns[0].justify = "left"
    found = {(one.factor, one.place): one for one in readings}
    steps = [one for one in readings if one.place is Place.IN_ORDER]
    if steps:
        start = steps[0].before
        table.add_row(start.settings[VARIANT].strip("'"), "", "", "", _microseconds(start.time_s))
    for factor in dict.fromkeys(one.factor for one in readings):
        step = found.get((factor, Place.IN_ORDER))
        table.add_row(
            factor,
            *(_worth(found.get((factor, place))) for place in Place),
            MISSING if step is None else _microseconds(step.after.time_s),
        )
    return table


def _worth(reading: LadderReading | None) -> Text:
    """Write a ratio with its interval; dim where it does not matter, a question where undecided."""
    if reading is None:
        return Text(MISSING, "dim")
    ratio, is_open = reading.ratio, reading.ratio.outcome is Outcome.UNDECIDED
    interval = "" if ratio.low is None else f" [{digits(ratio.low, 4)}, {digits(ratio.high, 4)}]"
    style = "" if ratio.outcome is Outcome.MATTERS else "dim"
    return Text(f"{digits(ratio.value, 4)}{TIMES}{interval}{' ?' if is_open else ''}", style)


def _microseconds(seconds: float) -> str:
    return f"{digits(seconds * 1e6, 4)} µs"


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
