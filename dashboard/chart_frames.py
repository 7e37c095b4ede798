"""What a chart of a history plots: rows of `db.queries` in the reader's unit, with their texts.

Nothing is estimated here: levels, changes and p-values are those of the database.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from dashboard.theme import CHANGE_COLOURS, STATUS_STYLES
from dashboard.units import DisplayUnit, change_text, commit_text, p_value_text

# Labels of change points stand at least this share of the width apart.
_LABEL_GAP: Final = 0.12
# All that a chart and its hovering need; the rest would only travel to the browser.
_PLOTTED: Final = (
    *("order", "shown", "low", "high", "status", "series", "epoch", "environment", "colour"),
    *("short", "subject", "day", "marks", "n", "run_id", "result_id"),
)

_MARKED: Final = (
    *("order", "series", "short", "colour", "change", "label", "p_text", "cause"),
    *("before_text", "after_text", "before_shown", "after_shown"),
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
    told = frame["excluded"] if "excluded" in frame else pd.Series("", index=frame.index)
    frame["marks"] = [
        ", ".join(filter(None, ("external" * bool(far), "dirty tree" * bool(dirty), said)))
        for far, dirty, said in zip(frame["external"], frame["dirty"], told.fillna(""), strict=True)
    ]
    return frame[[column for column in _PLOTTED if column in frame]]


def marked_changes(
    change_points: pd.DataFrame, frame: pd.DataFrame, view: HistoryView
) -> pd.DataFrame:
    """Give the change points of plotted results with their place, sign, text and meaning.

    A change point whose commit is not plotted has no place and is left out.
    """
    on = ["short", "series"] if "series" in change_points else ["short"]
    changes = change_points.assign(short=[commit_text(sha) for sha in change_points["commit"]])
    places = frame[["order", *on]].drop_duplicates(on)
    changes = changes.merge(places, on=on).sort_values("order", kind="stable", ignore_index=True)
    rising = changes["relative_change"].astype(float) > 0
    meaning = np.where(rising == view.lower_is_better, "worse", "better")
    changes["colour"] = [CHANGE_COLOURS[word] for word in meaning]
    signs = np.where(rising, "▲ ", "▼ ")
    changes["change"] = [
        sign + change_text(change)
        for sign, change in zip(signs, changes["relative_change"], strict=True)
    ]
    changes["label"] = changes["change"].where(_has_room(changes, frame), "")
    changes["p_text"] = [p_value_text(p_value) for p_value in changes["p_value"]]
    for column in ("before", "after"):
        changes[f"{column}_text"] = [view.unit.text(value) for value in changes[column]]
        changes[f"{column}_shown"] = changes[column].astype(float) / view.unit.divisor
    return changes[[column for column in _MARKED if column in changes]]


def _has_room(changes: pd.DataFrame, frame: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Let the largest changes keep their labels where several stand close together."""
    orders = changes["order"].to_numpy(float)
    gap = _LABEL_GAP * max(float(frame["order"].max() - frame["order"].min()), 1.0)
    has_room = np.zeros(len(orders), dtype=bool)
    for index in np.argsort(-changes["relative_change"].abs().to_numpy(float), kind="stable"):
        has_room[index] = bool(np.all(np.abs(orders[has_room] - orders[index]) >= gap))
    return has_room


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


def align(points: pd.DataFrame, commits: pd.DataFrame) -> pd.DataFrame:
    """Give results of several series one common order of commits.

    `commits` (of `db.queries.commits`) ranks them: by their position where all positions are of
    one kind, else by date.
    """
    shown = commits[commits["commit"].isin(points["commit"])]
    is_ranked = len(shown["order_basis"].unique()) == 1 and shown["position"].notna().all()
    by = ["position"] if is_ranked else ["commit_date", "commit"]
    ordered = shown.sort_values(by, kind="stable")["commit"]
    ranks = pd.Series(range(len(ordered)), index=ordered)
    return points.assign(order=points["commit"].map(ranks))
