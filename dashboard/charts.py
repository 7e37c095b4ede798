"""Charts of histories: frames of `db.queries` in, Altair charts out, nothing read or decided here.

Every history has the order of its commits on x, never their dates: two commits of one minute stay
two places, and a branch merged late stands where it was merged.
"""

import altair as alt
import pandas as pd

from dashboard import chart_layers as layer
from dashboard.chart_frames import HistoryView, marked_changes, plotted, segments
from dashboard.theme import GREY, ORANGE, SERIES_COLOURS


def history(points: pd.DataFrame, change_points: pd.DataFrame, view: HistoryView) -> alt.LayerChart:
    """Draw one series: points by status, quartile band, levels, change points, epochs, floor."""
    frame = plotted(points, view)
    changes = marked_changes(change_points, view)
    levels = segments(frame, changes)
    scale = layer.value_scale(frame, levels, view)
    layers = [
        *layer.epochs(frame),
        *layer.spread(frame, scale),
        layer.path(frame, scale),
        layer.points(frame, scale, view),
        layer.missing_points(frame),
        layer.level_lines(levels, scale),
        *layer.change_marks(changes),
        *layer.floor_line(frame, scale, view),
    ]
    return alt.LayerChart(layer=layers).properties(height=view.height_px)


def overlay(points: pd.DataFrame, change_points: pd.DataFrame, view: HistoryView) -> alt.LayerChart:
    """Draw several series of one unit over one another; column `series` names each."""
    frame = plotted(points, view)
    changes = marked_changes(change_points, view)
    levels = pd.concat(
        [segments(part, changes[changes["series"] == name]) for name, part in _by_series(frame)]
    )
    scale = layer.value_scale(frame, levels, view)
    colour = alt.Color(
        "series:N",
        title=None,
        scale=alt.Scale(range=list(SERIES_COLOURS)),
        legend=alt.Legend(orient="top", columns=2, labelLimit=520, symbolType="circle"),
    )
    base = alt.Chart(frame).encode(x=layer.commit_x(frame), color=colour)
    value = alt.Y("shown:Q", title=view.y_title, scale=scale)
    layers = [
        base.mark_area(opacity=0.14, clip=True, invalid="break-paths-filter-domains").encode(
            y=alt.Y("low:Q", scale=scale), y2="high:Q"
        ),
        base.mark_line(strokeWidth=1, opacity=0.4).encode(y=value),
        base.mark_point(filled=True, size=layer.point_size(frame), opacity=0.9).encode(
            y=value, shape=layer.status_shape(), tooltip=layer.tooltips(view)
        ),
        base.transform_filter(alt.FieldOneOfPredicate("status", list(layer.MISSING)))
        .mark_point(filled=True, size=60)
        .encode(
            y=alt.value(view.height_px - 6),
            shape=layer.status_shape(),
            tooltip=layer.tooltips(view),
        ),
        alt.Chart(levels)
        .mark_rule(strokeWidth=2.5)
        .encode(x=alt.X("start:Q"), x2="end:Q", y=alt.Y("level:Q", scale=scale), color="series:N"),
        *layer.change_marks(changes, labelled=False),
    ]
    return alt.LayerChart(layer=layers).properties(height=view.height_px)


def sparkline(
    points: pd.DataFrame, change_points: pd.DataFrame, view: HistoryView
) -> alt.LayerChart:
    """Draw one series without axes, for a line of a list."""
    frame = plotted(points, view)
    changes = marked_changes(change_points, view)
    levels = segments(frame, changes)
    scale = layer.value_scale(frame, levels, view)
    bare_x = alt.X("order:Q", axis=None, scale=layer.order_scale())
    bare_y = alt.Y("shown:Q", axis=None, scale=scale)
    base = alt.Chart(frame).encode(x=bare_x, y=bare_y)
    layers = [
        base.mark_point(
            filled=True, size=layer.point_size(frame) / 2, color=GREY, opacity=0.55
        ).encode(tooltip=layer.tooltips(view)),
        alt.Chart(levels)
        .mark_rule(strokeWidth=2.5, color=ORANGE)
        .encode(
            x=alt.X("start:Q", axis=None), x2="end:Q", y=alt.Y("level:Q", axis=None, scale=scale)
        ),
        alt.Chart(changes)
        .mark_rule(strokeWidth=1.5, strokeDash=[4, 3])
        .encode(x=alt.X("order:Q", axis=None), color=layer.colour()),
    ]
    return alt.LayerChart(layer=layers).properties(height=view.height_px)


def _by_series(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(name), part) for name, part in frame.groupby("series", sort=False)]
