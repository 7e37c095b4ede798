"""`ddtree-bench confirm` and `bisect`: pairs of two commits in turns, and a search by them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

import click
from click.exceptions import Exit
from sqlalchemy.orm import Session

from dashboard.asv_commits import commits_of
from dashboard.asv_pairs import arena
from dashboard.asv_runs import PROFILES
from dashboard.asv_trials import bisect as search
from dashboard.asv_trials import confirm as try_out
from dashboard.asv_trials import exactly
from dashboard.cli_base import App, json_option, pass_app, print_json
from dashboard.cli_compare import stored_comparison
from dashboard.cli_exit import ExitCode, MissingResultsError, RefusedError
from dashboard.units import change_text
from db.alert_queries import alerts
from db.alerts import settle
from db.cases import Verdict
from db.confirmed import asv_name
from db.errors import MissingDatabaseError
from db.sequential import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from db.sequential import Decision

FLAGGED: Final = frozenset({Verdict.REGRESSION, Verdict.IMPROVEMENT, Verdict.INCONCLUSIVE})
EXITS: Final = (  # the first verdict that any case has
    (Verdict.REGRESSION, ExitCode.REGRESSION),
    (Verdict.INCONCLUSIVE, ExitCode.INCONCLUSIVE),
)


class Where(TypedDict):
    """What the two commands measure on."""

    profile: str
    machine: str | None


profile_option = click.option(
    "--profile", type=click.Choice(PROFILES), default="quick", show_default=True, help="The cases."
)
machine_option = click.option("--machine", metavar="NAME", help="The stable label of this machine.")


@click.command()
@click.argument("base")
@click.argument("head")
@click.option("--bench", metavar="REGEX", help="Default: what compare flags between the two.")
@profile_option
@machine_option
@json_option
@pass_app
def confirm(
    app: App, /, base: str, head: str, *, bench: str | None, as_json: bool, **where: Unpack[Where]
) -> None:
    """Measure two commits in turns, each in a worktree, until each case is decided.

    A pair is a fresh process of either commit; on a CPU both are there at once and alternate every
    hundredth of a second, so that load and clocks are the same for both. Looks after 4, 6, 8, 12,
    16 and 24 pairs; over all of them a case of two equal commits is called changed with at most
    1 %. A regression confirms its open alert, no change refutes it. Nothing is stored as a result.
    Exit status 3 means a regression, 5 that a case stayed open.

    Example: ddtree-bench confirm main~1 main --bench '^step'
    """
    root, tell = Path.cwd(), _teller(quiet=as_json)
    ((first,), (second,)) = commits_of(root, base), commits_of(root, head)
    patterns = [bench] if bench else _flagged(app, first, second, where["machine"])
    if not patterns:
        click.echo("nothing is flagged between the two commits")
        return
    with arena(root, echo=lambda _: None, **where) as machine:
        found = try_out(machine, (first, second), patterns, Plan(), tell)
    settled = _settle(app, second, found)
    if as_json:
        cases = {case: decision.to_dict() for case, decision in found.items()}
        print_json({"base": first, "head": second, "cases": cases, "alerts": settled})
    for case, decision in {} if as_json else found.items():
        click.echo(f"{case}: {said(decision)}")
    verdicts = {decision.verdict for decision in found.values()}
    raise Exit(next((code for verdict, code in EXITS if verdict in verdicts), ExitCode.OK))


@click.command()
@click.argument("good")
@click.argument("bad")
@click.option("--bench", metavar="REGEX", required=True, help="The case, or where to look for it.")
@profile_option
@machine_option
@json_option
def bisect(good: str, bad: str, *, bench: str, as_json: bool, **where: Unpack[Where]) -> None:
    """Name the commit between GOOD and BAD that changed the case which changed most.

    First the ends are confirmed against each other; then each trial measures GOOD and a commit of
    its first parents in turns, at least two pairs, until it is told at which end's level it lies.
    Of searches whose ends differ by at least twice the noise of a pair, at most 1 % name another
    commit. Exit status 3 names a commit that made the case slower, 5 says that no change or no
    single commit could be told.

    Example: ddtree-bench bisect main~16 main --bench 'tree.Build'
    """
    root, tell = Path.cwd(), _teller(quiet=as_json)
    (first,) = commits_of(root, good)
    commits = commits_of(root, f"{good}..{bad}")
    with arena(root, echo=lambda _: None, **where) as machine:
        found = search(machine, (first, *commits), [bench], Plan(), tell)
    if found is None:
        click.echo("bisect: the two ends do not differ", err=True)
        raise Exit(ExitCode.INCONCLUSIVE)
    if as_json:
        told = {"case": found.case, "good": found.good, "bad": found.bad}
        print_json({**told, "between": found.between, "change": found.change.to_dict()})
    elif found.is_decided:
        click.echo(f"{found.bad} changed {found.case}: {said(found.change)}")
    else:
        click.echo(f"between {found.good[:12]} and {found.bad[:12]}: {found.between} untold")
    is_slower = found.is_decided and found.change.verdict is Verdict.REGRESSION
    untold = ExitCode.OK if found.is_decided else ExitCode.INCONCLUSIVE
    raise Exit(ExitCode.REGRESSION if is_slower else untold)


def _teller(*, quiet: bool) -> Callable[[str], None]:
    return lambda line: None if quiet else click.echo(line, err=True)


def _flagged(app: App, base: str, head: str, machine: str | None) -> list[str]:
    """Give the patterns of the timed cases that the stored comparison is not done with."""
    try:
        with app.reading() as session:
            cases = stored_comparison(session, base, head, machine=machine).cases
    except MissingResultsError as error:
        raise RefusedError(f"bench: expected --bench, as nothing is stored ({error})") from error
    flagged = [case for case in cases if case.verdict in FLAGGED and case.unit == "seconds"]
    return [exactly(asv_name(case.key.benchmark, case.key.params)) for case in flagged]


def _settle(app: App, head: str, found: dict[str, Decision]) -> list[int]:
    """Confirm or refute the open alerts of the decided cases, where a database has them."""
    try:
        return _settle_stored(app, head, found)
    except MissingDatabaseError:
        return []


def _settle_stored(app: App, head: str, found: dict[str, Decision]) -> list[int]:
    now, settled = dt.datetime.now(dt.UTC), []
    with app.engine(must_exist=True) as engine, Session(engine) as session, session.begin():
        for view in alerts(session):
            decision = found.get(asv_name(view.benchmark, view.params))
            if view.commit == head and decision is not None:
                note = f"re-run in turns: {said(decision)}"
                if settle(session, view.id, decision.verdict, now, note=note):
                    settled.append(view.id)
    return settled


def said(decision: Decision) -> str:
    """Say in words what fresh pairs came to."""
    low, high = change_text(decision.low), change_text(decision.high)
    change = change_text(decision.relative_change)
    return f"{decision.verdict.value}, {change} [{low}, {high}] over {decision.pairs} pairs"
