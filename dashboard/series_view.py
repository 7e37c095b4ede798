"""How one series is shown: its quantity, its unit of a fitting size, what its order rests on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

from dashboard.chart_frames import HistoryView
from dashboard.theme import CHANGE_COLOURS, GREY, ORANGE, STATUS_STYLES
from dashboard.units import commit_text, display_unit

_ORDER_NOTES: Final[Mapping[str, str]] = {
    "date": "ordered by date: the repository of these commits is not at hand",
    "recorded": "ordered as their recording lists them: they belong to no repository at hand",
    "repository": "",
}

# Characters that look like Vega's symbols: the page lets no drawing through.
_SYMBOLS: Final[Mapping[str, str]] = {
    "circle": "\N{BLACK CIRCLE}",
    "diamond": "\N{BLACK DIAMOND SUIT}",
    "cross": "\N{HEAVY GREEK CROSS}",
    "triangle-down": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "square": "\N{BLACK SQUARE}",
}
_BAND, _LEVEL, _RULE = (
    "\N{DARK SHADE}",
    "\N{BOX DRAWINGS HEAVY HORIZONTAL}",
    "\N{VERTICAL FOUR DOTS}",
)
_QUANTITIES: Final[Mapping[str, str]] = {"peakmemory": "peak memory", "track": "value"}


@dataclass(frozen=True, slots=True)
class ShownSeries:
    """One series with all that is drawn of it."""

    name: str
    row: dict[str, object]
    points: pd.DataFrame
    change_points: pd.DataFrame
    view: HistoryView
    floor_basis: str | None = None


def legend_html() -> str:
    """Explain the marks of a history once for all charts below it."""
    statuses = [
        _entry(style.colour, _SYMBOLS[style.shape], status)
        for status, style in STATUS_STYLES.items()
    ]
    marks = [
        _entry(STATUS_STYLES["ok"].colour, _BAND, "quartiles"),
        _entry(ORANGE, _LEVEL, "level"),
        _entry(CHANGE_COLOURS["worse"], _RULE, "got worse"),
        _entry(CHANGE_COLOURS["better"], _RULE, "got better"),
        _entry(GREY, _RULE, "new environment"),
    ]
    style = "display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;font-size:.85rem"
    return f'<div style="{style}">{"".join(statuses + marks)}</div>'


def _entry(colour: str, symbol: str, text: str) -> str:
    # As in the drawing itself, whose colours no system replaces.
    style = f"color:{colour};font-weight:bold;forced-color-adjust:none"
    mark = f'<span aria-hidden="true" style="{style}">{symbol}</span>'
    return f"<span>{mark}&ensp;{text}</span>"


def order_note(basis: str) -> str:
    """Say what the order of commits rests on, nothing where it is the repository itself."""
    return _ORDER_NOTES[basis]


def commit_labels(commits: pd.DataFrame) -> dict[str, str]:
    """Name commits for a list by hash, day and subject."""
    known = commits.drop_duplicates("commit")
    return {
        sha: " · ".join(filter(None, (commit_text(sha), f"{day:%Y-%m-%d}", subject)))
        for sha, day, subject in zip(
            known["commit"], known["commit_date"], known["subject"], strict=True
        )
    }


def view_of(
    series: Mapping[str, Any],
    points: pd.DataFrame,
    *,
    log_axis: bool = False,
    height_px: int = 320,
) -> HistoryView:
    """Describe a row of `db.queries.series` for a chart.

    The unit is chosen by the median of all its values, so that a range of commits keeps it.
    """
    return HistoryView(
        quantity=_QUANTITIES.get(str(series["metric"]), str(series["metric"])),
        unit=display_unit(str(series["unit"]), float(points["value"].median())),
        lower_is_better=series["direction"] == "lower",
        log_axis=log_axis,
        height_px=height_px,
    )
