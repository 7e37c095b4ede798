"""Charts of histories: frames of `db.queries` in, Altair charts out, nothing read or decided here.

Every history has the order of its commits on x, never their dates: two commits of one minute stay
two places, and a branch merged late stands where it was merged.
"""

import altair as alt
import pandas as pd

from dashboard import chart_layers as layer
from dashboard.chart_frames import HistoryView, marked_changes, plotted, segments
from dashboard.theme import BLUE, SERIES_COLOURS


def history(points: pd.DataFrame, change_points: pd.DataFrame, view: HistoryView) -> alt.LayerChart:
    """Draw one series: points by status, quartile band, levels, change points, epochs, floor."""
    frame = plotted(points, view)
    changes = marked_changes(change_points, frame, view)
    levels = segments(frame, changes)
    scale = layer.value_scale(frame, levels, view)
    layers = [
        *layer.epochs(frame),
        *layer.spread(frame, scale),
        layer.path(scale),
        layer.points(frame, scale, view).add_params(*layer.handles()),
        *layer.missing_points(frame),
        *layer.level_lines(levels, scale),
        *layer.change_marks(changes),
        *layer.floor_line(frame, scale, view),
    ]
    return alt.LayerChart(data=frame, layer=layers, height=view.height_px)


def overlay(points: pd.DataFrame, change_points: pd.DataFrame, view: HistoryView) -> alt.LayerChart:
    """Draw several series of one unit over one another; column `series` names each."""
    frame = plotted(points, view)
    changes = marked_changes(change_points, frame, view)
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
    x, value = layer.commit_x(frame), alt.Y("shown:Q", title=view.y_title, scale=scale)
    shape, tooltip = layer.status_shape(), layer.tooltips(view)
    band = alt.Chart().mark_area(opacity=0.14, clip=True, invalid="break-paths-filter-domains")
    point = alt.Chart().mark_point(filled=True, size=layer.point_size(frame), opacity=0.9)
    layers = [
        band.encode(x=x, y=alt.Y("low:Q", scale=scale), y2=alt.Y2("high:Q"), color=colour),
        alt.Chart().mark_line(strokeWidth=1, opacity=0.4).encode(x=x, y=value, color=colour),
        point.encode(x=x, y=value, color=colour, shape=shape, tooltip=tooltip).add_params(
            *layer.handles()
        ),
        *(mark.encode(color=colour) for mark in layer.missing_points(frame)),
        *(mark.encode(color=colour) for mark in layer.level_lines(levels, scale)),
        *layer.change_marks(changes, labelled=False),
    ]
    return alt.LayerChart(data=frame, layer=layers, height=view.height_px)


def sparkline(
    points: pd.DataFrame, change_points: pd.DataFrame, view: HistoryView
) -> alt.LayerChart:
    """Draw one series without axes, for a line of a list."""
    frame = plotted(points, view)
    changes = marked_changes(change_points, frame, view)
    levels = segments(frame, changes)
    scale = layer.value_scale(frame, levels, view)
    bare_x = alt.X("order:Q", axis=None, scale=layer.order_scale())
    bare_y = alt.Y("shown:Q", axis=None, scale=scale)
    point = alt.Chart().mark_point(filled=True, size=layer.point_size(frame) / 3, color=BLUE)
    rule = layer.small(changes).mark_rule(strokeWidth=1.5, strokeDash=[4, 3])
    # Every layer says that it has no axis: Vega cannot merge one that has with one that has not.
    level_x, level_y = alt.X("start:Q", axis=None), alt.Y("level:Q", axis=None, scale=scale)
    layers = [
        *(line.encode(x=level_x, y=level_y) for line in layer.level_lines(levels, scale)),
        point.encode(x=bare_x, y=bare_y, tooltip=layer.tooltips(view)),
        rule.encode(x=alt.X("order:Q", axis=None), color=layer.colour()),
    ]
    return alt.LayerChart(data=frame, layer=layers, height=view.height_px)


def _by_series(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(name), part) for name, part in frame.groupby("series", sort=False)]
