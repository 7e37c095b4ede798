"""`ddtree-bench comment`: the one comment of a pull request."""

from __future__ import annotations

import os
from typing import TypedDict, Unpack

import click

from dashboard.cli_base import App, machine_option, pass_app
from dashboard.cli_compare import stored_comparison
from dashboard.cli_exit import RefusedError
from dashboard.forge_answers import PullRequest
from dashboard.github import DEFAULT_API_URL, GitHub
from dashboard.pr_comment import MARKER, CommentContext, render
from db.change_queries import explained
from db.queries import resolve_commit


class _Asked(TypedDict):
    """The command line's options."""

    repo: str
    pr: int | None
    base: str | None
    head: str
    machine: str | None
    author: str | None
    api_url: str
    dry_run: bool


@click.command()
@click.option("--repo", metavar="OWNER/NAME", required=True, help="The repository on GitHub.")
@click.option("--pr", type=click.IntRange(min=1), help="Default: the open one that ends at --head.")
@click.option("--base", metavar="SHA", help="Default: where --head left its target branch.")
@click.option("--head", metavar="SHA", required=True, help="The pull request's newest commit.")
@machine_option
@click.option("--author", metavar="LOGIN", help="Who comments. Default: the token's account.")
@click.option(
    "--api-url",
    envvar="GITHUB_API_URL",
    default=DEFAULT_API_URL,
    show_default=True,
    help="Where GitHub's interface is.",
)
@click.option("--dry-run", is_flag=True, help="Print the comment instead of posting it.")
@pass_app
def comment(app: App, **asked: Unpack[_Asked]) -> None:
    """Write a comparison into the pull request's one comment, or edit it where it stands.

    The token is read from GITHUB_TOKEN and never shown. The exit status says whether the comment
    stands, not what it says.

    Example: ddtree-bench comment --repo octo/engine --pr 7 --base 1a2b3c4 --head 5d6e7f8 --dry-run
    """
    if asked["dry_run"] and asked["base"] is not None:
        click.echo(_body(app, asked["base"], asked))
        return
    with GitHub(_token(), asked["api_url"]) as client:
        target = _target(client, asked)
        body = _body(app, target.base, asked)
        if asked["dry_run"]:
            click.echo(body)
            return
        done = client.upsert_comment(
            asked["repo"], target.number, MARKER, body, author=asked["author"]
        )
    click.echo(f"comment: {done.action} {done.url}")


def _target(client: GitHub, asked: _Asked) -> PullRequest:
    """Return the pull request with its base, asking GitHub for what was not given."""
    pr, base, head = asked["pr"], asked["base"], asked["head"]
    if pr is not None and base is not None:
        return PullRequest(pr, base, head)
    found = client.open_pull_request(asked["repo"], head)
    start = base or client.merge_base(asked["repo"], found.base, head)
    return PullRequest(pr or found.number, start, head)


def _body(app: App, base: str, asked: _Asked) -> str:
    with app.reading() as session:
        base, head = resolve_commit(session, base), resolve_commit(session, asked["head"])
        comparison = stored_comparison(session, base, head, machine=asked["machine"])
        found = explained(session, base, head, comparison)
    return render(comparison, CommentContext(base, head), found)


def _token() -> str:
    token = os.environ.get("GITHUB_TOKEN", "")
    if not token:
        raise RefusedError("GITHUB_TOKEN: expected a token in the environment, got none")
    return token
