"""Text from elsewhere made safe and short for a page."""

import re
import unicodedata
from typing import Final

import pandas as pd

LONGEST: Final = 600  # characters of one text that a page shows; tables have the whole
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]()#+!|<>~$:-])")
# What makes a text run the other way, or may leave the text behind it doing so.
_TURNS: Final = frozenset(
    {"R", "AL", "RLE", "LRE", "RLO", "LRO", "PDF", "RLI", "LRI", "FSI", "PDI"}
)
_ISOLATE, _END_OF_ISOLATE = "\N{FIRST STRONG ISOLATE}", "\N{POP DIRECTIONAL ISOLATE}"


def escaped(text: str) -> str:
    """Give text that Markdown shows as it is, on one line; subjects and parameters are anybody's.

    A very long text is cut, and one that runs from right to left turns nothing around it.
    """
    line = " ".join(text.split())
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]}…"
    shown = _MARKDOWN.sub(r"\\\1", line)
    if any(unicodedata.bidirectional(letter) in _TURNS for letter in line):
        return f"{_ISOLATE}{shown.replace(_END_OF_ISOLATE, '')}{_END_OF_ISOLATE}"
    return shown


def count_text(count: int, noun: str) -> str:
    """Count things: "1 commit", "1,396 commits"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def case_name(benchmark: str, params: str) -> str:
    """Name a case as asv does."""
    return f"{benchmark}({params})" if params else benchmark


def heads(table: pd.DataFrame) -> dict[str, str]:
    """Give each column of a table the head that it has on a page."""
    return {
        str(name): str(name)[:1].upper() + str(name)[1:].replace("_", " ") for name in table.columns
    }
