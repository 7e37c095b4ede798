"""`ddtree-bench doctor`: what will make results noisy or wrong here, and what mends it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from dashboard.cli_base import json_option, print_json
from dashboard.cli_exit import ExitCode
from dashboard.doctor import findings_of
from dashboard.doctor_finding import Level

EXIT_CODES: Final = {
    Level.WRONG: ExitCode.FAILED,
    Level.NOISY: ExitCode.INCONCLUSIVE,
    Level.UNKNOWN: ExitCode.OK,
}


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, *, as_json: bool) -> None:
    """Say what will make results noisy or wrong on this machine, and the command that mends it.

    Looks at clocks, power cap, persistence, other processes, ECC, heat and MIG of the GPU that a
    run would use, and at checkout, CPU governor and load. Changes nothing. Exit status 4 means that
    results would be wrong, 5 that they would be noisy.

    Example: ddtree-bench doctor --json
    """
    findings = findings_of(Path.cwd())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            click.echo(f"{finding.level.value}: {finding.subject}: {finding.message}")
            click.echo(f"    {finding.command}")
        if not findings:
            click.echo("nothing found that makes results noisy or wrong")
    ctx.exit(EXIT_CODES[findings[0].level] if findings else ExitCode.OK)
