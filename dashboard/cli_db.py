"""`ddtree-bench db …`: the tables, as against what stands in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dashboard.cli_base import App, json_option, machine_option, pass_app, print_json
from db import session
from db.exclusions import Selection, exclusions
from db.exclusions import exclude as exclude_results
from db.exclusions import include as include_results

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
