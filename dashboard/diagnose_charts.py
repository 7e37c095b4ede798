"""Charts of a diagnosis: roofline, distance from the floor, line over bytes, ladder."""

from typing import Final

import altair as alt
import pandas as pd

from dashboard.chart_layers import row_names, small
from dashboard.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, SERIES_COLOURS, VERMILION

_HEIGHT_PX: Final = 380
_ROW_PX: Final = 38
_LEGEND_ROW_PX: Final = 18
_FLOOR_PX: Final = 40
# So many lines of a grid: more would be those between the powers of ten.
_DECADES: Final = alt.Axis(tickCount=5)
_PLACE_COLOURS: Final = {"alone": PURPLE, "in the fixed order": BLUE, "removed": ORANGE}
_PLACE_SHAPES: Final = ("diamond", "circle", "square")


def roofline(cases: pd.DataFrame, roof: pd.DataFrame) -> alt.LayerChart:
    """Draw each case by its FLOP a byte and its rate, under the best rates of the machine."""
    log = alt.Scale(type="log", nice=False, padding=16)
    title = "arithmetic intensity (FLOP a byte)"
    x = alt.X("intensity:Q", title=title, scale=log, axis=_DECADES)
    y = alt.Y("tflops:Q", title="rate (TFLOP/s) · higher is better", scale=log, axis=_DECADES)
    names = cases["benchmark"].drop_duplicates().tolist()
    scale = alt.Scale(domain=names, range=list(SERIES_COLOURS))
    legend = alt.Legend(orient="top", labelLimit=420, title=None, columns=1)
    tooltip = [
        alt.Tooltip("case:N"),
        alt.Tooltip("intensity:Q", title="FLOP a byte", format=",.3~g"),
        alt.Tooltip("tflops:Q", title="TFLOP/s", format=",.3~g"),
        alt.Tooltip("time_ms:Q", title="time (ms)", format=",.4~g"),
        alt.Tooltip("floor_ratio:Q", title="times its floor", format=",.3~g"),
        alt.Tooltip("bound:N", title="bound by"),
    ]
    point = alt.Chart().mark_point(filled=True, size=70, opacity=0.9)
    line = small(roof).mark_line(color=GREEN, strokeWidth=2.5)
    layers = [
        *([line.encode(x=x, y=y)] if len(roof) else []),
        point.encode(
            x=x,
            y=y,
            color=alt.Color("benchmark:N", scale=scale, legend=legend),
            shape=alt.Shape("benchmark:N", scale=alt.Scale(domain=names), legend=legend),
            tooltip=tooltip,
        ),
    ]
    height = _HEIGHT_PX + _LEGEND_ROW_PX * len(names)
    return alt.LayerChart(data=cases, layer=layers, height=height)


def distances(frame: pd.DataFrame) -> alt.LayerChart:
    """Draw how many times its floor each case takes; the rule is the floor itself."""
    y = alt.Y("case:N", sort=frame["case"].tolist(), axis=None)
    x = alt.X(
        "floor_ratio:Q",
        title="time over its floor (times) · lower is better",
        scale=alt.Scale(type="log", nice=False, padding=_FLOOR_PX),
        axis=_DECADES,
    )
    tooltip = [
        alt.Tooltip("case:N"),
        alt.Tooltip("floor_ratio:Q"),
        alt.Tooltip("time_ms:Q"),
        alt.Tooltip("floor_ms:Q"),
        alt.Tooltip("basis:N"),
        alt.Tooltip("bound:N"),
    ]
    base = alt.Chart().encode(y=y)
    floor = small(pd.DataFrame({"floor_ratio": [1.0]}))
    layers = [
        floor.mark_rule(color=GREEN, strokeDash=[7, 4], strokeWidth=2).encode(x=x),
        base.mark_point(filled=True, size=80, color=VERMILION, opacity=1).encode(
            x=x, tooltip=tooltip
        ),
        base.mark_text(align="left", dx=9, color=GREY).encode(x=x, text=alt.Text("text:N")),
        row_names(base, left_px=_FLOOR_PX + 4),  # beside the floor of a case that meets it
    ]
    return alt.LayerChart(data=frame, layer=layers, height=90 + _ROW_PX * len(frame))


def line_over_bytes(cases: pd.DataFrame, line: pd.DataFrame) -> alt.LayerChart:
    """Draw measured times over the bytes to read, and the line t0 + bytes / bandwidth."""
    x = alt.X("gigabytes:Q", title="bytes the case must read (GB)")
    y = alt.Y("time_ms:Q", title="time (ms) · lower is better")
    tooltip = [
        alt.Tooltip("context_tokens:Q", title="context (tokens)", format=",d"),
        alt.Tooltip("time_ms:Q", title="time (ms)", format=",.4~g"),
        alt.Tooltip("line_ms:Q", title="on the line (ms)", format=",.4~g"),
        alt.Tooltip("n:Q", title="samples"),
    ]
    fitted = small(line).mark_line(color=ORANGE, strokeWidth=2)
    layers = [
        *([fitted.encode(x=x, y=alt.Y("line_ms:Q"))] if len(line) else []),
        alt.Chart()
        .mark_point(filled=True, size=80, color=BLUE, opacity=1)
        .encode(x=x, y=y, tooltip=tooltip),
    ]
    return alt.LayerChart(data=cases, layer=layers, height=_HEIGHT_PX)


def waterfall(steps: pd.DataFrame) -> alt.LayerChart:
    """Draw a ladder in its fixed order: each bar goes from the time before to that after."""
    x = alt.X("factor:N", sort=steps["factor"].tolist(), title=None, axis=alt.Axis(labelAngle=-30))
    scale = alt.Scale(type="log", nice=False, padding=20)
    colour = alt.Color(
        "is_faster:N",
        scale=alt.Scale(domain=["faster", "slower"], range=[GREEN, VERMILION]),
        legend=alt.Legend(orient="top", title=None),
    )
    tooltip = [
        alt.Tooltip("factor:N"),
        alt.Tooltip("before_ms:Q", title="before (ms)", format=",.4~g"),
        alt.Tooltip("after_ms:Q", title="after (ms)", format=",.4~g"),
        alt.Tooltip("text:N", title="worth"),
        alt.Tooltip("outcome:N"),
    ]
    base = alt.Chart().encode(x=x)
    y = alt.Y("before_ms:Q", title="time (ms) · lower is better", scale=scale)
    layers = [
        base.mark_bar(size=34).encode(y=y, y2=alt.Y2("after_ms:Q"), color=colour, tooltip=tooltip),
        base.mark_text(dy=-10, fontWeight="bold", color=GREY).encode(y=y, text=alt.Text("text:N")),
    ]
    return alt.LayerChart(data=steps, layer=layers, height=_HEIGHT_PX)


def three_readings(frame: pd.DataFrame) -> alt.LayerChart:
    """Draw what each factor is worth at its three places, with intervals; the rule is nothing."""
    factors = frame["factor"].drop_duplicates().tolist()
    places = list(_PLACE_COLOURS)
    y = alt.Y("factor:N", sort=factors, title=None)
    offset = alt.YOffset("place:N", sort=places)
    scale = alt.Scale(type="log", nice=False, padding=16)
    x = alt.X("worth:Q", title="time before over time after (times)", scale=scale)
    colour = alt.Color(
        "place:N",
        scale=alt.Scale(domain=places, range=list(_PLACE_COLOURS.values())),
        legend=alt.Legend(orient="top", title=None),
    )
    shape = alt.Shape("place:N", scale=alt.Scale(domain=places, range=list(_PLACE_SHAPES)))
    tooltip = [
        alt.Tooltip("factor:N"),
        alt.Tooltip("place:N"),
        alt.Tooltip("worth:Q"),
        alt.Tooltip("low:Q"),
        alt.Tooltip("high:Q"),
        alt.Tooltip("outcome:N"),
        alt.Tooltip("ground:N"),
    ]
    base = alt.Chart().encode(y=y, yOffset=offset, color=colour)
    nothing = small(pd.DataFrame({"worth": [1.0]}))
    layers = [
        nothing.mark_rule(color=GREY, strokeDash=[4, 3]).encode(x=x),
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", scale=scale), x2=alt.X2("high:Q")),
        base.mark_point(filled=True, size=70, opacity=1).encode(x=x, shape=shape, tooltip=tooltip),
    ]
    height = 80 + 3 * 16 * len(factors)
    return alt.LayerChart(data=frame, layer=layers, height=height)
