"""`ddtree-bench alerts …`: what somebody must look at, and what they said of it."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click
from click.exceptions import Exit
from sqlalchemy.orm import Session

from dashboard.cli_base import App, json_option, pass_app, print_json
from dashboard.cli_exit import ExitCode
from dashboard.cli_notices import channel_of, payload, post
from dashboard.units import change_text
from dashboard.words import case_name, count_text
from db.alert_queries import alert, precision, stale, untold
from db.alert_queries import alerts as stored_alerts
from db.alerts import BY_THE_SERVICE, LIVE, judge
from db.columns import AlertState
from db.models import AlertNotice

if TYPE_CHECKING:
    from db.alert_queries import AlertView

SETTABLE: Final = [state.value for state in AlertState if state not in BY_THE_SERVICE]
DEFAULT_STALE_HOURS: Final = 48.0


@click.group()
def alerts() -> None:
    """List findings, say what they are, send them on, and warn of stale data."""


@alerts.command(name="list")
@click.option("--all", "with_closed", is_flag=True, help="Those that are closed as well.")
@json_option
@pass_app
def list_(app: App, *, with_closed: bool, as_json: bool) -> None:
    """List what is open, acknowledged or confirmed; cases that moved together stand together.

    Example: ddtree-bench alerts list --all --json
    """
    with app.reading() as session:
        found = stored_alerts(session, list(AlertState) if with_closed else LIVE)
    if as_json:
        print_json([view.to_dict() for view in found])
        return
    last = None
    for view in sorted(found, key=lambda view: [one.finding for one in found].index(view.finding)):
        if view.finding != last:
            click.echo(f"{view.commit[:12]} on {view.machine}: {view.cause}, owner {view.owner}")
        last = view.finding
        click.echo(f"  {_line(view)}")
    if not found:
        click.echo("no alerts")


@alerts.command()
@click.argument("number", type=int)
@json_option
@pass_app
def show(app: App, number: int, *, as_json: bool) -> None:
    """Show one alert with everything that was said of it.

    Example: ddtree-bench alerts show 7
    """
    with app.reading() as session:
        view = alert(session, number)
    if as_json:
        print_json(view.to_dict())
        return
    click.echo(_line(view))
    for one in view.history:
        note = f": {one.note}" if one.note else ""
        click.echo(f"  {one.at:%Y-%m-%d %H:%M} {one.state} by {one.author or 'the service'}{note}")


@alerts.command(name="set")
@click.argument("number", type=int)
@click.argument("state", type=click.Choice(SETTABLE))
@click.option("--author", metavar="EMAIL", required=True, help="Who says so.")
@click.option("--note", metavar="TEXT", help="Why.")
@pass_app
def set_(app: App, number: int, state: str, author: str, note: str | None) -> None:
    """Say where an alert stands; the step is kept with its author.

    Example: ddtree-bench alerts set 7 "false positive" --author me@example.org --note "warm-up"
    """
    with app.engine(must_exist=True) as engine, Session(engine) as session, session.begin():
        judge(session, number, AlertState(state), author=author, note=note)
    click.echo(f"alert {number}: {state}")


@alerts.command(name="precision")
@json_option
@pass_app
def precision_(app: App, *, as_json: bool) -> None:
    """Say how often the detector was right, by what people said of its alerts.

    Example: ddtree-bench alerts precision
    """
    with app.reading() as session:
        found = precision(session)
    if as_json:
        print_json({**asdict(found), "precision": found.value, "at_least": found.at_least})
    elif found.value is None:
        click.echo(f"precision: nobody judged any of {count_text(found.unjudged, 'alert')}")
    else:
        click.echo(
            f"precision: {found.value:.0%}, at least {found.at_least:.0%} (95 %): {found.real} "
            f"real, {found.false_positives} false, {found.unjudged} not judged"
        )


@alerts.command()
@click.option(
    "--webhook",
    "url",
    metavar="URL",
    envvar="DDTREE_BENCH_WEBHOOK",
    required=True,
    help="Where to.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be sent.")
@pass_app
def notify(app: App, url: str, *, dry_run: bool) -> None:
    """Send what is confirmed, or a runner's, to a webhook; each alert once.

    Example: ddtree-bench alerts notify --webhook https://hooks.example.org/T0/B1
    """
    channel = channel_of(url)
    with app.engine(must_exist=True) as engine, Session(engine) as session, session.begin():
        found = untold(session, channel)
        if dry_run or not found:
            click.echo(payload(found)["text"] if found else "nothing new to tell")
            return
        now = dt.datetime.now(dt.UTC)
        session.add_all(AlertNotice(alert_id=one.id, channel=channel, sent_at=now) for one in found)
        session.flush()
        post(url, payload(found))
    click.echo(f"{channel}: {count_text(len(found), 'alert')} told")


@alerts.command(name="stale")
@click.option(
    "--hours",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_STALE_HOURS,
    show_default=True,
    help="How old the newest data may be.",
)
@json_option
@pass_app
def stale_(app: App, hours: float, *, as_json: bool) -> None:
    """Warn of runners and a database that got nothing new; exit status 5 where one did not.

    Example: ddtree-bench alerts stale --hours 72
    """
    with app.reading() as session:
        found = stale(session, hours=hours, now=dt.datetime.now(dt.UTC))
    if as_json:
        print_json([{**asdict(one), "newest": one.newest.isoformat()} for one in found])
    for one in () if as_json else found:
        click.echo(
            f"stale: {one.what}: newest {one.newest:%Y-%m-%d %H:%M} UTC, {one.hours:.0f} h ago"
        )
    if found:
        raise Exit(ExitCode.INCONCLUSIVE)
    if not as_json:
        click.echo(f"every runner measured within {hours:g} h")


def _line(view: AlertView) -> str:
    return (
        f"{view.id} {view.state}: {case_name(view.benchmark, view.params)} "
        f"{change_text(view.relative_change)} since {view.commit[:12]}"
    )
