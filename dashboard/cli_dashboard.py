"""`ddtree-bench dashboard`: serve the pages."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from sqlalchemy.orm import Session

from dashboard.cli_base import App, pass_app
from dashboard.theme import LOCAL_USER, SERVER_FLAGS
from db.columns import Role
from db.people import is_known, set_role
from db.session import writing

if TYPE_CHECKING:
    from sqlalchemy import Engine

LOOPBACK: Final = "127.0.0.1"
_PATH: Final = re.compile(r"/?(?:[\w.~-]+/)*[\w.~-]*", re.ASCII)


@click.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8501,
    show_default=True,
    help="Where the pages are served.",
)
@click.option(
    "--host",
    default=LOOPBACK,
    show_default=True,
    help="Address to listen on; anybody who reaches it reads the pages.",
)
@click.option(
    "--path",
    default="/",
    show_default=True,
    help="Where a proxy shows the pages; it passes on what it is asked as it is.",
)
@click.option("--headless", is_flag=True, help="Do not open a browser.")
@click.option(
    "--user",
    metavar="EMAIL",
    help="Sign this person in without asking, on this machine alone.",
)
@pass_app
def dashboard(app: App, port: int, host: str, path: str, headless: bool, user: str | None) -> None:
    """Serve the dashboard until it is interrupted.

    A team signs in through an identity provider instead (README, "A dashboard for a team").

    Example: ddtree-bench dashboard --port 8600 --headless
    """
    if user is not None and host != LOOPBACK:
        raise click.UsageError(
            f"--host: expected {LOOPBACK} with --user, got {host} (whoever opens the pages is that "
            "person)"
        )
    if not _PATH.fullmatch(path):
        raise click.UsageError(
            f"--path: expected names between slashes, as in /bench, got {path!r} (of letters, "
            "digits and ._~-)"
        )
    with app.engine(must_exist=True) as engine:
        if user is not None:
            admit(engine, user.lower())
    arguments = [
        *(sys.executable, "-m", "streamlit", "run", str(Path(__file__).with_name("serving.py"))),
        f"--server.port={port}",
        f"--server.headless={str(headless).lower()}",
        f"--server.address={host}",
        f"--server.baseUrlPath={path.strip('/')}",
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
