"""`ddtree-bench db …`: the tables, as against what stands in them."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dashboard.cli_base import App, json_option, machine_option, pass_app, print_json
from db import session
from db.backup import backup as write_backup
from db.backup import restore as read_backup
from db.exclusions import Selection, exclusions
from db.exclusions import exclude as exclude_results
from db.exclusions import include as include_results
from db.retention import prune as prune_results

if TYPE_CHECKING:
    from db.models import Exclusion

by_option = click.option("--by", required=True, metavar="WHO", help="Whose decision it is.")


@click.group()
def db() -> None:
    """Look after the database: its tables, its size, and which of its results count."""


@db.command()
@pass_app
def upgrade(app: App) -> None:
    """Create the tables, or bring them to this version.

    Example: ddtree-bench db upgrade
    """
    session.upgrade(app.url)
    click.echo("database: its tables are this version's")


@db.command()
@pass_app
def check(app: App) -> None:
    """Compare the tables with what this version expects; exit 2 where they differ.

    Example: ddtree-bench db check
    """
    session.check(app.url)
    click.echo("database: its tables are this version's")


@db.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@pass_app
def backup(app: App, file: Path) -> None:
    """Copy all that is stored into one new SQLite file, while others read and write.

    Example: ddtree-bench db backup 2026-03-01.db
    """
    with app.engine(must_exist=True) as engine:
        rows = write_backup(engine, file)
    click.echo(f"backup: {sum(rows.values())} rows of {len(rows)} tables in {file}")


@db.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@pass_app
def restore(app: App, file: Path) -> None:
    """Put a backup into an empty database, SQLite or PostgreSQL.

    Example: ddtree-bench db restore 2026-03-01.db
    """
    with app.engine(must_exist=False) as engine:
        rows = read_backup(file, engine)
    click.echo(f"restore: {sum(rows.values())} rows of {len(rows)} tables from {file}")


@db.command()
@click.option("--before", required=True, type=click.DateTime(["%Y-%m-%d"]), help="Commits' date.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and keep it.")
@json_option
@pass_app
def prune(app: App, *, before: dt.datetime, dry_run: bool, as_json: bool) -> None:
    """Let go of samples of old results, and of old results beside the main branch.

    Histories keep their points. Kept whole are results around change points, the newest of every
    series, and what somebody excluded or annotated.

    Example: ddtree-bench db prune --before 2025-12-31 --dry-run
    """
    with app.engine(must_exist=True) as engine:
        report = prune_results(engine, before.replace(tzinfo=dt.UTC), dry_run=dry_run)
    if as_json:
        print_json(asdict(report))
        return
    gone = "would go" if dry_run else "gone"
    click.echo(
        f"{report.old} results are older, {report.kept_whole} of them are kept whole; {gone}: "
        f"{report.samples} samples, those of {report.windows} windows, {report.results} results "
        "beside the main branch"
    )


@db.command()
@click.argument("commit")
@by_option
@click.option("--reason", required=True, help="Why; it stays on record.")
@click.option("--bench", metavar="PATTERN", default="*", help="Only benchmarks so named.")
@machine_option
@pass_app
def exclude(
    app: App, commit: str, *, by: str, reason: str, bench: str, machine: str | None
) -> None:
    """Leave results out of everything that is concluded; nothing is deleted.

    Example: ddtree-bench db exclude 1a2b3c4 --machine h200-01 --by ann --reason "fan was broken"
    """
    with app.engine(must_exist=True) as engine:
        made = exclude_results(engine, Selection(commit, machine, bench), author=by, reason=reason)
    click.echo(f"exclusion {made.id}: {made.results} results of {made.what} do not count any more")


@db.command()
@click.argument("exclusion", type=int)
@by_option
@pass_app
def include(app: App, exclusion: int, *, by: str) -> None:
    """Lift an exclusion, so that its results count again.

    Example: ddtree-bench db include 3 --by ann
    """
    with app.engine(must_exist=True) as engine:
        again = include_results(engine, exclusion, author=by)
    click.echo(f"exclusion {exclusion}: {again} results count again")


@db.command()
@json_option
@pass_app
def excluded(app: App, *, as_json: bool) -> None:
    """List what was left out, by whom and why, the newest first.

    Example: ddtree-bench db excluded
    """
    with app.reading() as reading:
        rows = [_exclusion(one) for one in exclusions(reading)]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        lifted = f", lifted by {row['lifted_by']}" if row["lifted_by"] else ""
        click.echo(
            f"{row['id']}: {row['results']} results of {row['what']}, {row['created_at'][:10]} "
            f"by {row['author']}{lifted}: {row['reason']}"
        )


def _exclusion(one: Exclusion) -> dict[str, Any]:
    return {
        "id": one.id,
        "what": one.what,
        "results": one.results,
        "author": one.author,
        "reason": one.reason,
        "created_at": one.created_at.isoformat(),
        "lifted_by": one.lifted_by,
        "lifted_at": None if one.lifted_at is None else one.lifted_at.isoformat(),
    }
