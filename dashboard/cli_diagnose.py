"""`ddtree-bench diagnose`: why the cases are as slow as they are."""

from __future__ import annotations

from typing import Final

import click

from dashboard.cli_base import App, json_option, machine_option, pass_app, print_json
from dashboard.cli_exit import MissingResultsError, RefusedError
from dashboard.cli_incident import print_incident, stored_incident
from dashboard.terminal import console, print_diagnosis
from db.diagnose import diagnose as diagnose_evidence
from db.queries import evidence, resolve_commit

NEWEST_RUNS: Final = 8  # shown in a terminal


@click.command()
@click.argument("series", required=False)
@click.option("--commit", metavar="SHA", help="Only what was measured on this commit.")
@click.option("--incident", is_flag=True, help="The recorded incident beside what repeated it.")
@json_option
@machine_option
@pass_app
def diagnose(
    app: App,
    series: str | None,
    *,
    commit: str | None,
    incident: bool,
    as_json: bool,
    machine: str | None,
) -> None:
    """Hold every case against its floor and say what the counters support, and what nobody tested.

    SERIES is a series' number, as the dashboard's addresses carry it, or part of a benchmark's
    name; without it everything measured with telemetry is read, the newest run first.

    Example: ddtree-bench diagnose step.Step --machine blackwell --json
    """
    if incident:
        _beside(app, is_narrowed=bool(series or commit), as_json=as_json, machine=machine)
        return
    with app.reading() as session:
        sha = None if commit is None else resolve_commit(session, commit)
        found = evidence(session, series=series, machine=machine, commit=sha)
    if not found:
        raise MissingResultsError("evidence: expected telemetry windows, found none stored")
    if as_json:
        print_json({"diagnoses": [diagnose_evidence(one).to_dict() for one in found]})
        return
    to = console()
    for one in found[:NEWEST_RUNS]:
        print_diagnosis(to, diagnose_evidence(one))
    if len(found) > NEWEST_RUNS:
        to.print(f"… and {len(found) - NEWEST_RUNS} older runs (--json gives all)")


def _beside(app: App, *, is_narrowed: bool, as_json: bool, machine: str | None) -> None:
    if is_narrowed:
        raise RefusedError("diagnose: expected --incident or a series or commit, got both")
    with app.reading() as session:
        found = stored_incident(session, machine)
    if as_json:
        print_json(found.to_dict())
    else:
        print_incident(console(), found)
