"""`ddtree-bench compare`: two commits, case by case."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, Unpack

import click
from click.exceptions import Exit

from dashboard.cli_base import App, json_option, machine_option, pass_app, print_json
from dashboard.cli_exit import MissingResultsError, RefusedError, exit_code
from dashboard.cli_gate import asked_gate, fail_on_option, gate_exit, gate_lines, policy_option
from dashboard.pr_comment import CommentContext, render
from dashboard.terminal import console, print_claims, print_comparison
from dashboard.verdicts import told
from db.baselines import baseline
from db.change_queries import explained
from db.compare import Comparison
from db.compare import compare as compare_cases
from db.queries import case_results, resolve_commit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sqlalchemy.orm import Session

    from db.change_queries import ExplainedCases
    from db.gate import Gate

MERGE_BASE = "merge-base"


class _Asked(TypedDict):
    """The command line's options."""

    markdown: bool
    fail_on: str | None
    policy: Path | None
    as_json: bool
    machine: str | None


def stored_comparison(
    session: Session, base: str, head: str, *, machine: str | None = None
) -> Comparison:
    """Compare the stored results of two full commit hashes."""
    baseline = case_results(session, base, machine)
    contender = case_results(session, head, machine)
    for commit, results in ((base, baseline), (head, contender)):
        if not results:
            on = f" on machine {machine}" if machine else ""
            raise MissingResultsError(f"results: expected some of {commit[:12]}{on}, found none")
    return compare_cases(baseline, contender)


def told_as_json(
    ends: tuple[str, str],
    comparison: Comparison,
    found: Sequence[ExplainedCases],
    gated: Gate | None,
) -> dict[str, object]:
    """Give all that is said of two commits, as plain values for strict JSON."""
    more: dict[str, object] = {"findings": [one.to_dict() for one in found]}
    more |= {} if gated is None else {"gate": gated.to_dict()}
    return {"base": ends[0], "head": ends[1], **comparison.to_dict(), **more}


@click.command()
@click.argument("base")
@click.argument("head")
@click.option("--markdown", is_flag=True, help="Print what a pull request's comment says.")
@fail_on_option
@policy_option
@json_option
@machine_option
@pass_app
def compare(app: App, /, base: str, head: str, **asked: Unpack[_Asked]) -> None:
    """Compare commit HEAD with commit BASE; a hash may be shortened.

    BASE `merge-base` is the newest commit of the main branch with results that HEAD holds.

    The exit status is the verdict: 0 no change or an improvement, 3 regression, 4 a benchmark
    failed or results are missing, 5 inconclusive.

    With --fail-on only what that names counts, and cases that were measured at BASE and are failed,
    removed or skipped at HEAD; --policy says it by suites, and what is acknowledged.

    Example: ddtree-bench compare 1a2b3c4 5d6e7f8 --fail-on regression --policy gate.toml
    """
    machine, as_json = asked["machine"], asked["as_json"]
    if asked["markdown"] and as_json:
        raise RefusedError("output: expected --markdown or --json, got both")
    judged = asked_gate(asked["fail_on"], asked["policy"])
    with app.reading() as session:
        head = resolve_commit(session, head)
        is_named = base != MERGE_BASE
        base = resolve_commit(session, base) if is_named else baseline(session, head, machine)
        comparison = stored_comparison(session, base, head, machine=machine)
        found = explained(session, base, head, comparison)
    gated = None if judged is None else judged(comparison)
    if as_json:
        print_json(told_as_json((base, head), comparison, found, gated))
    elif asked["markdown"]:
        click.echo(render(comparison, CommentContext(base, head, gate=gated), found))
    else:
        to = console()
        print_comparison(to, comparison, base=base, head=head)
        for one in found:
            click.echo(told(one.moved))
            print_claims(to, one.claims)
    for line in [] if gated is None else gate_lines(gated):
        click.echo(line, err=True)
    raise Exit(exit_code(comparison) if gated is None else gate_exit(comparison, gated))
