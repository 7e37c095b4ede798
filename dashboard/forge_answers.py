"""A forge's answers as records: what is read from them, and nothing believed unchecked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dashboard.forge_errors import AnswerError

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class Comment:
    """One comment of a pull request."""

    id: int
    author: str  # login; empty for a deleted account
    body: str
    url: str


@dataclass(frozen=True, slots=True)
class Issue:
    """One issue of a repository."""

    number: int
    author: str  # login; empty for a deleted account
    title: str
    body: str
    is_open: bool
    url: str


@dataclass(frozen=True, slots=True)
class PullRequest:
    """An open pull request, as far as a comment needs it."""

    number: int
    base: str  # commit the pull request is compared with by GitHub
    head: str


def read_json(response: httpx.Response) -> object:
    """Return the answer's JSON, or AnswerError where it is none."""
    try:
        return response.json()
    except ValueError as error:
        where = f"{response.request.method} {response.request.url.path}"
        raise AnswerError(
            f"{where}: expected JSON, got {len(response.content)} bytes that are none"
        ) from error


def read_items(response: httpx.Response) -> list[object]:
    """Return the entries of a page."""
    answer = read_json(response)
    if not isinstance(answer, list):
        raise AnswerError(f"{response.url.path}: expected a list, got {type(answer).__name__}")
    return answer


def _get(answer: object, *keys: str) -> object:
    """Walk down nested objects of an answer."""
    for key in keys:
        if not isinstance(answer, dict) or key not in answer:
            raise AnswerError(f"answer: expected {'.'.join(keys)}, got none at {key!r}")
        answer = answer[key]
    return answer


def read_str(answer: object, *keys: str) -> str:
    """Return the text under nested keys."""
    value = _get(answer, *keys)
    if not isinstance(value, str):
        raise AnswerError(f"{'.'.join(keys)}: expected text, got {type(value).__name__}")
    return value


def read_int(answer: object, *keys: str) -> int:
    """Return the number under nested keys."""
    value = _get(answer, *keys)
    if not isinstance(value, int):
        raise AnswerError(f"{'.'.join(keys)}: expected a number, got {type(value).__name__}")
    return value


def read_comment(item: object) -> Comment:
    """Return one entry of a list of comments."""
    author = "" if _get(item, "user") is None else read_str(item, "user", "login")
    body = "" if _get(item, "body") is None else read_str(item, "body")
    return Comment(read_int(item, "id"), author, body, read_str(item, "html_url"))


def read_issue(item: object) -> Issue:
    """Return one entry of a list of issues."""
    author = "" if _get(item, "user") is None else read_str(item, "user", "login")
    body = "" if _get(item, "body") is None else read_str(item, "body")
    is_open = read_str(item, "state") == "open"
    url = read_str(item, "html_url")
    return Issue(read_int(item, "number"), author, read_str(item, "title"), body, is_open, url)


def read_pull_request(item: object) -> PullRequest:
    """Return one entry of a list of pull requests."""
    return PullRequest(
        read_int(item, "number"),
        base=read_str(item, "base", "sha"),
        head=read_str(item, "head", "sha"),
    )
