"""`ddtree-bench backfill`: measure the commits of a range, those that tell most first."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click
from sqlalchemy.orm import Session

from dashboard.asv_commits import checkout, commits_of
from dashboard.asv_errors import AsvFailedError
from dashboard.asv_runs import PROFILES, RESULTS, RunRequest, run_asv
from dashboard.cli_base import App, pass_app
from dashboard.cli_exit import FailedBenchmarksError
from dashboard.words import count_text
from db.backfill import next_commit
from db.errors import UnknownCommitError
from db.ingest import ingest
from db.queries import case_results

if TYPE_CHECKING:
    from collections.abc import Sequence


class _What(TypedDict):
    """What is measured of each commit."""

    profile: str
    bench: str | None
    machine: str | None


@click.command()
@click.argument("commits", metavar="RANGE")
@click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default="history",
    show_default=True,
    help="How much of the suite to measure.",
)
@click.option("--bench", metavar="REGEX", help="Only benchmarks whose name matches.")
@click.option("--machine", metavar="NAME", help="The stable label of this machine.")
@click.option("--most", type=click.IntRange(min=1), help="Measure no more commits than that.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MINUTES",
    help="Begin no commit after that.",
)
@pass_app
def backfill(
    app: App, /, commits: str, *, most: int | None, time_limit: float | None, **what: Unpack[_What]
) -> None:
    """Measure the commits of RANGE that are not stored yet, those that tell most first.

    The ends come first, then the middle of the stretch whose ends differ most for its length, so
    that a change is closed in on early. Killed, the same command goes on: what is stored is not
    measured again.

    Example: ddtree-bench backfill main~100..main --bench '^step' --time-limit 60
    """
    root = checkout(Path.cwd())
    listed = commits_of(root, commits)
    began_s, closed, done = time.monotonic(), dict[int, str](), 0
    while most is None or done < most:
        if time_limit is not None and time.monotonic() - began_s >= 60 * time_limit:
            click.echo("time limit: the same command goes on", err=True)
            break
        known = _known(app, root, listed, what["machine"])
        place = next_commit(len(listed), known, closed)
        if place is None:
            break
        left = len(listed) - len(known) - len(closed)
        click.echo(f"{listed[place][:12]}, {count_text(left, 'commit')} left", err=True)
        try:
            _measure(app, root, listed[place], what)
        except AsvFailedError as error:
            closed[place] = str(error)
        if place not in _known(app, root, listed, what["machine"]):
            closed.setdefault(place, "no result")
        done += 1
    known = _known(app, root, listed, what["machine"])
    click.echo(f"{len(known)} of {count_text(len(listed), 'commit')} measured")
    if closed:
        raise FailedBenchmarksError(f"{listed[at][:12]}: {why}" for at, why in closed.items())


def _known(
    app: App, root: Path, commits: Sequence[str], machine: str | None
) -> dict[int, dict[str, float]]:
    """Give what is stored of the commits on this machine, by place and case."""
    found: dict[int, dict[str, float]] = {}
    label = machine or _label(root)
    with app.engine(must_exist=False) as engine, Session(engine) as session:
        for place, commit in enumerate(commits):
            try:
                results = case_results(session, commit, label)
            except UnknownCommitError:
                continue
            if results:
                found[place] = {one.key.name: one.value for one in results if one.value}
    return found


def _label(root: Path) -> str | None:
    """Give the one label that this checkout's results have; None if they have several or none."""
    labels = [path.parent.name for path in (root / RESULTS).glob("*/machine.json")]
    return labels[0] if len(labels) == 1 else None


def _measure(app: App, root: Path, commit: str, what: _What) -> None:
    """Measure one commit and store it as far as it came."""

    def store() -> None:
        with app.engine(must_exist=False) as engine:
            ingest(engine, [root / RESULTS], repository=root)

    request = RunRequest(root, commits=commit, **what)
    run_asv(request, echo=lambda line: click.echo(line, err=True), on_results=store)
