"""`ddtree-bench detect`: where the histories changed their level."""

from __future__ import annotations

from dataclasses import asdict

import click

from dashboard.cli_base import App, json_option, pass_app, print_json
from db.detection import detect_all


@click.command()
@click.option("--anew", is_flag=True, help="Judge what is as it was as well; finds the same.")
@json_option
@pass_app
def detect(app: App, *, anew: bool, as_json: bool) -> None:
    """Look for change points in every series and store them for the dashboard.

    Only cases with other results than the last pass saw are judged, as are all after a change of
    the commits' order or of the detector itself. Nothing is concluded from less than two levels of
    three results.

    Example: ddtree-bench detect --json
    """
    with app.engine(must_exist=True) as engine:
        report = detect_all(engine, anew=anew)
    if as_json:
        print_json(asdict(report))
        return
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.causes.items()))
    click.echo(
        f"{report.change_points} change points in {report.series} series"
        f"{f' ({causes})' if causes else ''}: {report.new} new, {report.gone} gone "
        f"({report.judged} series judged)"
    )
