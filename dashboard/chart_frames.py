"""What a chart of a history plots: rows of `db.queries` in the reader's unit, with their texts.

Nothing is estimated here: levels, changes and p-values are those of the database.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from dashboard.theme import CHANGE_COLOURS, STATUS_STYLES
from dashboard.units import DisplayUnit, change_text, commit_text, p_value_text

# All that a chart and its hovering need; the rest would only travel to the browser.
_PLOTTED: Final = (
    *("order", "shown", "low", "high", "status", "series", "epoch", "environment", "colour"),
    *("short", "subject", "day", "marks", "n", "run_id"),
)


@dataclass(frozen=True, slots=True)
class HistoryView:
    """What a reader chose about a history, and what its numbers are."""

    quantity: str  # such as "time": the title of the y axis, before the unit
    unit: DisplayUnit
    lower_is_better: bool = True
    log_axis: bool = False
    floor: float | None = None  # in the stored unit
    height_px: int = 320

    @property
    def y_title(self) -> str:
        """Title of the value axis with its unit and direction."""
        unit = f" ({self.unit.label})" if self.unit.label else ""
        better = "lower is better" if self.lower_is_better else "higher is better"
        return f"{self.quantity}{unit} · {better}"


def plotted(points: pd.DataFrame, view: HistoryView) -> pd.DataFrame:
    """Give the rows of a history in the unit of the view, with texts for hovering."""
    frame = points.sort_values("order", kind="stable").reset_index(drop=True)
    for column, source in (("shown", "value"), ("low", "q25"), ("high", "q75")):
        frame[column] = pd.to_numeric(frame[source], errors="coerce") / view.unit.divisor
    if view.log_axis:
        frame["low"] = frame["low"].where(frame["low"] > 0)
    frame["colour"] = [STATUS_STYLES[status].colour for status in frame["status"]]
    frame["short"] = [commit_text(commit) for commit in frame["commit"]]
    frame["day"] = pd.to_datetime(frame["commit_date"], utc=True).dt.strftime("%Y-%m-%d")
    frame["marks"] = [
        ", ".join(word for word, is_set in (("external", far), ("dirty tree", dirty)) if is_set)
        for far, dirty in zip(frame["external"], frame["dirty"], strict=True)
    ]
    return frame[[column for column in _PLOTTED if column in frame]]


def marked_changes(change_points: pd.DataFrame, view: HistoryView) -> pd.DataFrame:
    """Give the change points with the sign, text and meaning that a chart prints."""
    frame = change_points.sort_values("order", kind="stable").reset_index(drop=True)
    rising = frame["relative_change"].astype(float) > 0
    meaning = np.where(rising == view.lower_is_better, "worse", "better")
    frame["colour"] = [CHANGE_COLOURS[word] for word in meaning]
    sign = np.where(rising, "▲ ", "▼ ")
    frame["label"] = [
        mark + change_text(change)
        for mark, change in zip(sign, frame["relative_change"], strict=True)
    ]
    frame["p_text"] = [p_value_text(p_value) for p_value in frame["p_value"]]
    frame["short"] = [commit_text(commit) for commit in frame["commit"]]
    for column in ("before", "after"):
        frame[f"{column}_text"] = [view.unit.text(value) for value in frame[column]]
        frame[f"{column}_shown"] = frame[column].astype(float) / view.unit.divisor
    return frame


def segments(frame: pd.DataFrame, changes: pd.DataFrame) -> pd.DataFrame:
    """Give one row for each level between change points: start, end (orders) and level."""
    if changes.empty or frame.empty:
        return pd.DataFrame({"start": [], "end": [], "level": [], "series": []})
    orders = changes["order"].tolist()
    table = pd.DataFrame(
        {
            "start": [frame["order"].min(), *orders],
            "end": [*orders, frame["order"].max()],
            "level": [changes["before_shown"].iloc[0], *changes["after_shown"]],
        }
    )
    table["series"] = frame["series"].iloc[0] if "series" in frame else ""
    return table
