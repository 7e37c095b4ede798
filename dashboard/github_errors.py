"""What can go wrong between us and GitHub, and how an answer becomes one of these.

No message ever contains the token.

    GitHubError
    ├── GitHubInputError           what the caller gave cannot work
    │   ├── AuthenticationError    401, or no usable token
    │   ├── ForbiddenError         403: the token may not do this (a fork's token is read-only)
    │   └── NotFoundError          404: no such repository, pull request or commit
    └── GitHubServiceError         the other side, or the way there, failed
        ├── RateLimitError         429, or 403 with nothing left to spend
        ├── ServerError            5xx after all attempts
        ├── ConnectionFailedError  timeout, refused connection, unknown host
        └── AnswerError            an answer this client does not understand
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import httpx

MESSAGE_LENGTH: Final = 200  # characters of GitHub's own words kept in a message


class GitHubError(Exception):
    """Root of what talking to GitHub can raise."""


class GitHubInputError(GitHubError):
    """The repository, pull request, commit or token given cannot work."""


class AuthenticationError(GitHubInputError):
    """The token is missing, malformed or refused."""


class ForbiddenError(GitHubInputError):
    """The token is known but may not do this."""


class NotFoundError(GitHubInputError):
    """The repository, pull request or commit does not exist for this token."""


class GitHubServiceError(GitHubError):
    """GitHub, or the way to it, failed; the same call may work later."""


class RateLimitError(GitHubServiceError):
    """The token has no requests left for now."""


class ServerError(GitHubServiceError):
    """GitHub answered 5xx."""


class ConnectionFailedError(GitHubServiceError):
    """No answer came: timeout, refused connection or unknown host."""


class AnswerError(GitHubServiceError):
    """GitHub answered with something this client does not understand."""


def refusal(where: str, response: httpx.Response, token: str) -> GitHubError:
    """Return the typed error for an answer that is not a success, in one line without the token."""
    status = response.status_code
    said = f"GitHub answered {status}{_words(response, token)}"
    if status == 401:
        return AuthenticationError(f"{where}: {said} (expected a valid GITHUB_TOKEN)")
    if _is_rate_limit(response):
        return RateLimitError(f"{where}: {said} (no requests left{_retry_time(response)})")
    if status == 403:
        return ForbiddenError(
            f"{where}: {said} (the token may not do this; commenting needs pull-requests: write, "
            "which a fork's token never has)"
        )
    if status == 404:
        return NotFoundError(f"{where}: {said} (no such thing, or this token may not see it)")
    if status >= 500:
        return ServerError(f"{where}: {said} (tried as often as is safe; try again later)")
    return AnswerError(f"{where}: {said} (expected a success)")


def _is_rate_limit(response: httpx.Response) -> bool:
    """Tell the primary limit (nothing remaining) and the secondary one (Retry-After) from 403s."""
    spent = response.headers.get("x-ratelimit-remaining") == "0"
    return response.status_code == 429 or (
        response.status_code == 403 and (spent or "retry-after" in response.headers)
    )


def _retry_time(response: httpx.Response) -> str:
    seconds = response.headers.get("retry-after", "")
    if seconds.isdecimal():
        return f"; again in {seconds} s"
    reset = response.headers.get("x-ratelimit-reset", "")
    if reset.isdecimal() and len(reset) <= 11:
        return f"; again at {datetime.fromtimestamp(int(reset), UTC):%Y-%m-%d %H:%M:%S} UTC"
    return ""


def _words(response: httpx.Response, token: str) -> str:
    """Return GitHub's own message, on one line, or nothing."""
    try:
        answer = response.json()
    except ValueError:
        return ""
    message = answer.get("message") if isinstance(answer, dict) else None
    if not isinstance(message, str):
        return ""
    line = " ".join(message.replace(token, "***").split())
    return f": {line[:MESSAGE_LENGTH]}"
