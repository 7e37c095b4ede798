"""Text from elsewhere made safe and short for a page."""

import re
import unicodedata
from typing import Final

import pandas as pd

from db.numbers import count_text

__all__ = [
    "LONGEST",
    "case_name",
    "count_text",
    "escaped",
    "excerpt",
    "heads",
    "unbroken",
    "unit_text",
    "with_known_subjects",
]

LONGEST: Final = 600  # characters of one text that a page shows; tables have the whole
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]()#+!|<>~$:-])")
# What a page would make a link of, though nothing marks it as one.
_ADDRESS: Final = re.compile(r"https?\\:|www(?=\.)", re.IGNORECASE)
_JOINER: Final = "\N{WORD JOINER}"
# What makes a text run the other way, or may leave the text behind it doing so.
_TURNS: Final = frozenset(
    {"R", "AL", "RLE", "LRE", "RLO", "LRO", "PDF", "RLI", "LRI", "FSI", "PDI"}
)
# Units that are things counted; behind a ratio, "1 times the floor" is right.
_SINGULARS: Final = {
    "page sizes measured": "page size measured",
    "contexts on both sides": "context on both sides",
    "doubts": "doubt",
}
_ISOLATE, _END_OF_ISOLATE = "\N{FIRST STRONG ISOLATE}", "\N{POP DIRECTIONAL ISOLATE}"


def escaped(text: str) -> str:
    """Give text that Markdown shows as it is, on one line; subjects and parameters are anybody's.

    A very long text is cut, and one that runs from right to left turns nothing around it.
    """
    line = " ".join(text.split())
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]}…"
    shown = _ADDRESS.sub(rf"\g<0>{_JOINER}", _MARKDOWN.sub(r"\\\1", line))
    if any(unicodedata.bidirectional(letter) in _TURNS for letter in line):
        return f"{_ISOLATE}{shown.replace(_END_OF_ISOLATE, '')}{_END_OF_ISOLATE}"
    return shown


def unbroken(text: str) -> str:
    """Give text that Markdown shows as it is and breaks nowhere: a number and its unit, a day."""
    return escaped(text).replace(" ", "\N{NO-BREAK SPACE}").replace("-", f"-{_JOINER}")


def excerpt(text: str, longest: int) -> str:
    """Give the beginning of a text on one line, and a sign where there is more of it."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}…"


def unit_text(value: float | None, unit: str) -> str:
    """Give the unit of a number as it stands behind it: "1 page size measured"."""
    return _SINGULARS.get(unit, unit) if value == 1 else unit


def case_name(benchmark: str, params: str) -> str:
    """Name a case as asv does."""
    return f"{benchmark}({params})" if params else benchmark


def heads(table: pd.DataFrame) -> dict[str, str]:
    """Give each column of a table the head that it has on a page."""
    return {
        str(name): str(name)[:1].upper() + str(name)[1:].replace("_", " ") for name in table.columns
    }


def with_known_subjects(table: pd.DataFrame) -> pd.DataFrame:
    """Leave the column of subjects out where no commit has one: a tree of results tells none."""
    subjects = table["subject"].fillna("")
    return table.assign(subject=subjects) if subjects.any() else table.drop(columns=["subject"])
