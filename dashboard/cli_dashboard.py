"""`ddtree-bench dashboard`: serve the pages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from sqlalchemy.orm import Session

from dashboard.cli_base import App, pass_app
from dashboard.theme import LOCAL_USER, SERVER_FLAGS
from db.columns import Role
from db.people import is_known, set_role
from db.session import writing

if TYPE_CHECKING:
    from sqlalchemy import Engine


@click.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8501,
    show_default=True,
    help="Where the pages are served.",
)
@click.option("--headless", is_flag=True, help="Do not open a browser.")
@click.option(
    "--user",
    metavar="EMAIL",
    help="Sign this person in without asking; only this machine can open the pages then.",
)
@pass_app
def dashboard(app: App, port: int, headless: bool, user: str | None) -> None:
    """Serve the dashboard until it is interrupted.

    A team signs in through an identity provider instead (README, "A dashboard for a team").

    Example: ddtree-bench dashboard --port 8600 --headless
    """
    with app.engine(must_exist=True) as engine:
        if user is not None:
            admit(engine, user.lower())
    arguments = [
        *(sys.executable, "-m", "streamlit", "run", str(Path(__file__).with_name("app.py"))),
        f"--server.port={port}",
        f"--server.headless={str(headless).lower()}",
        *(["--server.address=127.0.0.1"] if user is not None else []),
        *SERVER_FLAGS,
    ]
    # The server takes this process's place, so that it gets its signals and gives its status.
    # Whoever was signed in around the command is not: only `--user` says so.
    inherited = {name: value for name, value in os.environ.items() if name != LOCAL_USER}
    local = {} if user is None else {LOCAL_USER: user.lower()}
    os.execve(sys.executable, arguments, {**inherited, **local, "DDTREE_BENCH_DB": app.url})  # noqa: S606


def admit(engine: Engine, email: str) -> None:
    """Let the one person of a laptop judge alerts, unless a role was given to them before."""
    with writing(engine) as connection, Session(bind=connection) as session:
        if not is_known(session, email):
            set_role(session, email, Role.TRIAGER)
            session.flush()
