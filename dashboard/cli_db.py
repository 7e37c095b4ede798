"""`ddtree-bench db …`: the tables, as against what stands in them."""

from __future__ import annotations

import click

from dashboard.cli_base import App, pass_app
from db import session


@click.group()
def db() -> None:
    """Create, bring up to date or check the database's tables."""


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
