"""`ddtree-bench ingest`: result trees into the database."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from dashboard.cli_base import App, json_option, pass_app, print_json
from dashboard.cli_exit import RefusedResultsError
from dashboard.terminal import console, print_report
from db.cases import jsonable
from db.ingest import ingest as ingest_trees


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH…")
@click.option(
    "--repository",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the commits are: gives their order, and tells whose code was measured.",
)
@click.option("--dry-run", is_flag=True, help="Read and check everything, write nothing.")
@json_option
@pass_app
def ingest(
    app: App, paths: tuple[Path, ...], *, repository: Path | None, dry_run: bool, as_json: bool
) -> None:
    """Store the results of asv trees and their telemetry; what is stored already stays as it is.

    Results that were measured on other code than they name are refused, one line each, with exit
    status 2; nothing of them is stored.

    Example: ddtree-bench ingest .asv/results --repository .
    """
    with app.engine(must_exist=dry_run) as engine:
        report = ingest_trees(engine, paths, repository=repository, dry_run=dry_run)
    if as_json:
        print_json(jsonable(asdict(report)))
    else:
        print_report(console(), report)
    if report.refused:
        raise RefusedResultsError(report.refused)
