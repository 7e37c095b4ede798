"""Numbers as people read them: a value with its unit, a change with its sign.

Scaling for the eye only; what a number means was decided before it came here.
"""

import math
from dataclasses import dataclass
from typing import Final

from db.numbers import MISSING, digits, with_sign

_SCALES: Final[dict[str, tuple[tuple[float, str], ...]]] = {
    "seconds": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
}
_ALIASES: Final = {"s": "seconds", "second": "seconds", "byte": "bytes", "B": "bytes"}


@dataclass(frozen=True, slots=True)
class DisplayUnit:
    """A unit to print in: stored values are divided by `divisor`."""

    divisor: float
    label: str  # empty for a pure number

    def text(self, value: float | None) -> str:
        """Give the value with four significant digits and its unit."""
        if value is None or math.isnan(value):
            return MISSING
        return f"{digits(value / self.divisor, 4)} {self.label}".rstrip()


def display_unit(unit: str | None, typical: float | None) -> DisplayUnit:
    """Choose the largest scale of the unit in which the typical value is at least one."""
    name = unit or ""
    scales = _SCALES.get(_ALIASES.get(name, name))
    if scales is None:
        return DisplayUnit(1.0, name)
    if typical is None or not math.isfinite(typical) or typical == 0:
        divisor, label = next(scale for scale in scales if scale[0] == 1.0)
        return DisplayUnit(divisor, label)
    fitting = (scale for scale in scales if abs(typical) >= scale[0])
    return DisplayUnit(*next(fitting, scales[-1]))


def change_text(relative_change: float | None) -> str:
    """Give a relative change in percent with its sign, as a factor from three times on."""
    if relative_change is None or math.isnan(relative_change):
        return MISSING
    if relative_change >= 2:
        return f"{digits(1 + relative_change, 3)}\N{MULTIPLICATION SIGN}"
    # What rounds to nothing has no minus.
    return with_sign(f"{round(100 * relative_change, 1) or 0.0:+.1f} %")


def p_value_text(p_value: float | None) -> str:
    """Give a p-value to two digits, never as zero."""
    if p_value is None or math.isnan(p_value):
        return MISSING
    if p_value < 1e-12:
        return "< 1e-12"
    return f"{p_value:.2g}"


def commit_text(commit: str | None) -> str:
    """Give the first ten characters of a commit's hash."""
    return commit[:10] if commit else MISSING
