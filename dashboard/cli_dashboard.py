"""`ddtree-bench dashboard`: serve the pages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from dashboard.cli_base import App, pass_app
from dashboard.theme import SERVER_FLAGS
from db.session import open_database


@click.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8501,
    show_default=True,
    help="Where the pages are served.",
)
@click.option("--headless", is_flag=True, help="Do not open a browser.")
@pass_app
def dashboard(app: App, port: int, headless: bool) -> None:
    """Serve the dashboard until it is interrupted.

    Example: ddtree-bench dashboard --port 8600 --headless
    """
    open_database(app.url, must_exist=True).dispose()
    arguments = [
        *(sys.executable, "-m", "streamlit", "run", str(Path(__file__).with_name("app.py"))),
        f"--server.port={port}",
        f"--server.headless={str(headless).lower()}",
        *SERVER_FLAGS,
    ]
    # The server takes this process's place, so that it gets its signals and gives its status.
    os.execve(sys.executable, arguments, {**os.environ, "DDTREE_BENCH_DB": app.url})  # noqa: S606
