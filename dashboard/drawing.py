"""A chart put on a page: drawn unchecked, offered as a file, and its clicks given back.

Altair checks every chart against Vega-Lite's schema, which takes longer than drawing it. The tests
check all of them, so a page does not do it again.
"""

import json
from typing import Any, Final, cast

import altair as alt
import pandas as pd
import streamlit as st

from dashboard.chart_layers import PICKED
from dashboard.downloads import offer

_DATA: Final = "results"


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
    st.vega_lite_chart(_drawn(chart), key=key, alt=description)
    _offered(chart, name, table)


def draw_pickable(
    chart: alt.LayerChart, *, description: str, key: str, name: str | None = None
) -> dict[str, Any] | None:
    """Draw a chart whose points can be clicked; give the fields of the one that is, if any."""
    event = st.vega_lite_chart(
        _drawn(chart), key=key, alt=description, on_select="rerun", selection_mode=PICKED
    )
    _offered(chart, name, None)
    # A state that a test or an older page left is a plain mapping.
    chosen = event["selection"].get(PICKED, []) if event else []
    return dict(chosen[0]) if chosen else None


def _offered(chart: alt.LayerChart, name: str | None, table: pd.DataFrame | None) -> None:
    if name is not None:
        offer(name, _data(chart) if table is None else table, lambda: file_spec(chart))


def _drawn(chart: alt.LayerChart) -> dict[str, Any]:
    spec = _bare(chart)
    # Named, because the browser finds no unnamed data beside layers with rows of their own.
    spec.setdefault("datasets", {})[_DATA] = chart.data
    return spec


def file_spec(chart: alt.LayerChart) -> dict[str, Any]:
    """Give a chart as it is written into a file: with its rows inside, of any number."""
    spec = _bare(chart)
    rows = json.loads(
        _data(chart).to_json(orient="records", date_format="iso", double_precision=15)
    )
    spec.setdefault("datasets", {})[_DATA] = rows
    return spec | {"width": 960}


def _data(chart: alt.LayerChart) -> pd.DataFrame:
    return cast("pd.DataFrame", chart.data)


def _bare(chart: alt.LayerChart) -> dict[str, Any]:
    bare = chart.copy(deep=False)
    bare.data = alt.NamedData(name=_DATA)
    spec: dict[str, Any] = bare.to_dict(validate=False)
    # Altair's own look has fixed sizes; the page's look takes its place.
    spec.pop("config", None)
    return spec
