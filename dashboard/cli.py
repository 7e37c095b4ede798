"""The command `ddtree-bench`: which commands there are, and what all of them share.

Each command parses, opens a session, calls one function and prints; `cli_exit` says what an exit
status means.
"""

from __future__ import annotations

import click

from dashboard.cli_alerts import alerts
from dashboard.cli_backfill import backfill
from dashboard.cli_base import App
from dashboard.cli_comment import comment
from dashboard.cli_compare import compare
from dashboard.cli_confirm import bisect, confirm
from dashboard.cli_dashboard import dashboard
from dashboard.cli_db import db
from dashboard.cli_detect import detect
from dashboard.cli_diagnose import diagnose
from dashboard.cli_doctor import doctor
from dashboard.cli_exit import Group
from dashboard.cli_ingest import ingest
from dashboard.cli_issues import findings_, issues
from dashboard.cli_reruns import rerun
from dashboard.cli_run import run
from db.session import DEFAULT_URL


@click.group(
    cls=Group,
    epilog="Exit status: 0 ok, 1 internal error, 2 usage or bad input, "
    "3 regression, 4 a benchmark failed or results are missing, 5 inconclusive.",
)
@click.option(
    "--db",
    "url",
    envvar="DDTREE_BENCH_DB",
    default=DEFAULT_URL,
    metavar="URL",
    show_default=True,
    show_envvar=True,
    help="sqlite:///FILE or postgresql://…",
)
@click.pass_context
def main(ctx: click.Context, url: str) -> None:
    """Track the speed of the DDTree engine: measure, store, compare, explain.

    Example: ddtree-bench --db sqlite:///results.db compare 1a2b3c4 5d6e7f8
    """
    ctx.obj = App(url)


for _command in (
    *(alerts, backfill, bisect, comment, compare, confirm, dashboard, db, detect, diagnose, doctor),
    *(ingest, run),
):
    main.add_command(_command)

for _command in (findings_, issues, rerun):
    alerts.add_command(_command)

if __name__ == "__main__":
    main(prog_name="ddtree-bench")
