"""The few GitHub calls behind the one sticky comment of a pull request.

Owns the requests and their retries; knows nothing about benchmarks or Markdown. Its errors are
those of `dashboard.github_errors`, its answers are checked before they are believed.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Self

import httpx

from dashboard.github_answers import (
    Comment,
    PullRequest,
    read_comment,
    read_items,
    read_json,
    read_pull_request,
    read_str,
)
from dashboard.github_errors import (
    AnswerError,
    AuthenticationError,
    ConnectionFailedError,
    GitHubInputError,
    NotFoundError,
    ServerError,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

DEFAULT_API_URL: Final = "https://api.github.com"
API_VERSION: Final = "2022-11-28"
TIMEOUT_S: Final = 20.0
BACKOFF_S: Final = (1.0, 4.0)  # waits between attempts; one attempt more than waits
REPEATABLE: Final = frozenset({"GET", "PATCH"})  # a second POST would be a second comment
PER_PAGE: Final = 100  # GitHub's largest page

_REPOSITORY = re.compile(r"[A-Za-z0-9._-]+/[A-Za-z0-9._-]+")
_COMMIT = re.compile(r"[0-9a-fA-F]{7,40}")
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Upsert:
    """What became of the sticky comment."""

    action: Literal["created", "updated", "unchanged"]
    url: str


class GitHub:
    """A client for one token and one API address.

    Parameters
    ----------
    token : the value of the Authorization header, never logged.
    api_url : such as ``https://ghe.example.org/api/v3``.
    transport : another way to send requests, for tests.
    sleep : how to wait between attempts.
    """

    def __init__(
        self,
        token: str,
        api_url: str = DEFAULT_API_URL,
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not _TOKEN.fullmatch(token):
            raise AuthenticationError(
                "GITHUB_TOKEN: expected printable characters without spaces, got "
                f"{len(token)} characters (its value is not shown)"
            )
        self._token = token
        self._sleep = sleep
        self._client = httpx.Client(
            base_url=_api_base(api_url),
            headers={
                "Accept": "application/vnd.github+json",
                "Authorization": f"Bearer {token}",
                "User-Agent": "ddtree-bench",
                "X-GitHub-Api-Version": API_VERSION,
            },
            timeout=TIMEOUT_S,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def login(self) -> str:
        """Return the account behind the token; an Actions token may not ask (ForbiddenError)."""
        return read_str(read_json(self._call("GET", "/user")), "login")

    def comments(self, repo: str, pr: int) -> Iterator[Comment]:
        """Yield every comment of a pull request, oldest first, page after page."""
        path = f"/repos/{_repository(repo)}/issues/{pr}/comments"
        for item in self._pages(path, {"per_page": PER_PAGE}):
            yield read_comment(item)

    def open_pull_request(self, repo: str, head: str) -> PullRequest:
        """Return the open pull request whose newest commit is ``head``, a hash or its start.

        Raises
        ------
        NotFoundError
            No open pull request ends there, for instance because more was pushed since.
        """
        path, wanted = f"/repos/{_repository(repo)}/pulls", _commit(head).lower()
        for item in self._pages(path, {"state": "open", "per_page": PER_PAGE}):
            found = read_pull_request(item)
            if found.head.startswith(wanted):
                return found
        raise NotFoundError(
            f"pull request: expected an open one with head {head[:12]} in {repo}, got none "
            "(it was closed, or newer commits were pushed)"
        )

    def merge_base(self, repo: str, base: str, head: str) -> str:
        """Return the commit at which ``head`` left ``base``."""
        pair = f"{_commit(base)}...{_commit(head)}"
        answer = read_json(self._call("GET", f"/repos/{_repository(repo)}/compare/{pair}"))
        return read_str(answer, "merge_base_commit", "sha")

    def upsert_comment(
        self, repo: str, pr: int, marker: str, body: str, *, author: str | None = None
    ) -> Upsert:
        """Create the one comment that carries ``marker``, or edit it where it stands.

        A comment is ours if it carries the marker and ``author`` (the token's account if None)
        wrote it: anybody may paste a marker. Of several the oldest is kept up to date. An equal
        body is not sent again.
        """
        ours = author or self.login()
        for comment in self.comments(repo, pr):
            if marker in comment.body and comment.author.lower() == ours.lower():
                return self._edit(repo, comment, body)
        path = f"/repos/{_repository(repo)}/issues/{pr}/comments"
        created = read_comment(read_json(self._call("POST", path, json={"body": body})))
        return Upsert("created", created.url)

    def _edit(self, repo: str, comment: Comment, body: str) -> Upsert:
        if _normal(comment.body) == _normal(body):
            return Upsert("unchanged", comment.url)
        path = f"/repos/{_repository(repo)}/issues/comments/{comment.id}"
        edited = read_comment(read_json(self._call("PATCH", path, json={"body": body})))
        return Upsert("updated", edited.url)

    def _pages(self, path: str, params: dict[str, str | int]) -> Iterator[object]:
        response = self._call("GET", path, params=params)
        seen = {str(response.url)}
        while True:
            yield from read_items(response)
            link = response.links.get("next", {}).get("url")
            if link is None:
                return
            url = self._next_page(response, link)
            if url in seen:
                raise AnswerError(f"next page: expected a new address, got {url} again")
            seen.add(url)
            response = self._call("GET", url)

    def _next_page(self, response: httpx.Response, link: str) -> str:
        """Return the absolute next address, refusing to carry the token to another host."""
        url = response.url.join(link)
        home = self._client.base_url
        if (url.scheme, url.host, url.port) != (home.scheme, home.host, home.port):
            raise AnswerError(f"next page: expected an address on {home.host}, got {url.host}")
        return str(url)

    def _call(
        self,
        method: str,
        url: str,
        *,
        params: dict[str, str | int] | None = None,
        json: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Send one request; repeat it after a 5xx or a lost connection where that is harmless."""
        request = self._client.build_request(method, url, params=params, json=json)
        for wait in BACKOFF_S if method in REPEATABLE else ():
            try:
                return self._send(request)
            except (ServerError, ConnectionFailedError):
                self._sleep(wait)
        return self._send(request)

    def _send(self, request: httpx.Request) -> httpx.Response:
        where = f"{request.method} {request.url.path}"
        try:
            response = self._client.send(request)
        except httpx.TimeoutException as error:
            raise ConnectionFailedError(
                f"{where}: no answer from {request.url.host} within {TIMEOUT_S:g} s"
            ) from error
        except httpx.HTTPError as error:
            raise ConnectionFailedError(
                f"{where}: no connection to {request.url.host} ({type(error).__name__})"
            ) from error
        if not response.is_success:
            raise refusal(where, response, self._token)
        return response


def _api_base(api_url: str) -> str:
    try:
        url = httpx.URL(api_url)
    except httpx.InvalidURL as error:
        raise GitHubInputError(f"API address: expected http(s)://host, got {api_url!r}") from error
    if url.scheme not in {"http", "https"} or not url.host or url.userinfo:
        raise GitHubInputError(f"API address: expected http(s)://host, got {api_url!r}")
    return api_url


def _repository(repo: str) -> str:
    if not _REPOSITORY.fullmatch(repo) or repo.split("/")[1] in {".", ".."}:
        raise GitHubInputError(f"repository: expected OWNER/NAME, got {repo!r}")
    return repo


def _commit(sha: str) -> str:
    if not _COMMIT.fullmatch(sha):
        raise GitHubInputError(f"commit: expected 7 to 40 hexadecimal digits, got {sha!r}")
    return sha


def _normal(body: str) -> str:
    """Return a body as GitHub keeps it: one kind of line end, no blank ends."""
    return body.replace("\r\n", "\n").strip()
