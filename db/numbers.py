"""Numbers in a sentence: so many significant digits, and never an exponent for a large one."""

import math
from typing import Final

MISSING: Final = "\N{EN DASH}"  # where there is no number


def digits(value: float | None, count: int) -> str:
    """Write a number with `count` significant digits, a larger one whole with its thousands.

    Left to `g` alone, 4022 to three digits would read `4.02e+03`.
    """
    if value is None or math.isnan(value):
        return MISSING
    text = f"{value:,.{count}g}"
    return f"{value:,.0f}" if "e+" in text else text
