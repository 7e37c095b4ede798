"""`ddtree-bench run`: measure, store, and compare with what was measured before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from sqlalchemy.orm import Session

from dashboard.asv_runs import PROFILES, AsvRun, RunRequest, run_asv
from dashboard.cli_base import App, pass_app
from dashboard.cli_exit import FailedBenchmarksError, RefusedResultsError
from dashboard.terminal import console, print_comparison, print_report
from db.compare import compare
from db.ingest import ingest
from db.queries import case_results
from db.queries import commits as stored_commits

if TYPE_CHECKING:
    from rich.console import Console

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
@click.option("--commits", metavar="RANGE", help="As git names it. Default: the checkout as it is.")
@click.option("--bench", metavar="REGEX", help="Only benchmarks whose name matches.")
@click.option("--machine", metavar="NAME", help="The stable label of this machine.")
@pass_app
def run(
    app: App, profile: str, commits: str | None, bench: str | None, machine: str | None
) -> None:
    """Measure this checkout or a range of its commits with asv, and store the results.

    Each commit is compared with the newest earlier one measured on the same machine; a regression
    is reported, not an error. Exit status 4 means that a benchmark failed.

    Example: ddtree-bench run --profile full --commits main~5..main --machine blackwell
    """
    request = RunRequest(Path.cwd(), profile, commits, bench, machine)
    measured = run_asv(request, echo=lambda line: click.echo(line, err=True))
    to = console()
    with app.engine(must_exist=False) as engine:
        report = ingest(engine, [measured.results_dir], repository=request.root)
        print_report(to, report)
        with Session(engine) as session:
            for commit in measured.commits:
                for label in _machines(session, measured, commit):
                    _print_verdicts(to, session, commit, label)
    if report.refused:
        raise RefusedResultsError(report.refused)
    if measured.failed:
        raise FailedBenchmarksError(measured.failed)


def _machines(session: Session, measured: AsvRun, commit: str) -> list[str]:
    """Return the machines of this checkout's results that have some of the commit."""
    here = {path.parent.name for path in measured.results_dir.glob("*/machine.json")}
    stored = case_results(session, commit, include_dirty=True)
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
