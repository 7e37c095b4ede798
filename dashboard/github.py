"""The few GitHub calls behind a pull request's comment and its check.

Knows nothing about benchmarks or Markdown. Its errors are those of `dashboard.forge_errors`, its
answers are checked before they are believed.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from dashboard.check_run import NAME
from dashboard.forge_answers import (
    Comment,
    Issue,
    PullRequest,
    read_comment,
    read_int,
    read_issue,
    read_json,
    read_pull_request,
    read_str,
)
from dashboard.forge_errors import ForgeInputError, NotFoundError, UnprocessableError
from dashboard.forge_http import TIMEOUT_S, ForgeHttp, usable_token
from dashboard.sticky import Sticky

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from dashboard.check_run import CheckRun
    from dashboard.sticky import Upsert

DEFAULT_API_URL: Final = "https://api.github.com"
API_VERSION: Final = "2022-11-28"
NOTES_A_CALL: Final = 50  # annotations

_REPOSITORY = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")
_COMMIT = re.compile(r"[0-9a-fA-F]{7,40}")


class GitHub:
    """GitHub for one token; further parameters are those of `ForgeHttp`.

    Parameters
    ----------
    token : the value of the Authorization header, never logged.
    api_url : such as ``https://ghe.example.org/api/v3``.
    """

    def __init__(
        self,
        token: str,
        api_url: str = DEFAULT_API_URL,
        *,
        sleep: Callable[[float], None] = time.sleep,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        headers = {
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {usable_token(token, 'GITHUB_TOKEN')}",
            "X-GitHub-Api-Version": API_VERSION,
        }
        self._http = ForgeHttp(
            "GitHub",
            api_url,
            token,
            headers,
            sleep=sleep,
            timeout_s=timeout_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.__exit__(kind, error, trace)

    def login(self) -> str:
        """Return the account behind the token; an Actions token may not ask (ForbiddenError)."""
        return read_str(read_json(self._http.call("GET", "/user")), "login")

    def comments(self, repo: str, pr: int) -> PullRequestComments:
        """Return the comments of a pull request."""
        return PullRequestComments(self._http, _repository(repo), pr)

    def issues(self, repo: str) -> RepositoryIssues:
        """Return the issues of a repository."""
        return RepositoryIssues(self._http, _repository(repo))

    def upsert_comment(
        self,
        repo: str,
        pr: int,
        marker: str,
        body: str,
        *,
        author: str | None = None,
        newer: str = "",
    ) -> Upsert:
        """Create the one comment with ``marker`` by ``author``, or edit it where it stands.

        Without an author it is the token's account; one that holds ``newer`` is left alone.
        """
        comments = self.comments(repo, pr)
        return Sticky(comments, marker, author or self.login()).upsert(body, newer)

    def pull_request(self, repo: str, number: int) -> PullRequest:
        """Return one pull request."""
        path = f"/repos/{_repository(repo)}/pulls/{number}"
        return read_pull_request(read_json(self._http.call("GET", path)))

    def open_pull_request(self, repo: str, head: str) -> PullRequest:
        """Return the open pull request whose newest commit is ``head``, a hash or its start.

        Where more was pushed since, it is the only one that holds that commit.

        Raises
        ------
        NotFoundError
            No open pull request holds it, or several do and none ends there.
        """
        path, wanted = f"/repos/{_repository(repo)}/pulls", _commit(head).lower()
        for item in self._http.pages(path, {"state": "open"}):
            found = read_pull_request(item)
            if found.head.startswith(wanted):
                return found
        holding = self._holding(repo, wanted)
        if len(holding) == 1:
            return holding[0]
        raise NotFoundError(
            f"pull request: expected an open one with head {head[:12]} in {repo}, got none "
            f"(it was closed, or newer commits were pushed and {len(holding)} hold this one)"
        )

    def _holding(self, repo: str, commit: str) -> list[PullRequest]:
        """Return the open pull requests that GitHub associates with a commit."""
        try:
            items = list(self._http.pages(f"/repos/{repo}/commits/{commit}/pulls", {}))
        except (NotFoundError, UnprocessableError):  # no such commit
            return []
        return [read_pull_request(item) for item in items if read_str(item, "state") == "open"]

    def create_check(self, repo: str, check: CheckRun) -> str:
        """Write a finished check on its commit and return its address.

        GitHub takes 50 annotations a call; the others are added to the check call by call.
        """
        path, notes = f"/repos/{_repository(repo)}/check-runs", check.annotations
        output = {"title": check.title[:255], "summary": check.summary}
        said = {
            "name": NAME,
            "head_sha": _commit(check.head),
            "status": "completed",
            "conclusion": check.conclusion,
            "output": {**output, "annotations": notes[:NOTES_A_CALL]},
        }
        created = read_json(self._http.call("POST", path, json=said))
        for start in range(NOTES_A_CALL, len(notes), NOTES_A_CALL):
            more = {**output, "annotations": notes[start : start + NOTES_A_CALL]}
            self._http.call("PATCH", f"{path}/{read_int(created, 'id')}", json={"output": more})
        return read_str(created, "html_url")

    def merge_base(self, repo: str, base: str, head: str) -> str:
        """Return the commit at which ``head`` left ``base``."""
        pair = f"{_commit(base)}...{_commit(head)}"
        answer = read_json(self._http.call("GET", f"/repos/{_repository(repo)}/compare/{pair}"))
        return read_str(answer, "merge_base_commit", "sha")


@dataclass(frozen=True, slots=True)
class PullRequestComments:
    """The comments of one pull request; `dashboard.sticky` says what is asked of them."""

    http: ForgeHttp
    repo: str
    pr: int

    def read(self) -> Iterator[Comment]:
        """Yield every comment, oldest first, page after page."""
        for item in self.http.pages(f"/repos/{self.repo}/issues/{self.pr}/comments", {}):
            yield read_comment(item)

    def create(self, body: str) -> Comment:
        """Write one more."""
        path = f"/repos/{self.repo}/issues/{self.pr}/comments"
        return read_comment(read_json(self.http.call("POST", path, json={"body": body})))

    def edit(self, comment: Comment, body: str) -> Comment:
        """Change one."""
        answer = self.http.call("PATCH", self._path(comment), json={"body": body})
        return read_comment(read_json(answer))

    def delete(self, comment: Comment) -> None:
        """Remove one."""
        self.http.call("DELETE", self._path(comment))

    def _path(self, comment: Comment) -> str:
        return f"/repos/{self.repo}/issues/comments/{comment.id}"


@dataclass(frozen=True, slots=True)
class RepositoryIssues:
    """The issues of a repository; `dashboard.issues` says what is asked of them."""

    http: ForgeHttp
    repo: str

    def read(self, author: str) -> Iterator[Issue]:
        """Yield those that an account opened, page after page; pull requests are none."""
        asked = {"state": "all", "creator": author}
        for item in self.http.pages(f"/repos/{self.repo}/issues", asked):
            if not (isinstance(item, dict) and "pull_request" in item):
                yield read_issue(item)

    def create(self, title: str, body: str, labels: Sequence[str]) -> Issue:
        """Open one more."""
        said = {"title": title, "body": body, "labels": list(labels)}
        answer = self.http.call("POST", f"/repos/{self.repo}/issues", json=said)
        return read_issue(read_json(answer))

    def edit(self, issue: Issue, changes: Mapping[str, str]) -> Issue:
        """Change one."""
        path = f"/repos/{self.repo}/issues/{issue.number}"
        return read_issue(read_json(self.http.call("PATCH", path, json=changes)))


def _repository(repo: str) -> str:
    if not _REPOSITORY.fullmatch(repo) or repo.split("/")[1] in {".", ".."}:
        raise ForgeInputError(f"repository: expected OWNER/NAME, got {repo!r}")
    return repo


def _commit(sha: str) -> str:
    if not _COMMIT.fullmatch(sha):
        raise ForgeInputError(f"commit: expected 7 to 40 hexadecimal digits, got {sha!r}")
    return sha
