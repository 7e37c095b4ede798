"""What commands that stop a change share: the options, the lines and the exit status."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Final

import click

from dashboard.asv_commits import git_lines
from dashboard.cli_exit import VERDICTS, ExitCode, RefusedError
from dashboard.words import count_text
from db.gate import CONFIRMED, FAIL_ON, GONE, Policies, gate, parse_policies, read_policies
from db.repository import HASH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from db.cases import Comparison
    from db.gate import Gate

    Judge = Callable[[Comparison], Gate]

POLICY: Final = ".github/gate.toml"  # where this project keeps it

fail_on_option = click.option(
    "--fail-on",
    type=click.Choice(list(FAIL_ON)),
    help="What is in the way; gaps always are. `confirmed`: what fresh pairs called a regression.",
)
policy_option = click.option(
    "--policy",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML: thresholds by suite, what is required, what is acknowledged.",
)


def asked_gate(fail_on: str | None, policy: Path | None) -> Judge | None:
    """Return how to judge a comparison; None where nobody asked. A bad file is told at once."""
    if fail_on is None:
        if policy is not None:
            raise RefusedError("policy: expected --fail-on beside it, got none")
        return None
    return judged_by(fail_on, Policies() if policy is None else read_policies(policy))


def judged_by(fail_on: str, policies: Policies) -> Judge:
    """Return how to judge a comparison today."""
    today = dt.datetime.now(dt.UTC).date()
    only = fail_on == CONFIRMED
    return lambda comparison: gate(
        comparison, FAIL_ON[fail_on], policies, today, confirmed_only=only
    )


def policies_at(root: Path, commit: str, path: str) -> Policies:
    """Read a file of policies as a commit holds it; a commit without it has no policies.

    Raises
    ------
    RefusedError
        The repository does not have the commit.
    GateError
        The file is none of policies.
    """
    if not HASH.fullmatch(commit):
        raise RefusedError(f"base policy: expected a commit's full hash, got {commit!r:.60}")
    try:
        if not git_lines(root, "ls-tree", "--name-only", commit, "--", path):
            return Policies()
        lines = git_lines(root, "cat-file", "blob", f"{commit}:{path}")
    except CalledProcessError:
        raise RefusedError(
            f"base policy: expected the commit {commit[:12]} in {root}, got none "
            "(policies are those of the branch that a pull request targets)"
        ) from None
    return parse_policies("\n".join(lines).encode(), f"{path} at {commit[:12]}")


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
