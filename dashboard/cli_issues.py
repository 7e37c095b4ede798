"""`ddtree-bench alerts findings` and `alerts issues`: from a database to one issue a finding.

Two commands, because where main is measured nobody holds a token that may write, and whoever holds
it runs nothing that was measured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from dashboard.artifact import only_file
from dashboard.cli_base import (
    App,
    api_url_option,
    dashboard_option,
    machine_option,
    pass_app,
    print_json,
    token_in,
)
from dashboard.cli_exit import RefusedError
from dashboard.finding_reports import Recorded, Reports, grouped, read_reports, report
from dashboard.github import GitHub
from dashboard.issues import Teller, counted
from db.alert_queries import alerts as stored_alerts
from db.change_queries import commit_before, explained_alert
from db.changes import summary
from db.columns import AlertState
from db.queries import history

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from dashboard.finding_reports import FindingReport
    from db.alert_queries import AlertView

FINDINGS = "findings.json"  # what the archive of a job holds


class _Where(TypedDict):
    """Where issues are."""

    repo: str
    findings: Path
    author: str | None
    dashboard: str | None
    api_url: str
    dry_run: bool


@click.command(name="findings")
@click.option("--head", metavar="SHA", required=True, help="The commit of main measured last.")
@machine_option
@pass_app
def findings_(app: App, head: str, machine: str | None) -> None:
    """Print every finding of the history as JSON, closed ones too, the newest first.

    A finding is what moved at one commit, on one machine, with one owner. `alerts issues` reads it.

    Example: ddtree-bench alerts findings --head 1a2b3c4d5e6f7a8b9c0d1a2b3c4d5e6f7a8b9c0d
    """
    if not re.fullmatch(r"[0-9a-f]{40}", head):
        raise RefusedError(f"head: expected a commit's 40 hexadecimal digits, got {head!r}")
    with app.reading() as session:
        views = [
            view
            for view in stored_alerts(session, list(AlertState))
            if machine is None or view.machine == machine
        ]
        found = tuple(_report(session, group) for group in grouped(views))
    print_json(Reports(head, found).to_dict())


@click.command()
@click.option("--repo", metavar="OWNER/NAME", required=True, help="The repository on GitHub.")
@click.option(
    "--findings",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="What `alerts findings` printed, or a zip file of it: checked before it is believed.",
)
@click.option("--author", metavar="LOGIN", help="Who writes. Default: the token's account.")
@dashboard_option
@api_url_option
@click.option("--dry-run", is_flag=True, help="Print what would be opened or kept up.")
def issues(**where: Unpack[_Where]) -> None:
    """Keep one issue for each finding that a re-run or a person stands for.

    Opened once, edited while it lasts, closed when its level returns or somebody settles its
    alerts; what people close stays closed. The token is read from GITHUB_TOKEN and never shown.

    Example: ddtree-bench alerts issues --repo octo/engine --findings findings.json --dry-run
    """
    reports = read_reports(_parsed(where["findings"]))
    if where["dry_run"]:
        for one in reports.findings:
            if one.is_live and one.is_told:
                click.echo(f"{one.key} {one.commit[:12]} on {one.machine}: {one.said}")
        return
    with GitHub(token_in("GITHUB_TOKEN"), where["api_url"]) as client:
        author = where["author"] or client.login()
        told = Teller(client.issues(where["repo"]), author, where["dashboard"]).tell(reports)
    for done in told:
        if done.url and done.action != "unchanged":
            click.echo(f"issue: {done.action} {done.url}")
    click.echo(f"issues: {counted(told)}")


def _report(session: Session, group: list[AlertView]) -> FindingReport:
    first = group[0]
    values = history(session, first.series_id, main_only=True)["value"].dropna()
    return report(
        group,
        Recorded(
            previous=commit_before(session, first),
            summary=summary(explained_alert(session, first)),
            levels=tuple(float(value) for value in values),
        ),
    )


def _parsed(path: Path) -> object:
    """Read JSON, or the one file of an archive that holds it."""
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    content = only_file(path, FINDINGS) if is_archive else path.read_bytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise RefusedError(f"{path}: expected JSON, got text that is none") from None
