"""Charts of a comparison: changes with their intervals, and where among the parameters they lie."""

from typing import Final

import altair as alt
import pandas as pd

from dashboard.chart_layers import row_names
from dashboard.compare_frames import HeatMap
from dashboard.theme import BLUE, GREEN, GREY, ORANGE, VERMILION

_ROW_PX: Final = 40
_CELL_PX: Final = 34
# What title, legend and axis take of the height, which a page gives to all of them together.
_FRAME_PX: Final = 130
# Changes are coloured up to this one; larger ones are as dark.
_FULL_PCT: Final = 25.0
# By a colour and a shape.
_VERDICT_STYLES: Final = {
    "regression": (VERMILION, "triangle-up"),
    "improvement": (GREEN, "triangle-down"),
    "inconclusive": (ORANGE, "diamond"),
    "no change": (BLUE, "circle"),
    "not enough history": (GREY, "square"),
}


def intervals(frame: pd.DataFrame, *, relevance_pct: float) -> alt.LayerChart:
    """Draw each change with its interval over its noise band; rules mark what is relevant."""
    y = alt.Y("case:N", sort=frame["case"].tolist(), axis=None)
    x = alt.X("change_pct:Q", title="relative change (%)")
    met = set(frame["verdict"])
    names = [verdict for verdict in _VERDICT_STYLES if verdict in met]
    colours, shapes = zip(*(_VERDICT_STYLES[verdict] for verdict in names), strict=True)
    colour = alt.Color(
        "verdict:N",
        scale=alt.Scale(domain=names, range=colours),
        legend=alt.Legend(orient="top", title=None, columns=2),
    )
    shape = alt.Shape("verdict:N", scale=alt.Scale(domain=names, range=shapes))
    tooltip = [
        alt.Tooltip("case:N"),
        alt.Tooltip("machine:N"),
        alt.Tooltip("verdict:N"),
        alt.Tooltip("change_pct:Q", title="change (%)", format="+.2f"),
        alt.Tooltip("low_pct:Q", title="interval from (%)", format="+.2f"),
        alt.Tooltip("high_pct:Q", title="to (%)", format="+.2f"),
        alt.Tooltip("noise_pct:Q", title="noise (%)", format=".2f"),
    ]
    base = alt.Chart().encode(y=y)
    layers = [
        base.mark_bar(color=GREY, opacity=0.18, height=14).encode(
            x=alt.X("noise_low_pct:Q"), x2=alt.X2("noise_pct:Q")
        ),
        *(
            # Beside the marks of a case and not through its name above them.
            base.mark_rule(
                color=GREY, strokeDash=[4, 3], yOffset=-8, y2Offset=14, aria=False
            ).encode(x=alt.XDatum(at), y2=alt.Y2("case:N", bandPosition=0.5))
            for at in (-relevance_pct, relevance_pct)
        ),
        base.mark_rule(strokeWidth=2).encode(
            x=alt.X("low_pct:Q"), x2=alt.X2("high_pct:Q"), color=colour
        ),
        base.mark_point(filled=True, size=80, opacity=1).encode(
            x=x, color=colour, shape=shape, tooltip=tooltip
        ),
        row_names(base),
    ]
    height = _FRAME_PX + _ROW_PX * len(frame)
    return alt.LayerChart(data=frame, layer=layers, height=height)


def heat_map(found: HeatMap) -> alt.LayerChart:
    """Draw one benchmark's changes over two parameters; a sign tells the verdict without colour."""
    order = {
        name: found.cells.sort_values(f"order_{name}")[name].drop_duplicates().tolist()
        for name in ("across", "down")
    }
    x = alt.X("across:N", sort=order["across"], title=found.across, axis=alt.Axis(labelAngle=0))
    y = alt.Y("down:N", sort=order["down"], title=found.down)
    colour = alt.Color(
        "worse_pct:Q",
        scale=alt.Scale(
            domain=[-_FULL_PCT, 0, _FULL_PCT],
            range=[GREEN, "#E8E8EA", VERMILION],
            clamp=True,
            interpolate="rgb",
        ),
        legend=alt.Legend(title="worse (%)", orient="right", gradientLength=80),
    )
    tooltip = [
        alt.Tooltip("across:N", title=found.across),
        alt.Tooltip("down:N", title=found.down),
        alt.Tooltip("text:N", title="change"),
        alt.Tooltip("verdict:N"),
    ]
    base = alt.Chart().encode(x=x, y=y)
    layers = [
        base.mark_rect(stroke="white", strokeWidth=2).encode(color=colour, tooltip=tooltip),
        base.mark_text(color="#1B1D22", fontSize=12).encode(text=alt.Text("text:N")),
    ]
    height = _FRAME_PX + _CELL_PX * len(order["down"])
    return alt.LayerChart(data=found.cells, layer=layers, height=height)
