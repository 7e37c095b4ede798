"""Text from results made safe for GitHub's Markdown.

Benchmark names, parameters and units of a fork's pull request are the fork's to choose. Nothing
they hold may become markup, a link, a mention or a second table cell. Entities stop the parser;
mentions and issue numbers are looked for after parsing, so a zero-width space parts them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from db.numbers import MISSING

if TYPE_CHECKING:
    from collections.abc import Sequence

LONGEST: Final = 400  # characters of one piece of foreign text

_TICKS: Final = re.compile("`+")
_UNSAFE_IN_CODE: Final = frozenset("`|\\<>&@")
_LITERAL: Final = frozenset(" ,;.()=%+-/'\"?")  # punctuation that means nothing inside a cell
_PARTED: Final = frozenset("@#")


def one_line(text: str) -> str:
    """Return text without control characters, on one line, cut where it is too long."""
    line = " ".join("".join(mark if mark.isprintable() else " " for mark in text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def escape(text: str) -> str:
    """Return text that Markdown shows as it is, in a paragraph or a table cell."""
    line = "".join(_entity(mark) for mark in one_line(text))
    return line.replace("www.", "www&#46;").replace("WWW.", "WWW&#46;")


def code(text: str) -> str:
    """Return text as code: a code span, or its HTML where a span could be broken out of."""
    line = one_line(text)
    if not line:
        return MISSING
    if _UNSAFE_IN_CODE.isdisjoint(line):
        return f"`{line}`"
    return html_code(line)


def html_code(text: str) -> str:
    """Return text as code where forges read HTML and no Markdown, as in a summary."""
    return f"<code>{escape(text)}</code>"


def fenced(*texts: str, language: str = "sh") -> str:
    """Return lines as a block of code, behind a fence that nothing in them can end."""
    lines = [one_line(text) for text in texts]
    longest = max((len(run) for line in lines for run in _TICKS.findall(line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join((f"{fence}{language}", *lines, fence))


def row(cells: Sequence[str]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(cells)} |"


def head(titles: Sequence[str], *, right: Sequence[str]) -> str:
    """Return a table's two head lines; the titles in `right` stand over numbers."""
    rule = ["---:" if title in right else "---" for title in titles]
    return f"{row(titles)}\n{row(rule)}"


def _entity(mark: str) -> str:
    if mark.isalnum() or mark in _LITERAL or not mark.isascii():
        return mark
    parted = "&#8203;" if mark in _PARTED else ""
    return f"&#{ord(mark)};{parted}"
