"""`ddtree-bench compare`: two commits, case by case."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from dashboard.cli_base import App, json_option, machine_option, pass_app, print_json
from dashboard.cli_exit import MissingResultsError, RefusedError, exit_code
from dashboard.pr_comment import CommentContext, render
from dashboard.terminal import console, print_claims, print_comparison
from dashboard.verdicts import told
from db.baselines import baseline
from db.change_queries import explained
from db.compare import Comparison
from db.compare import compare as compare_cases
from db.queries import case_results, resolve_commit

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

MERGE_BASE = "merge-base"


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


@click.command()
@click.argument("base")
@click.argument("head")
@click.option("--markdown", is_flag=True, help="Print what a pull request's comment says.")
@json_option
@machine_option
@pass_app
def compare(
    app: App, base: str, head: str, *, markdown: bool, as_json: bool, machine: str | None
) -> None:
    """Compare commit HEAD with commit BASE; a hash may be shortened.

    BASE `merge-base` is the newest commit of the main branch with results that HEAD holds.

    The exit status is the verdict: 0 no change or an improvement, 3 regression, 4 a benchmark
    failed or results are missing, 5 inconclusive.

    Example: ddtree-bench compare 1a2b3c4 5d6e7f8 --markdown
    """
    if markdown and as_json:
        raise RefusedError("output: expected --markdown or --json, got both")
    with app.reading() as session:
        head = resolve_commit(session, head)
        is_named = base != MERGE_BASE
        base = resolve_commit(session, base) if is_named else baseline(session, head, machine)
        comparison = stored_comparison(session, base, head, machine=machine)
        found = explained(session, base, head, comparison)
    if as_json:
        grouped = {"findings": [one.to_dict() for one in found]}
        print_json({"base": base, "head": head, **comparison.to_dict(), **grouped})
    elif markdown:
        click.echo(render(comparison, CommentContext(base, head), found))
    else:
        to = console()
        print_comparison(to, comparison, base=base, head=head)
        for one in found:
            click.echo(told(one.moved))
            print_claims(to, one.claims)
    raise Exit(exit_code(comparison))
