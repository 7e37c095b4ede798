"""`ddtree-bench comment`: what a pull request is told, in one comment, a check and a summary."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from dashboard.artifact import unpack
from dashboard.check_run import check_run
from dashboard.cli_base import (
    App,
    api_url_option,
    dashboard_option,
    machine_option,
    pass_app,
    token_in,
)
from dashboard.cli_compare import stored_comparison, told_as_json
from dashboard.cli_exit import RefusedError, RefusedResultsError
from dashboard.cli_gate import (
    POLICY,
    asked_gate,
    fail_on_option,
    gate_lines,
    judged_by,
    policies_at,
    policy_option,
)
from dashboard.declared import deleted, with_deleted
from dashboard.forge_answers import PullRequest
from dashboard.github import GitHub
from dashboard.gitlab import MergeRequestNotes, gitlab_http, login
from dashboard.pr_comment import MARKER, CommentContext, render, said_of
from dashboard.sticky import Sticky
from db.change_queries import explained
from db.confirmed import confirmed, read_decisions
from db.ingest import ingest
from db.queries import resolve_commit

if TYPE_CHECKING:
    from dashboard.cli_gate import Judge
    from db.cases import Comparison
    from db.gate import Gate


@dataclass(frozen=True, slots=True)
class _Said:
    """A comparison, what is said of it, and what the gate makes of it."""

    comparison: Comparison
    body: str
    gated: Gate | None


class _Asked(TypedDict):
    """The command line's options."""

    repo: str
    gitlab: str | None
    pr: int | None
    base: str | None
    head: str
    artifact: Path | None
    repository: Path | None
    machine: str | None
    author: str | None
    check: bool
    summary: Path | None
    json: Path | None
    fail_on: str | None
    policy: Path | None
    base_policy: str | None
    dashboard: str | None
    api_url: str
    dry_run: bool


@click.command()
@click.option("--repo", metavar="OWNER/NAME", required=True, help="The repository on the forge.")
@click.option(
    "--gitlab",
    metavar="URL",
    help="GitLab's interface, such as https://gitlab.com/api/v4: the merge request --pr of --repo "
    "gets the note, with GITLAB_TOKEN.",
)
@click.option("--pr", type=click.IntRange(min=1), help="Default: the open one that ends at --head.")
@click.option("--base", metavar="SHA", help="Default: where --head left its target branch.")
@click.option("--head", metavar="SHA", required=True, help="The pull request's newest commit.")
@click.option(
    "--artifact",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A zip file of results that nobody vouches for: checked, and stored before.",
)
@click.option(
    "--repository",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the commits are: tells whose code an artifact was measured on, and what benchmarks "
    "the head's suites deleted.",
)
@machine_option
@click.option("--author", metavar="LOGIN", help="Who comments. Default: the token's account.")
@click.option("--check", is_flag=True, help="Write a check on --head as well.")
@click.option(
    "--summary",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append the Markdown to a job's summary.",
)
@click.option(
    "--json",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to a file what the comment says, as `compare --json` prints it.",
)
@fail_on_option
@policy_option
@click.option(
    "--base-policy",
    metavar="PATH",
    help="The same file, as --repository has it on the branch that the pull request targets.",
)
@dashboard_option
@api_url_option
@click.option("--dry-run", is_flag=True, help="Print the comment instead of posting it.")
@pass_app
def comment(app: App, **asked: Unpack[_Asked]) -> None:
    """Write a comparison into the pull request's one comment, or edit it where it stands.

    The token is read from GITHUB_TOKEN and never shown. The exit status says whether the comment
    stands, not what it says: the check does, by --fail-on and --policy.

    Example: ddtree-bench comment --repo octo/engine --pr 7 --base 1a2b3c4 --head 5d6e7f8 --dry-run
    """
    judged = asked_gate(asked["fail_on"], asked["policy"])
    if asked["base_policy"] is not None and (
        judged is None or asked["policy"] is not None or asked["repository"] is None
    ):
        raise RefusedError("base policy: expected --fail-on and --repository, and no --policy")
    if asked["dry_run"] and asked["base"] is not None and asked["artifact"] is None:
        click.echo(_said(app, PullRequest(0, asked["base"], asked["head"]), asked, judged).body)
        return
    if asked["gitlab"] is not None:
        _note(app, asked["gitlab"], asked, judged)
        return
    with GitHub(token_in("GITHUB_TOKEN"), asked["api_url"]) as client:
        target, base = _target(client, asked)
        judged = _judge(target.base, asked) or judged
        found = PullRequest(target.number, base, target.head)
        said = _said(app, found, asked, judged, _stored(app, found, asked))
        if asked["dry_run"]:
            click.echo(said.body)
            return
        _write(client, found, asked, said)


def _judge(tip: str, asked: _Asked) -> Judge | None:
    """Return how the branch that a pull request targets judges it, where that was asked for."""
    fail_on, path, root = asked["fail_on"], asked["base_policy"], asked["repository"]
    if fail_on is None or path is None or root is None:
        return None
    return judged_by(fail_on, policies_at(root, tip, path))


def _note(app: App, api_url: str, asked: _Asked, judged: Judge | None) -> None:
    """Write the note of a merge request, of which everything must be said here."""
    number, base = asked["pr"], asked["base"]
    if number is None or base is None or asked["check"] or asked["artifact"] is not None:
        raise RefusedError("gitlab: expected --pr and --base, and neither --check nor --artifact")
    body = _said(app, PullRequest(number, base, asked["head"]), asked, judged).body
    with gitlab_http(token_in("GITLAB_TOKEN"), api_url) as http:
        notes = MergeRequestNotes(http, asked["repo"], number)
        done = Sticky(notes, MARKER, asked["author"] or login(http)).upsert(body)
    click.echo(f"comment: {done.action} {done.url}")


def _write(client: GitHub, target: PullRequest, asked: _Asked, said: _Said) -> None:
    """Put what is to be said where it was asked for: summary, check, comment."""
    body, gated = said.body, said.gated
    if asked["summary"] is not None:
        with asked["summary"].open("a", encoding="utf-8") as file:
            file.write(f"{body}\n")
    if asked["check"]:
        run = check_run(said.comparison, asked["head"], body, gated)
        click.echo(f"check: {run.conclusion} {client.create_check(asked['repo'], run)}")
        for line in [] if gated is None else gate_lines(gated):
            click.echo(line, err=True)
    is_stale = not target.head.startswith(asked["head"])
    done = client.upsert_comment(
        *(asked["repo"], target.number, MARKER, body),
        author=asked["author"],
        newer=said_of(target.head) if is_stale else "",
    )
    click.echo(f"comment: {done.action} {done.url}")


def _target(client: GitHub, asked: _Asked) -> tuple[PullRequest, str]:
    """Return the pull request as GitHub knows it, and the commit it is compared with."""
    repo, head = asked["repo"], asked["head"]
    if asked["pr"] is None:
        found = client.open_pull_request(repo, head)
    else:
        found = client.pull_request(repo, asked["pr"])
    return found, asked["base"] or client.merge_base(repo, found.base, head)


def _stored(app: App, target: PullRequest, asked: _Asked) -> object:
    """Store an artifact's results, all or nothing, and return what it says was confirmed."""
    if asked["artifact"] is None:
        return None
    commits = {target.base, asked["head"]}
    with tempfile.TemporaryDirectory() as folder, app.engine(must_exist=False) as engine:
        unpacked = unpack(asked["artifact"], Path(folder), commits)
        if unpacked.confirmed is not None:
            read_decisions(unpacked.confirmed, target.base, asked["head"])
        for is_rehearsal in (True, False):
            report = ingest(
                engine,
                [unpacked.results],
                repository=asked["repository"],
                dry_run=is_rehearsal,
            )
            if report.refused:
                raise RefusedResultsError(report.refused)
    return unpacked.confirmed


def _said(
    app: App, target: PullRequest, asked: _Asked, judged: Judge | None, decisions: object = None
) -> _Said:
    """Compare what is stored, and say it; as JSON in a file where that was asked for."""
    with app.reading() as session:
        base, head = resolve_commit(session, target.base), resolve_commit(session, asked["head"])
        comparison = stored_comparison(session, base, head, machine=asked["machine"])
        if decisions is not None:
            comparison = confirmed(comparison, read_decisions(decisions, base, head))
        if asked["artifact"] is not None and asked["repository"] is not None:
            comparison = with_deleted(comparison, deleted(asked["repository"], base, head))
        found = explained(session, base, head, comparison)
    newest = None if target.head.startswith(asked["head"]) or head == target.head else target.head
    gated = None if judged is None else judged(comparison)
    policy = asked["base_policy"] or (asked["policy"].name if asked["policy"] else POLICY)
    context = CommentContext(
        base, head, newest=newest, dashboard=asked["dashboard"], policy=policy, gate=gated
    )
    if asked["json"] is not None:
        told = told_as_json((base, head), comparison, found, gated)
        asked["json"].write_text(f"{json.dumps(told, allow_nan=False)}\n", encoding="utf-8")
    return _Said(comparison, render(comparison, context, found), gated)
