"""`ddtree-bench alerts …`: what somebody must look at, and what they said of it."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

import click
from click.exceptions import Exit
from sqlalchemy.orm import Session

from dashboard.cli_base import App, json_option, pass_app, print_json
from dashboard.cli_exit import ExitCode, RefusedError
from dashboard.cli_mail import address, message, send, server_of
from dashboard.cli_notices import NoticeError, channel_of, payload, post
from dashboard.terminal import console, print_claims
from dashboard.units import change_text
from dashboard.words import case_name, count_text
from db.alert_queries import alert, precision, stale, untold
from db.alert_queries import alerts as stored_alerts
from db.alerts import BY_THE_SERVICE, LIVE, judge
from db.change_queries import explained_alert
from db.changes import summary
from db.columns import AlertState, Role
from db.models import AlertNotice
from db.people import set_role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dashboard.cli_mail import MailServer
    from db.alert_queries import AlertView

SETTABLE: Final = [state.value for state in AlertState if state not in BY_THE_SERVICE]
DEFAULT_STALE_HOURS: Final = 48.0


class _Where(TypedDict):
    """Whom `notify` tells, and by what."""

    webhook: str | None
    mail: tuple[str, ...]
    smtp: str | None
    sender: str | None


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
    """Show one alert with everything that was said of it, and what changed at its commit.

    Example: ddtree-bench alerts show 7
    """
    with app.reading() as session:
        view = alert(session, number)
        claims = explained_alert(session, view)
    if as_json:
        print_json({**view.to_dict(), "changes": [claim.to_dict() for claim in claims]})
        return
    click.echo(_line(view))
    for one in view.history:
        note = f": {one.note}" if one.note else ""
        click.echo(f"  {one.at:%Y-%m-%d %H:%M} {one.state} by {one.author or 'the service'}{note}")
    if claims:
        print_claims(console(), claims)


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


@alerts.command()
@click.argument("email")
@click.argument("role", type=click.Choice([role.value for role in Role]))
@pass_app
def role(app: App, email: str, role: str) -> None:
    """Say what somebody may do in the dashboard: viewers read, triagers and admins judge alerts.

    Example: ddtree-bench alerts role me@example.org triager
    """
    with app.engine(must_exist=True) as engine, Session(engine) as session, session.begin():
        set_role(session, email.lower(), Role(role))
    click.echo(f"{email}: {role}")


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
@click.option("--webhook", metavar="URL", envvar="DDTREE_BENCH_WEBHOOK", help="Post there.")
@click.option(
    "--mail",
    metavar="ADDRESS",
    envvar="DDTREE_BENCH_MAIL",
    multiple=True,
    help="Write to them; may be given again.",
)
@click.option(
    "--smtp",
    metavar="URL",
    envvar="DDTREE_BENCH_SMTP",
    help="Where mail is handed in: smtp://HOST:PORT (STARTTLS), smtps:// or smtp+plain://.",
)
@click.option("--sender", metavar="ADDRESS", envvar="DDTREE_BENCH_SENDER", help="Who writes.")
@click.option("--dry-run", is_flag=True, help="Print what would be sent.")
@pass_app
def notify(app: App, /, *, dry_run: bool, **where: Unpack[_Where]) -> None:
    """Send what is confirmed, or a runner's, to a webhook or by mail; each alert once to each.

    Who logs in to hand mail in stands in DDTREE_BENCH_SMTP_USER and DDTREE_BENCH_SMTP_PASSWORD.
    What one of them does not take is told there again by the next call; the others have theirs.

    Example: ddtree-bench alerts notify --webhook https://hooks.example.org/T0/B1
    """
    failed = []
    for channel, deliver in _channels(**where):
        try:
            click.echo(_tell(app, channel, None if dry_run else deliver))
        except NoticeError as error:
            failed.append(str(error))
    if failed:
        raise NoticeError("\n".join(failed))


def _channels(
    webhook: str | None, mail: Sequence[str], smtp: str | None, sender: str | None
) -> list[tuple[str, Callable[[dict[str, Any]], None]]]:
    """Name whom to tell, and how; all of it is checked before anybody is."""
    found: list[tuple[str, Callable[[dict[str, Any]], None]]] = []
    if webhook is not None:
        found.append((channel_of(webhook), partial(post, webhook)))
    if mail:
        if smtp is None or sender is None:
            raise RefusedError("mail: expected --smtp and --sender beside it, got none")
        server, author = server_of(smtp), address(sender)
        found += [(f"mail {address(to)}", partial(_write, server, author, to)) for to in mail]
    if not found:
        raise RefusedError("notify: expected --webhook or --mail, got neither")
    return found


def _write(server: MailServer, sender: str, to: str, told: dict[str, Any]) -> None:
    send(server, message(told["text"], sender=sender, to=to))


def _tell(app: App, channel: str, deliver: Callable[[dict[str, Any]], None] | None) -> str:
    """Tell one channel what it was not told; an error leaves it all untold."""
    with app.engine(must_exist=True) as engine, Session(engine) as session, session.begin():
        found = untold(session, channel)
        if not found:
            return f"{channel}: nothing new to tell"
        told = payload(found, lambda view: summary(explained_alert(session, view)))
        if deliver is None:
            return str(told["text"])
        now = dt.datetime.now(dt.UTC)
        session.add_all(AlertNotice(alert_id=one.id, channel=channel, sent_at=now) for one in found)
        session.flush()
        deliver(told)
    return f"{channel}: {count_text(len(found), 'alert')} told"


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
