"""Charts of a diagnosis: times against floors, and counters beside what they claim to say.

All numbers come with the frames; the only decisions here are axes, marks and words.
"""

import math
from typing import Final

import altair as alt
import pandas as pd

from dashboard.theme import BLUE, GREEN, GREY, SERIES_COLOURS, VERMILION

_HEIGHT_PX: Final = 420
_CONTEXT_TITLE: Final = "committed context (tokens)"
_TIME_TITLE: Final = "time (ms) · lower is better"
_NEAR: Final = 0.12  # of the axis: a ratio below a dot nearer to its floor would lie on the floor
_MISLEADS: Final = "misleads"
# Thousands are told in powers of two, as contexts are chosen.
_TOKENS_EXPR: Final = "datum.value >= 1024 ? format(datum.value / 1024, '.4~g') + 'k' : datum.value"


def times_over_context(cases: pd.DataFrame, *, floor_name: str) -> alt.LayerChart:
    """Draw measured times above their floors on two log axes.

    Columns: context_tokens, time_ms, floor_ms (NaN where unknown), ratio_text, n, series.
    """
    x, time = (
        _context_x(cases),
        alt.Y("time_ms:Q", title=_TIME_TITLE, scale=_log(), axis=_decades()),
    )
    # Ratios stand above the slowest and below the fastest of a context: others would meet them.
    times = cases.groupby("context_tokens")["time_ms"]
    cases = cases.assign(
        place=times.rank(method="first"), of=times.transform("size"), beneath=_beneath(cases)
    )
    names = cases["series"].value_counts().index.tolist()  # the longest series first
    colour = alt.Color(
        "series:N",
        title=None,
        scale=alt.Scale(domain=names, range=list(SERIES_COLOURS)),
        legend=alt.Legend(orient="top", labelLimit=520, columns=1),
    )
    shape = alt.Shape("series:N", title=None, scale=alt.Scale(domain=names))
    base = alt.Chart(cases).encode(x=x)
    measured = base.encode(y=time, color=colour)
    gap = base.mark_rule(color=GREY, opacity=0.5).encode(
        y=alt.Y("time_ms:Q"), y2=alt.Y2("floor_ms:Q")
    )
    path = measured.mark_line(strokeWidth=1.5, opacity=0.6)
    dots = measured.mark_point(filled=True, size=90, opacity=1).encode(
        shape=shape, tooltip=_case_tooltips(floor_name)
    )
    ratio = measured.encode(text=alt.Text("ratio_text:N"))
    layers = [
        gap,
        *_floor_layers(cases, floor_name),
        path,
        dots,
        ratio.transform_filter("datum.place == datum.of").mark_text(dy=-14, fontWeight="bold"),
        ratio.transform_filter("datum.place == 1 && datum.of > 1")
        .mark_text(dy=16, fontWeight="bold")
        .encode(y=alt.Y("beneath:Q")),
    ]
    return alt.LayerChart(layer=layers, height=_HEIGHT_PX)


def counters(readings: pd.DataFrame) -> alt.LayerChart:
    """Draw each counter as a share of what it could read, with what it does say.

    Columns: counter, share_pct, text (the reading), meaning, role ("misleads" or "evidence").
    """
    order = readings["counter"].tolist()
    y = alt.Y("counter:N", sort=order, title=None, axis=alt.Axis(labelLimit=240, ticks=False))
    x = alt.X(
        "share_pct:Q",
        title="share of the most it could read (%)",
        scale=alt.Scale(domain=[0, 100]),
        axis=alt.Axis(grid=True, tickCount=5),
    )
    colour = alt.Color(
        "role:N",
        title=None,
        scale=alt.Scale(domain=[_MISLEADS, "evidence"], range=[VERMILION, BLUE]),
        legend=None,
    )
    base = alt.Chart(readings).encode(y=y)
    # As `alt.value` would, which takes ten times as long.
    edges = alt.XValue(0), alt.X2Value(alt.ExprRef("width"))  # type: ignore[no-untyped-call]
    track = base.mark_bar(color=GREY, opacity=0.15, height=22).encode(x=edges[0], x2=edges[1])
    bar = base.mark_bar(height=22).encode(
        x=x,
        color=colour,
        tooltip=[alt.Tooltip("counter:N"), alt.Tooltip("text:N"), alt.Tooltip("meaning:N")],
    )
    # Text stands inside a long bar and beside a short one.
    inside = alt.datum.share_pct > 50
    long = base.transform_filter(inside).mark_text(
        align="right", dx=-8, color="white", fontWeight="bold"
    )
    short = base.transform_filter(f"!({inside!r})").mark_text(
        align="left", dx=8, color=GREY, fontWeight="bold"
    )
    texts = [mark.encode(x=x, text=alt.Text("text:N")) for mark in (long, short)]
    return alt.LayerChart(layer=[track, bar, *texts], height=60 + 44 * len(order))


def _floor_layers(cases: pd.DataFrame, floor_name: str) -> list[alt.Chart]:
    known = cases.dropna(subset=["floor_ms"]).drop_duplicates(["context_tokens", "floor_ms"])
    if known.empty:
        return []
    base = alt.Chart(known).encode(x=alt.X("context_tokens:Q"), y=alt.Y("floor_ms:Q", scale=_log()))
    words = alt.TextValue(floor_name)
    first = alt.Chart(known.nsmallest(1, "context_tokens")).encode(
        x=alt.X("context_tokens:Q"), y=alt.Y("floor_ms:Q"), text=words
    )
    return [
        base.mark_line(color=GREEN, strokeDash=[7, 4], strokeWidth=2),
        base.mark_tick(color=GREEN, thickness=2, width=14),
        first.mark_text(color=GREEN, align="left", dx=18, dy=12, fontWeight="bold"),
    ]


def _beneath(cases: pd.DataFrame) -> list[float]:
    """Give the value under which a ratio is written: the floor where one would lie on its line."""
    pairs = list(zip(cases["time_ms"], cases["floor_ms"], strict=True))
    # Neither a floor that is not known nor that of a context without rows is on the axis.
    drawn = [value for pair in pairs for value in pair if value > 0.0]
    near = _NEAR * math.log(max(drawn, default=1.0) / min(drawn, default=1.0))
    return [
        floor if floor > 0.0 and time > floor and math.log(time / floor) < near else time
        for time, floor in pairs
    ]


def _log() -> alt.Scale:
    return alt.Scale(type="log", nice=False, padding=18)


def _decades() -> alt.Axis:
    return alt.Axis(values=[10.0**power for power in range(-6, 7)], format=",.4~g")


def _context_x(cases: pd.DataFrame) -> alt.X:
    axis = alt.Axis(
        values=sorted({int(tokens) for tokens in cases["context_tokens"]}),
        labelExpr=_TOKENS_EXPR,
        labelOverlap="greedy",
        grid=False,
    )
    return alt.X("context_tokens:Q", title=_CONTEXT_TITLE, scale=_log(), axis=axis)


def _case_tooltips(floor_name: str) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("series:N", title="series"),
        alt.Tooltip("context_tokens:Q", title="context (tokens)", format=",d"),
        alt.Tooltip("time_ms:Q", title="time (ms)", format=",.4~g"),
        alt.Tooltip("floor_ms:Q", title=f"{floor_name} (ms)", format=",.4~g"),
        alt.Tooltip("ratio_text:N", title="above the floor"),
        alt.Tooltip("n:Q", title="samples"),
    ]
