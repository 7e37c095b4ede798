"""Sends findings to a webhook; the address's path and query may be secret and are never shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import httpx

from dashboard.units import change_text
from dashboard.words import case_name, count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from db.alert_queries import AlertView

TIMEOUT_S: Final = 10.0
SHOWN_CASES: Final = 5  # of a finding; the rest is counted


class NoticeError(Exception):
    """A webhook did not take a notice."""


def channel_of(url: str) -> str:
    """Name a webhook without what may be secret in it."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise NoticeError("webhook: expected an http or https address, got another one")
    return f"webhook {parts.hostname}"


def payload(
    views: Sequence[AlertView], changed: Callable[[AlertView], str] = lambda _: ""
) -> dict[str, Any]:
    """Say in one text what moved, one finding a paragraph, and give the alerts beside it.

    `changed` says of the first alert of a finding what else changed at its commit.
    """
    findings: dict[tuple[str, str, str], list[AlertView]] = {}
    for view in views:
        findings.setdefault(view.finding, []).append(view)
    paragraphs = (f"{_paragraph(found)}. {changed(found[0])}" for found in findings.values())
    text = "\n".join(one.removesuffix(". ") for one in paragraphs)
    return {"text": text, "alerts": [view.to_dict() for view in views]}


def post(url: str, message: dict[str, Any]) -> None:
    """Send a message.

    Raises
    ------
    NoticeError
        The other side is not there or does not take it.
    """
    where = channel_of(url)
    try:
        answer = httpx.post(url, json=message, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoticeError(f"{where}: expected an answer, got {type(error).__name__}") from error
    if not answer.is_success:
        raise NoticeError(f"{where}: expected status 2xx, got {answer.status_code}")


def _paragraph(found: Sequence[AlertView]) -> str:
    first = found[0]
    cases = ", ".join(
        f"{case_name(one.benchmark, one.params)} {change_text(one.relative_change)}"
        for one in found[:SHOWN_CASES]
    )
    rest = f" and {len(found) - SHOWN_CASES} more" if len(found) > SHOWN_CASES else ""
    return (
        f"{count_text(len(found), 'case')} slower on {first.machine} since {first.commit[:12]}, "
        f"cause {first.cause}, owner {first.owner}: {cases}{rest}"
    )
