"""What commands that stop a change share: the options, the lines and the exit status."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dashboard.cli_exit import VERDICTS, ExitCode, RefusedError
from dashboard.words import count_text
from db.gate import FAIL_ON, GONE, Policies, gate, read_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from db.cases import Comparison
    from db.gate import Gate

fail_on_option = click.option(
    "--fail-on",
    type=click.Choice(list(FAIL_ON)),
    help="What makes the exit status another than 0; gaps always do.",
)
policy_option = click.option(
    "--policy",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML: thresholds by suite, what is required, what is acknowledged.",
)


def asked_gate(fail_on: str | None, policy: Path | None) -> Callable[[Comparison], Gate] | None:
    """Return how to judge a comparison; None where nobody asked. A bad file is told at once."""
    if fail_on is None:
        if policy is not None:
            raise RefusedError("policy: expected --fail-on beside it, got none")
        return None
    policies = Policies() if policy is None else read_policies(policy)
    today = dt.datetime.now(dt.UTC).date()
    return lambda comparison: gate(comparison, FAIL_ON[fail_on], policies, today)


def gate_lines(found: Gate) -> Iterator[str]:
    """Say what is in the way, what is told only and who answers for what."""
    for word, group in (
        ("stopped", found.stopped),
        ("informational", found.informational),
        ("passes", found.acknowledged),
    ):
        for one in group:
            yield f"gate: {word}: {one.case.key.name}: {one.reason}"
    word = "passes" if found.passes else f"stopped by {count_text(len(found.stopped), 'case')}"
    yield f"gate: {word}"


def gate_exit(comparison: Comparison, found: Gate) -> ExitCode:
    """Return the status of the gravest case in the way; without any case, results are missing."""
    if not comparison.cases:
        return ExitCode.FAILED
    codes = {
        ExitCode.FAILED if one.case.verdict in GONE else VERDICTS[one.case.verdict]
        for one in found.stopped
    }
    return min(codes, default=ExitCode.OK)
