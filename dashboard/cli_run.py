"""`ddtree-bench run`: measure, store, and compare with what was measured before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from sqlalchemy import update

from dashboard.asv_runs import PROFILES, RESULTS, AsvRun, RunRequest, run_asv
from dashboard.cli_base import App, pass_app
from dashboard.cli_exit import FailedBenchmarksError, MissingResultsError, RefusedResultsError
from dashboard.terminal import console, print_comparison, print_report
from db.compare import compare
from db.errors import UnknownCommitError
from db.ingest import IngestReport, ingest
from db.models import Run
from db.queries import case_results
from db.queries import commits as stored_commits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from sqlalchemy.orm import Session

FIRST_RUN: Final = (
    "nothing earlier was measured on this machine, so its cases can only be new, failed or "
    "skipped; regression, improvement, no change and inconclusive need an earlier commit"
)


@click.command()
@click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default="quick",
    show_default=True,
    help="How much of the suite to measure.",
)
@click.option(
    "--commits",
    metavar="RANGE",
    help="As git names it, or several, parted by spaces. Default: the checkout as it is.",
)
@click.option("--bench", metavar="REGEX", help="Only benchmarks whose name matches.")
@click.option("--machine", metavar="NAME", help="The stable label of this machine.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MINUTES",
    help="Begin no benchmark that would not end in time; the same command goes on.",
)
@click.option(
    "--in-turns",
    is_flag=True,
    help="A benchmark of each commit before the next benchmark, so that a drift favours none.",
)
@click.option("--restart", is_flag=True, help="Measure again what an unfinished run has.")
@pass_app
def run(app: App, /, *, time_limit: float | None, **options: Any) -> None:  # noqa: ANN401 - click's
    """Measure this checkout or a range of its commits with asv, and store the results.

    One benchmark after the other, each stored when it ends: a run that was killed goes on where it
    stopped when the same command is given again. Each commit is compared with the newest earlier
    one measured on the same machine; a regression is reported, not an error. Exit status 4 means
    that a benchmark failed or that the time limit left some.

    Example: ddtree-bench run --profile full --commits main~5..main --machine blackwell
    """
    limit_s = None if time_limit is None else 60 * time_limit
    request = RunRequest(Path.cwd(), time_limit_s=limit_s, **options)
    reports: list[IngestReport] = []

    def store() -> None:
        with app.engine(must_exist=False) as engine:
            results = [request.root / RESULTS]
            reports.append(ingest(engine, results, repository=request.root))

    measured = run_asv(request, echo=lambda line: click.echo(line, err=True), on_results=store)
    if not reports:
        store()
    to, report = console(), _summed(reports)
    print_report(to, report)
    with app.reading() as session:
        _store_findings(session, measured)
        for commit in measured.commits:
            for label in _machines(session, measured, commit):
                _print_verdicts(to, session, commit, label)
    if report.refused:
        raise RefusedResultsError(report.refused)
    if measured.failed:
        raise FailedBenchmarksError(measured.failed)
    if measured.left is not None:
        raise MissingResultsError(f"time limit: {measured.left} left; the same command goes on")


def _summed(reports: Sequence[IngestReport]) -> IngestReport:
    """Give the last report, which read everything, with what the earlier ones found new."""
    last, earlier = reports[-1], sum(report.new_results for report in reports[:-1])
    return replace(last, new_results=last.new_results + earlier, unchanged=last.unchanged - earlier)


def _store_findings(session: Session, measured: AsvRun) -> None:
    """Keep what the doctor found with the results that this call stored."""
    ours = update(Run).where(Run.invocation == measured.run_id)
    session.execute(ours.values(findings=list(measured.findings)))
    session.commit()


def _machines(session: Session, measured: AsvRun, commit: str) -> list[str]:
    """Return the machines of this checkout's results that have some of the commit."""
    here = {path.parent.name for path in measured.results_dir.glob("*/machine.json")}
    try:
        stored = case_results(session, commit, include_dirty=True)
    except UnknownCommitError:
        return []  # the time limit left all of it
    return sorted(here & {result.key.machine for result in stored})


def _print_verdicts(to: Console, session: Session, commit: str, machine: str) -> None:
    """Compare a commit with the newest earlier one on the machine that has clean results."""
    contender = case_results(session, commit, machine, include_dirty=True)
    earlier = _earlier(session, commit, machine)
    base, baseline = next(
        ((one, found) for one in earlier if (found := case_results(session, one, machine))),
        (None, []),
    )
    to.print(f"\n{machine}:", style="bold")
    if base is None:
        to.print(FIRST_RUN)
    print_comparison(to, compare(baseline, contender), base=base, head=commit)


def _earlier(session: Session, commit: str, machine: str) -> list[str]:
    """List what was measured on the machine before a commit, the newest first."""
    frame = stored_commits(session, machine)
    if frame["position"].notna().all() and frame["order_basis"].nunique() == 1:
        frame = frame.sort_values("position", ascending=False)
    ours: list[str] = frame.loc[~frame["external"].astype(bool), "commit"].tolist()
    return ours[ours.index(commit) + 1 :]
