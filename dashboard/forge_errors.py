"""What can go wrong between us and a forge, and how an answer becomes one of these.

No message ever contains the token.

    ForgeError
    ├── ForgeInputError           what the caller gave cannot work
    │   ├── AuthenticationError    401, or no usable token
    │   ├── ForbiddenError         403: the token may not do this (a fork's token is read-only)
    │   ├── NotFoundError          404: no such repository, pull request or commit
    │   └── UnprocessableError     422: understood and refused (too long, unknown commit, locked)
    └── ForgeServiceError         the other side, or the way there, failed
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

MESSAGE_LENGTH: Final = 200  # characters of the forge's own words kept in a message


class ForgeError(Exception):
    """Root of what talking to a forge can raise."""


class ForgeInputError(ForgeError):
    """The repository, pull request, commit or token given cannot work."""


class AuthenticationError(ForgeInputError):
    """The token is missing, malformed or refused."""


class ForbiddenError(ForgeInputError):
    """The token is known but may not do this."""


class NotFoundError(ForgeInputError):
    """The repository, pull request or commit does not exist for this token."""


class UnprocessableError(ForgeInputError):
    """The request was understood and refused for what it holds."""


class ForgeServiceError(ForgeError):
    """The forge, or the way to it, failed; the same call may work later."""


class RateLimitError(ForgeServiceError):
    """The token has no requests left for now; nothing was done."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s  # as the forge asks, None where it does not say


class ServerError(ForgeServiceError):
    """The forge answered 5xx."""


class ConnectionFailedError(ForgeServiceError):
    """No answer came: timeout, refused connection or unknown host."""


class AnswerError(ForgeServiceError):
    """The forge answered with something this client does not understand."""


REFUSALS: Final[dict[int, tuple[type[ForgeError], str]]] = {
    401: (AuthenticationError, "expected a valid token"),
    403: (
        ForbiddenError,
        (
            "the token may not do this: commenting needs pull-requests: write, a check needs "
            "checks: write, an issue issues: write, and a fork's token never has any"
        ),
    ),
    404: (NotFoundError, "no such thing, or this token may not see it"),
    422: (UnprocessableError, "expected one that the forge takes"),
}


def refusal(forge: str, where: str, response: httpx.Response, token: str) -> ForgeError:
    """Return the typed error for an answer that is not a success, in one line without the token."""
    status = response.status_code
    said = f"{where}: {forge} answered {status}{_words(response, token)}"
    if _is_rate_limit(response):
        wait_s, when = _retry(response)
        return RateLimitError(f"{said} (no requests left{when})", wait_s)
    if status >= 500:
        return ServerError(f"{said} (tried as often as is safe; try again later)")
    kind, hint = REFUSALS.get(status, (AnswerError, "expected a success"))
    return kind(f"{said} ({hint})")


def _is_rate_limit(response: httpx.Response) -> bool:
    """Tell the primary limit (nothing remaining) and the secondary one (Retry-After) from 403s."""
    spent = response.headers.get("x-ratelimit-remaining") == "0"
    return response.status_code == 429 or (
        response.status_code == 403 and (spent or "retry-after" in response.headers)
    )


def _retry(response: httpx.Response) -> tuple[float | None, str]:
    """Return how long the forge asks to wait, where it says so in seconds, and that in words."""
    seconds = response.headers.get("retry-after", "")
    if seconds.isdecimal() and len(seconds) <= 9:
        return float(seconds), f"; again in {seconds} s"
    reset = response.headers.get("x-ratelimit-reset", "")
    if reset.isdecimal() and len(reset) <= 11:
        at = datetime.fromtimestamp(int(reset), UTC)
        return None, f"; again at {at:%Y-%m-%d %H:%M:%S} UTC"
    return None, ""


def _words(response: httpx.Response, token: str) -> str:
    """Return the forge's own message, on one line, or nothing."""
    try:
        answer = response.json()
    except ValueError:
        return ""
    message = answer.get("message") if isinstance(answer, dict) else None
    if not isinstance(message, str):
        return ""
    line = " ".join(message.replace(token, "***").split())
    return f": {line[:MESSAGE_LENGTH]}"
