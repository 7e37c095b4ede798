"""Charts of a machine: strips of its telemetry over time, and its noise week by week."""

from typing import Final

import altair as alt
import pandas as pd

from dashboard.theme import BLUE, GREY, VERMILION

_STRIP_PX: Final = 150
_NOISE_PX: Final = 240


def strip(frame: pd.DataFrame, title: str) -> alt.LayerChart:
    """Draw one counter over time; windows that were doubted are crosses of another colour.

    Columns: at, reading, kind ("sound" or "doubted"), codes, benchmark.
    """
    x = alt.X("at:T", title=None)
    y = alt.Y(
        "reading:Q",
        title=title,
        scale=alt.Scale(zero=False, nice=True),
        axis=alt.Axis(format=",.4~g", tickCount=4),
    )
    names = ["sound", "doubted"]
    point = alt.Chart().mark_point(filled=True, size=34, opacity=0.8)
    shape = alt.Shape(
        "kind:N", scale=alt.Scale(domain=names, range=["circle", "cross"]), legend=None
    )
    colour = alt.Color(
        "kind:N", scale=alt.Scale(domain=names, range=[BLUE, VERMILION]), legend=None
    )
    tooltip = [
        alt.Tooltip("at:T", title="at", format="%Y-%m-%d %H:%M:%S"),
        alt.Tooltip("reading:Q", title=title, format=",.4~g"),
        alt.Tooltip("benchmark:N"),
        alt.Tooltip("codes:N", title="validity codes"),
    ]
    layers = [
        alt.Chart().mark_line(strokeWidth=1, opacity=0.3, color=GREY).encode(x=x, y=y),
        point.encode(x=x, y=y, color=colour, shape=shape, tooltip=tooltip),
    ]
    return alt.LayerChart(data=frame, layer=layers, height=_STRIP_PX)


def noise(frame: pd.DataFrame) -> alt.LayerChart:
    """Draw the median spread of a machine's results, by week; bigger marks are more results."""
    x = alt.X("week:T", title="week")
    y = alt.Y("noise_pct:Q", title="spread (%) · lower is better")
    size = alt.Size("results:Q", legend=None, scale=alt.Scale(range=[30, 260]))
    tooltip = [
        alt.Tooltip("week:T", format="%Y-%m-%d"),
        alt.Tooltip("noise_pct:Q", title="spread (%)", format=".3f"),
        alt.Tooltip("results:Q", format=",d"),
    ]
    layers = [
        alt.Chart().mark_line(color=BLUE, opacity=0.5).encode(x=x, y=y),
        alt.Chart()
        .mark_point(filled=True, color=BLUE, opacity=1)
        .encode(x=x, y=y, size=size, tooltip=tooltip),
    ]
    return alt.LayerChart(data=frame, layer=layers, height=_NOISE_PX)
