"""`ddtree-bench ingest`: result files into the database."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from dashboard.cli_base import App, json_option, pass_app, print_json
from dashboard.cli_exit import RefusedResultsError
from dashboard.terminal import console, print_report
from db.cases import jsonable
from db.foreign import Given
from db.ingest import ingest as ingest_files
from db.ingest_settings import Settings, read_settings


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH…")
@click.option(
    "--repository",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the commits are: gives their order, and tells whose code was measured.",
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="DDTREE_BENCH_CONFIG",
    help="TOML: units and directions of metrics, and what was renamed; also for what is stored.",
)
@click.option("--commit", help="Whose results a file is that names no commit.")
@click.option("--machine", metavar="NAME", help="Under which label a file's results go.")
@click.option("--dry-run", is_flag=True, help="Read and check everything, write nothing.")
@json_option
@pass_app
def ingest(
    app: App,
    /,
    paths: tuple[Path, ...],
    *,
    repository: Path | None,
    config: Path | None,
    dry_run: bool,
    as_json: bool,
    **given: str | None,
) -> None:
    """Store results and their telemetry; what is stored already stays as it is.

    A path is a results tree of asv, or a JSON file of pytest-benchmark, google-benchmark or
    nvbench. Of the latter a metric whose direction neither the tool nor the configuration says is
    left out, and named.

    Results that were measured on other code than they name are refused, one line each, with exit
    status 2; nothing of them is stored.

    Example: ddtree-bench ingest .asv/results --repository .
    """
    settings = Settings() if config is None else read_settings(config)
    with app.engine(must_exist=dry_run) as engine:
        report = ingest_files(
            engine,
            paths,
            repository=repository,
            settings=settings,
            given=Given(**given),
            dry_run=dry_run,
        )
    if as_json:
        print_json(jsonable(asdict(report)))
    else:
        print_report(console(), report)
    if report.refused:
        raise RefusedResultsError(report.refused)
