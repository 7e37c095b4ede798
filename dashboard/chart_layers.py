"""The layers, scales and axes that histories are composed of."""

import json
from typing import Final

import altair as alt
import numpy as np
import pandas as pd

from dashboard.chart_frames import HistoryView
from dashboard.theme import GREEN, GREY, ORANGE, STATUS_STYLES
from db.queries import EXCLUDED

# An axis spans at least this share of the level to each side, so that noise looks like noise.
_LEAST_SPAN_REL: Final = 0.05
# Up to so many results each gets its own bar between the quartiles, above that the band suffices.
_MOST_BARS: Final = 60
_NUM_TICKS: Final = 6
_GAPS: Final = "break-paths-filter-domains"  # a path stops where a value is missing
_BAND_TAIL: Final = 0.02
# The name of the selection that a click on a point makes.
PICKED: Final = "picked"
MISSING: Final = ("failed", "skipped")


def _at_pixel(y: float | alt.ExprRef) -> alt.YValue:
    """Place marks by the pixel, as `alt.value` does ten times slower."""
    return alt.YValue(y)  # type: ignore[no-untyped-call]


def small(frame: pd.DataFrame) -> alt.Chart:
    """Begin a layer on a few rows of its own, written into the chart as they are."""
    rows = json.loads(frame.to_json(orient="records", double_precision=15))
    return alt.Chart(alt.InlineData(values=rows))


def row_names(base: alt.Chart, *, left_px: float = 2) -> alt.Chart:
    """Write the name of each row above it: beside it, long ones would fill a narrow chart."""
    text = base.mark_text(
        align="left",
        baseline="bottom",
        dx=left_px,
        dy=-9,
        fontSize=11,
        color=GREY,
        limit=alt.ExprRef(f"width - {left_px}"),
    )
    at_the_edge = alt.XValue(0)  # type: ignore[no-untyped-call]
    chart: alt.Chart = text.encode(x=at_the_edge, text=alt.Text("case:N"))
    return chart


def order_scale() -> alt.Scale:
    """Use the width for the commits at hand, not for those before them."""
    return alt.Scale(zero=False, nice=False, padding=14)


def commit_x(frame: pd.DataFrame) -> alt.X:
    """Place results by commit order; a few ticks name their commit and its date."""
    known = frame.drop_duplicates("order")
    picked = np.unique(np.linspace(0, max(len(known) - 1, 0), _NUM_TICKS).round().astype(int))
    ticks = known.iloc[picked] if len(known) else known
    labels = {
        f"{order}": [short, day if isinstance(day, str) else ""]
        for order, short, day in zip(ticks["order"], ticks["short"], ticks["day"], strict=True)
    }
    axis = alt.Axis(
        values=ticks["order"].tolist(),
        labelExpr=f"{json.dumps(labels)}[datum.value]",
        labelOverlap="parity",
        labelFlush=True,
        grid=False,
    )
    return alt.X("order:Q", title="commits in order", scale=order_scale(), axis=axis)


def value_scale(frame: pd.DataFrame, levels: pd.DataFrame, view: HistoryView) -> alt.Scale:
    """Span all values, and at least a few percent around the middle."""
    # A few wide quartiles are cut off rather than allowed to flatten everything else.
    band = [frame["low"].quantile([_BAND_TAIL]), frame["high"].quantile([1 - _BAND_TAIL])]
    columns = [frame["shown"], *band, levels["level"]]
    values = pd.concat(columns).astype(float).to_numpy()
    values = values[np.isfinite(values)]
    if not values.any():
        return alt.Scale(domain=[0, 1])
    low, high = float(values.min()), float(values.max())
    middle = float(np.median(values))
    low, high = (
        min(low, middle - abs(middle) * _LEAST_SPAN_REL),
        max(high, middle + abs(middle) * _LEAST_SPAN_REL),
    )
    if (floor := shown_floor(view, low)) is not None:
        low = min(low, floor)
    if view.log_axis and low > 0:
        return alt.Scale(type="log", domain=[low / 1.06, high * 1.06], nice=False)
    # Room above for the labels of the change points.
    room = (high - low) * 0.08
    return alt.Scale(zero=False, domain=[low - room, high + 2 * room], nice=False)


def shown_floor(view: HistoryView, low: float) -> float | None:
    """Give the floor in the view's unit where it would not crush the points."""
    if view.floor is None or view.floor <= 0:
        return None
    floor = view.floor / view.unit.divisor
    return floor if view.log_axis or floor > low / 2 else None


def colour() -> alt.Color:
    """Take the colour from the row: what it means was decided with the row."""
    return alt.Color("colour:N", scale=None)


def status_shape() -> alt.Shape:
    """Give each status its own symbol."""
    return alt.Shape(
        "status:N",
        scale=alt.Scale(
            domain=list(STATUS_STYLES), range=[style.shape for style in STATUS_STYLES.values()]
        ),
        legend=None,
    )


def point_size(frame: pd.DataFrame) -> float:
    """Give smaller points the more there are, in square pixels."""
    return float(np.clip(12_000 / max(len(frame), 1), 9, 64))


def tooltips(view: HistoryView) -> list[alt.Tooltip]:
    """Say of a result under the pointer what it is, where it comes from and how sure it is."""
    unit = f" ({view.unit.label})" if view.unit.label else ""
    return [
        alt.Tooltip("short:N", title="commit"),
        alt.Tooltip("subject:N", title="subject"),
        alt.Tooltip("day:N", title="committed"),
        alt.Tooltip("shown:Q", title=f"{view.quantity}{unit}", format=",.4~g"),
        alt.Tooltip("low:Q", title=f"lower quartile{unit}", format=",.4~g"),
        alt.Tooltip("high:Q", title=f"upper quartile{unit}", format=",.4~g"),
        alt.Tooltip("n:Q", title="samples"),
        alt.Tooltip("status:N", title="status"),
        alt.Tooltip("run_id:N", title="run"),
        alt.Tooltip("environment:N", title="environment"),
        alt.Tooltip("marks:N", title="marks"),
    ]


def handles() -> list[alt.Parameter]:
    """Let a reader pick a point with a click, drag the axes, and zoom with Shift and the wheel.

    A plain turn of the wheel goes on scrolling the page.
    """
    return [
        alt.selection_point(name=PICKED, fields=["result_id"], on="click", empty=False),
        alt.selection_interval(name="view", bind="scales", zoom="wheel![event.shiftKey]"),
    ]


def points(frame: pd.DataFrame, scale: alt.Scale, view: HistoryView) -> alt.Chart:
    """Draw each value by its status; this layer owns the titles of both axes."""
    chart: alt.Chart = (
        alt.Chart()
        .mark_point(filled=True, size=point_size(frame), opacity=0.9)
        .encode(
            x=commit_x(frame),
            y=alt.Y("shown:Q", title=view.y_title, scale=scale),
            color=colour(),
            shape=status_shape(),
            tooltip=tooltips(view),
        )
    )
    return chart


def missing_points(frame: pd.DataFrame) -> list[alt.Chart]:
    """Draw what has no value along the lower edge: a gap is not a straight line."""
    if not frame["status"].isin(MISSING).any():
        return []
    chart: alt.Chart = (
        alt.Chart()
        .transform_filter(alt.FieldOneOfPredicate("status", list(MISSING)))
        .mark_point(filled=True, size=70)
        .encode(
            x=alt.X("order:Q"),
            y=_at_pixel(alt.ExprRef("height - 6")),
            color=colour(),
            shape=status_shape(),
            tooltip=[
                alt.Tooltip("short:N", title="commit"),
                alt.Tooltip("subject:N", title="subject"),
                alt.Tooltip("status:N", title="status"),
            ],
        )
    )
    return [chart]


def path(scale: alt.Scale) -> alt.Chart:
    """Join neighbours faintly; failed and skipped results leave a gap."""
    chart: alt.Chart = (
        alt.Chart()
        .transform_filter(alt.datum.status != EXCLUDED)
        .mark_line(
            strokeWidth=1,
            opacity=0.3,
            invalid=_GAPS,
            color=STATUS_STYLES["ok"].colour,
        )
        .encode(x=alt.X("order:Q"), y=alt.Y("shown:Q", scale=scale))
    )
    return chart


def spread(frame: pd.DataFrame, scale: alt.Scale) -> list[alt.Chart]:
    """Draw the band between the quartiles, with a bar for each result while they are few."""
    if not frame["low"].notna().any():
        return []
    tint = STATUS_STYLES["ok"].colour
    marks = [alt.Chart().mark_area(opacity=0.2, clip=True, invalid=_GAPS, color=tint)]
    if len(frame) <= _MOST_BARS:
        marks.append(alt.Chart().mark_rule(opacity=0.5, strokeWidth=3, clip=True, color=tint))
    return [
        mark.transform_filter(alt.datum.status != EXCLUDED).encode(
            x=alt.X("order:Q"),
            y=alt.Y("low:Q", scale=scale),
            y2=alt.Y2("high:Q"),
        )
        for mark in marks
    ]


def level_lines(levels: pd.DataFrame, scale: alt.Scale) -> list[alt.Chart]:
    """Draw the level of each segment."""
    if levels.empty:
        return []
    base = small(levels).mark_rule(strokeWidth=2.5, color=ORANGE, opacity=0.95)
    level = alt.Y("level:Q", scale=scale)
    return [base.encode(x=alt.X("start:Q"), x2=alt.X2("end:Q"), y=level)]


def change_marks(changes: pd.DataFrame, *, labelled: bool = True) -> list[alt.Chart]:
    """Rule off each change point at the first commit of its new level and say how large it is."""
    if changes.empty:
        return []
    tooltip = [
        alt.Tooltip("change:N", title="change"),
        alt.Tooltip("before_text:N", title="before"),
        alt.Tooltip("after_text:N", title="after"),
        alt.Tooltip("short:N", title="first commit of the new level"),
        alt.Tooltip("p_text:N", title="p-value"),
        alt.Tooltip("cause:N", title="cause"),
    ]
    base = small(changes)
    place, tint = alt.X("order:Q"), colour()
    rule = base.mark_rule(strokeWidth=1.5, strokeDash=[5, 4])
    rules: list[alt.Chart] = [rule.encode(x=place, color=tint, tooltip=tooltip)]
    if not labelled:
        return rules
    label = base.mark_text(align="left", dx=4, dy=9, fontSize=12, fontWeight="bold")
    words = alt.Text("label:N")
    return [*rules, label.encode(x=place, y=_at_pixel(0), color=tint, text=words)]


def epochs(frame: pd.DataFrame) -> list[alt.Chart]:
    """Shade every other epoch and rule off where one begins; one epoch alone needs no mark."""
    starts = frame.loc[frame["epoch"] != frame["epoch"].shift()].reset_index(drop=True)
    if len(starts) < 2:
        return []
    spans = pd.DataFrame(
        {
            "start": starts["order"],
            "end": starts["order"].shift(-1).fillna(frame["order"].max()),
            "environment": starts["environment"].fillna("environment not recorded"),
        }
    )
    tooltip = [alt.Tooltip("environment:N", title="epoch")]
    shade = small(spans.iloc[1::2]).mark_rect(color=GREY, opacity=0.1)
    rule = small(spans.iloc[1:]).mark_rule(color=GREY, strokeDash=[2, 3], strokeWidth=1.5)
    label = small(spans).mark_text(color=GREY, align="left", dx=5, dy=-6, fontSize=11, limit=260)
    return [
        shade.encode(x=alt.X("start:Q"), x2=alt.X2("end:Q"), tooltip=tooltip),
        rule.encode(x=alt.X("start:Q"), tooltip=tooltip),
        label.encode(x=alt.X("start:Q"), y=_at_pixel(-8), text=alt.Text("environment:N")),
    ]


def floor_line(frame: pd.DataFrame, scale: alt.Scale, view: HistoryView) -> list[alt.Chart]:
    """Draw the least time the case can take, where the axis reaches that far."""
    lowest = frame["shown"].min()
    floor = None if pd.isna(lowest) else shown_floor(view, float(lowest))
    if floor is None or frame.empty:
        return []
    table = pd.DataFrame(
        {
            "floor": [floor],
            "order": [frame["order"].min()],
            "label": [f"floor {view.unit.text(view.floor)}"],
        }
    )
    base = small(table).encode(y=alt.Y("floor:Q", scale=scale))
    return [
        base.mark_rule(color=GREEN, strokeDash=[8, 4], strokeWidth=1.5),
        base.mark_text(color=GREEN, align="left", dx=4, dy=-7).encode(
            x=alt.X("order:Q"), text=alt.Text("label:N")
        ),
    ]
