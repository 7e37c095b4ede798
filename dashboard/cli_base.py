"""What every command shares: the database it was given, its options, and how it prints."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy.orm import Session

from dashboard.cli_exit import RefusedError
from dashboard.github import DEFAULT_API_URL
from db.session import opened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine


@dataclass(frozen=True, slots=True)
class App:
    """What the group's options say to all commands."""

    url: str

    @contextmanager
    def engine(self, *, must_exist: bool) -> Iterator[Engine]:
        """Open the database, and let go of its connections at the end."""
        with opened(self.url, must_exist=must_exist) as engine:
            yield engine

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Open a session on a database that must exist."""
        with self.engine(must_exist=True) as engine, Session(engine) as session:
            yield session


pass_app = click.make_pass_decorator(App)

json_option = click.option("--json", "as_json", is_flag=True, help="Print strict JSON only.")
machine_option = click.option("--machine", metavar="NAME", help="Only results of this machine.")
dashboard_option = click.option(
    "--dashboard", metavar="URL", envvar="DDTREE_BENCH_DASHBOARD", help="Where links lead."
)
api_url_option = click.option(
    "--api-url",
    envvar="GITHUB_API_URL",
    default=DEFAULT_API_URL,
    show_default=True,
    help="Where GitHub's interface is.",
)


def token_in(variable: str) -> str:
    """Return the token that an environment variable holds; it is never shown."""
    token = os.environ.get(variable, "")
    if not token:
        raise RefusedError(f"{variable}: expected a token in the environment, got none")
    return token


def print_json(value: Any) -> None:  # noqa: ANN401 - any plain value
    """Print strict JSON: what it cannot hold is an error here, not in the reader."""
    click.echo(json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2))
