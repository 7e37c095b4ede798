"""`ddtree-bench alerts confirm`: findings of the history measured again before anybody is told."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Unpack

import click
from sqlalchemy.orm import Session

from dashboard.asv_commits import commits_of
from dashboard.asv_errors import AsvRunError
from dashboard.asv_pairs import arena
from dashboard.asv_trials import confirm as try_out
from dashboard.asv_trials import exactly
from dashboard.cli_base import App, pass_app
from dashboard.cli_confirm import Where, machine_option, profile_option, said
from dashboard.words import count_text
from db.alert_queries import OF_THE_RUNNER, alerts
from db.alerts import UNDECIDED, settle
from db.change_queries import commit_before
from db.confirmed import asv_name
from db.sequential import Plan

if TYPE_CHECKING:
    from db.sequential import Decision

MOST_FINDINGS: Final = 5  # of one call: each takes minutes of the device


@dataclass(frozen=True, slots=True)
class _Doubt:
    """Two commits, and the alerts between them that nobody decided yet, by asv's names of cases."""

    before: str
    commit: str
    alerts: dict[str, int]


@click.command(name="confirm")
@profile_option
@machine_option
@click.option(
    "--most",
    type=click.IntRange(min=1),
    default=MOST_FINDINGS,
    show_default=True,
    help="Findings that one call measures, the newest first.",
)
@pass_app
def rerun(app: App, /, *, most: int, **where: Unpack[Where]) -> None:
    """Measure open findings again: the commit of each against the one before it, in turns.

    A regression confirms its alert, no change refutes it; what stays open is tried by the next
    call. A finding of the runner is left to its keeper, as no re-run on the same runner says more.

    Example: ddtree-bench alerts confirm --profile full --machine blackwell
    """
    with app.reading() as session:
        doubts = _doubts(session, where["machine"])
    for doubt in doubts[:most]:
        click.echo(f"{doubt.commit[:12]}: {count_text(len(doubt.alerts), 'case')}", err=True)
        try:
            found = _measured(doubt, where)
        except AsvRunError as error:
            click.echo(f"{doubt.commit[:12]}: not measured again: {error}")
            continue
        for case, decision in found.items():
            click.echo(f"{doubt.commit[:12]} {case}: {said(decision)}")
        _settle(app, doubt, found)
    left = len(doubts) - min(most, len(doubts))
    rest = f", {left} left to the next call" if left else ""
    click.echo(f"{count_text(min(most, len(doubts)), 'finding')} measured again{rest}")


def _doubts(session: Session, machine: str | None) -> list[_Doubt]:
    """Group what nobody decided by the two commits that can decide it."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for view in alerts(session, UNDECIDED):
        is_ours = machine is None or view.machine == machine
        if not is_ours or view.cause in OF_THE_RUNNER or view.unit != "seconds":
            continue
        before = commit_before(session, view)
        if before is not None:
            cases = found.setdefault((before, view.commit), {})
            cases[asv_name(view.benchmark, view.params)] = view.id
    return [_Doubt(*ends, cases) for ends, cases in found.items()]


def _measured(doubt: _Doubt, where: Where) -> dict[str, Decision]:
    root, patterns = Path.cwd(), [exactly(case) for case in doubt.alerts]
    ((before,), (commit,)) = commits_of(root, doubt.before), commits_of(root, doubt.commit)
    with arena(root, echo=lambda _: None, **where) as machine:
        return try_out(
            machine, (before, commit), patterns, Plan(), lambda line: click.echo(line, err=True)
        )


def _settle(app: App, doubt: _Doubt, found: dict[str, Decision]) -> None:
    now = dt.datetime.now(dt.UTC)
    with app.engine(must_exist=True) as engine, Session(engine) as session, session.begin():
        for case, number in doubt.alerts.items():
            if case in found:
                note = f"re-run in turns: {said(found[case])}"
                settle(session, number, found[case].verdict, now, note=note)
