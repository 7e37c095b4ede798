"""Numbers in a sentence: so many digits with their sign, and things counted by their noun."""

import math
from typing import Final

MISSING: Final = "\N{EN DASH}"  # where there is no number
MINUS: Final = "\N{MINUS SIGN}"


def digits(value: float | None, count: int) -> str:
    """Write a number with `count` significant digits, a larger one whole with its thousands.

    Left to `g` alone, 4022 to three digits would read `4.02e+03`.
    """
    if value is None or math.isnan(value):
        return MISSING
    text = f"{value:,.{count}g}"
    return with_sign(f"{value:,.0f}" if "e+" in text else text)


def with_sign(number: str) -> str:
    """Write the minus of a printed number as text has it; that of an exponent stays."""
    return f"{MINUS}{number[1:]}" if number.startswith("-") else number


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Count things: "1 commit", "1,396 commits", "2 processes"."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
