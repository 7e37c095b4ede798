"""A chart put on a page: drawn unchecked, offered as a file, and its clicks given back.

Altair checks every chart against Vega-Lite's schema, which takes longer than drawing it. The tests
check all of them, so a page does not do it again.
"""

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, cast

import altair as alt
import pandas as pd
import streamlit as st

from dashboard.chart_layers import PICKED
from dashboard.downloads import offer
from dashboard.folded import folded_table
from dashboard.words import heads

_DATA: Final = "results"
_MOST_DRAWINGS: Final = 64
_FILE_PX: Final = 960


def draw(
    chart: alt.LayerChart,
    *,
    description: str,
    key: str | None = None,
    name: str | None = None,
    table: pd.DataFrame | None = None,
) -> None:
    """Draw a chart whose data is one frame; what a reader cannot see is told by `description`.

    Parameters
    ----------
    name : of the files under which the chart is offered; None offers none
    table : what the chart shows, for those who cannot see it; its data where none is given
    """
    drawn = drawing_of(chart)
    st.vega_lite_chart(drawn.for_browser(), key=key, alt=description)
    if name is not None:
        offer(name, drawn.rows if table is None else table, drawn.for_file)


def draw_pickable(
    make: Callable[[], alt.LayerChart],
    *,
    state: tuple[Hashable, ...],
    description: str,
    key: str,
    name: str,
    table: pd.DataFrame,
) -> dict[str, Any] | None:
    """Draw a chart whose points can be clicked; give the fields of the one that is, if any.

    Parameters
    ----------
    state : all that the chart depends on; it is made once for each
    table : what the chart shows, as a file of rows
    """
    drawn = _made(make, state)
    event = st.vega_lite_chart(
        drawn.for_browser(), key=key, alt=description, on_select="rerun", selection_mode=PICKED
    )
    offer(name, table, drawn.for_file)
    # A state that a test or an older page left is a plain mapping.
    chosen = event["selection"].get(PICKED, []) if event else []
    return dict(chosen[0]) if chosen else None


def draw_whole(chart: alt.LayerChart, *, description: str, name: str, table: pd.DataFrame) -> None:
    """Draw a chart whose layers have rows of their own; offer it, and beside it what it shows."""
    st.altair_chart(chart, alt=description)
    offer(name, table, lambda: chart.properties(width=_FILE_PX).to_dict())
    folded_table("As a table", table, key=f"table.{name}", titles=heads(table))


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart as it is handed on: its specification, and its rows under a name."""

    spec: dict[str, Any]
    rows: pd.DataFrame

    def for_browser(self) -> dict[str, Any]:
        """Leave the rows as a frame, which travels best."""
        return self._with(self.rows)

    def for_file(self) -> dict[str, Any]:
        """Write the rows inside, of any number."""
        text = self.rows.to_json(orient="records", date_format="iso", double_precision=15)
        return self._with(json.loads(text)) | {"width": _FILE_PX}

    def _with(self, rows: object) -> dict[str, Any]:
        # Named, because the browser finds no unnamed data beside layers with rows of their own.
        return self.spec | {"datasets": self.spec.get("datasets", {}) | {_DATA: rows}}


def drawing_of(chart: alt.LayerChart) -> Drawing:
    """Take a chart apart, which is of no use after it: a copy of one is as slow as making it."""
    rows = cast("pd.DataFrame", chart.data)
    chart.data = alt.NamedData(name=_DATA)
    spec: dict[str, Any] = chart.to_dict(validate=False)
    # Altair's own look has fixed sizes; the page's look takes its place.
    spec.pop("config", None)
    return Drawing(spec, rows)


@st.cache_data(max_entries=_MOST_DRAWINGS, show_spinner=False)
def _made(_make: Callable[[], alt.LayerChart], state: tuple[Hashable, ...]) -> Drawing:
    del state
    return drawing_of(_make())
