"""Charts of a machine: strips of its telemetry over time, and its noise week by week."""

from typing import Final

import altair as alt
import pandas as pd

from dashboard.theme import BLUE, GREY, VERMILION

_STRIP_PX: Final = 150
_NOISE_PX: Final = 240
_LABELS_PX: Final = 44


def strip(
    frame: pd.DataFrame, title: str, span: tuple[pd.Timestamp, pd.Timestamp]
) -> alt.LayerChart:
    """Draw one counter over time; windows that were doubted are crosses of another colour.

    Columns: at, reading, kind ("sound" or "doubted"), codes, benchmark. `span` is that of all
    strips, which stand below each other.
    """
    ends = [end.isoformat() for end in span]
    x = alt.X(
        "at:T",
        title=None,
        scale=alt.Scale(domain=ends, padding=10),
        axis=alt.Axis(format=_moments(span), tickCount=6, labelOverlap=True),
    )
    y = alt.Y(
        "reading:Q",
        title=title,
        scale=alt.Scale(zero=False, nice=True),
        axis=alt.Axis(
            format=",.4~g",
            tickCount=4,
            # Lying, above the strip, which is too low for a standing one; of one width in all.
            titleAngle=0,
            titleAlign="left",
            titleAnchor="end",
            titleX=0,
            titleY=-10,
            minExtent=_LABELS_PX,
            maxExtent=_LABELS_PX,
        ),
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


def _moments(span: tuple[pd.Timestamp, pd.Timestamp]) -> str:
    """Write moments as finely as their span asks for, always of 24 hours."""
    length = span[1] - span[0]
    if length > pd.Timedelta(days=2):
        return "%Y-%m-%d"
    return "%m-%d %H:%M" if length > pd.Timedelta(hours=2) else "%H:%M:%S"


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
