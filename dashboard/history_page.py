"""History: any series over its commits, alone, in panels or over one another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import altair as alt
import pandas as pd
import streamlit as st

from dashboard import charts, history_tables
from dashboard.chart_frames import align
from dashboard.data import Source
from dashboard.drawing import draw_pickable
from dashboard.findings import group_findings, standing
from dashboard.history_answer import answer
from dashboard.selection import (
    PARAM_PREFIX,
    choices,
    distinct_names,
    narrow,
    param_columns,
    twin_columns,
    with_param_columns,
)
from dashboard.series_view import ShownSeries, legend_html, order_note, view_of
from dashboard.url_filters import UrlFilters, url_filters
from dashboard.words import escaped
from db.queries import EXCLUDED, Finding

MOST_PANELS: Final = 4
MOST_OVERLAID: Final = 8
PANEL_PX: Final = 290
ALONE_PX: Final = 460
FILTERS_A_ROW: Final = 4
HANDLES: Final = (
    "A click on a point shows its samples and its command; a drag moves a chart, Shift and the "
    "wheel zoom it, a double click shows all of it again."
)
PANELS, ONE_CHART = "panels", "one chart"
RANGES: Final = {"all": None, "last 200": 200, "last 50": 50}


@dataclass(frozen=True, slots=True)
class Look:
    """How the reader wants the chosen series drawn."""

    layout: str
    log_axis: bool
    last: int | None  # newest commits shown; None shows all


def render(source: Source) -> None:
    """Show the page."""
    st.title("History")
    table = with_param_columns(source.series())
    if table.empty:
        st.info(
            "No series yet: `ddtree-bench ingest PATH` reads any tree of asv results.",
            icon=":material/inbox:",
        )
        return
    worst = _worst(source, table)
    # As the finding's own link would: its series alone.
    start = {} if worst is None else source.history_query(worst)
    with url_filters("history", start) as filters:
        with st.container(border=True):
            chosen = _filtered(filters, table, _defaults(source, table, worst))
            look = _look(filters)
        limit = MOST_OVERLAID if look.layout == ONE_CHART else MOST_PANELS
        if len(chosen) > limit:
            st.info(
                f"{len(chosen)} series match; the first {limit} are drawn. "
                "Choose parameters to narrow them down.",
                icon=":material/filter_alt:",
            )
        shown = _read(source, chosen.head(limit), look)
        answer(shown)
        shown = [_with_floor(source, one) for one in shown]
        _draw(source, shown, look)
        history_tables.change_points(shown)
        history_tables.results(shown)
        history_tables.point(filters, source, shown)


def _filtered(filters: UrlFilters, table: pd.DataFrame, defaults: tuple[str, str]) -> pd.DataFrame:
    """Ask what to show, each filter offering only what the ones before it left."""
    benchmark, machine = defaults
    left, right = st.columns([3, 1])
    with left:
        asked = filters.many(
            "Benchmarks", "benchmark", choices(table, "benchmark"), default=[benchmark]
        )
    table = narrow(table, "benchmark", asked)
    offered = choices(table, "machine")
    with right:
        machines = filters.many(
            "Machines",
            "machine",
            offered,
            default=[machine if machine in offered else offered[0]],
        )
    table = narrow(table, "machine", machines)
    columns = [*param_columns(table), *twin_columns(table)]
    slots = [slot for _ in columns[::FILTERS_A_ROW] for slot in st.columns(FILTERS_A_ROW)]
    for column, slot in zip(columns, slots, strict=False):
        label = column.removeprefix(PARAM_PREFIX).replace("_", " ").capitalize()
        with slot:
            table = narrow(table, column, filters.many(label, column, choices(table, column)))
    return table


def _worst(source: Source, table: pd.DataFrame) -> Finding | None:
    """Give the worst finding whose series has results: all of one may have been left out since."""
    groups = group_findings(standing(source.overview().findings))
    known = set(table["series_id"])
    findings = (finding for group in groups for finding in group.findings)
    return next((finding for finding in findings if finding.series_id in known), None)


def _defaults(source: Source, table: pd.DataFrame, worst: Finding | None) -> tuple[str, str]:
    """Name benchmark and machine of the worst finding, or of what was measured last."""
    if worst is not None:
        return worst.benchmark, worst.machine
    newest = source.freshness().sort_values("last_date", kind="stable")["machine"].iloc[-1]
    return str(table[table["machine"] == newest]["benchmark"].iloc[-1]), str(newest)


def _look(filters: UrlFilters) -> Look:
    first, second, third, _ = st.columns(4)
    with first:
        layout = filters.choice("Series in", "layout", [PANELS, ONE_CHART], default=PANELS)
    with second:
        scale = filters.choice("Value axis", "axis", ["linear", "log"], default="linear")
    with third:
        last = filters.choice("Commits", "commits", list(RANGES), default="all")
    return Look(layout, scale == "log", RANGES[last])


def _read(source: Source, chosen: pd.DataFrame, look: Look) -> list[ShownSeries]:
    names = distinct_names(chosen)
    height = ALONE_PX if len(chosen) == 1 or look.layout == ONE_CHART else PANEL_PX
    shown = []
    for name, record in zip(names, chosen.to_dict("records"), strict=True):
        row = {str(column): value for column, value in record.items()}
        series_id = int(row["series_id"])
        points = source.whole_history(series_id)
        view = view_of(row, points, log_axis=look.log_axis, height_px=height)
        shown.append(ShownSeries(name, row, points, source.change_points(series_id), view))
    return shown


def _with_floor(source: Source, one: ShownSeries) -> ShownSeries:
    """Add what a chart alone shows: nobody waits for it who reads the words before it."""
    commit = str(one.points.loc[one.points["status"] != EXCLUDED, "commit"].iloc[-1])
    floor_s, basis = source.floor(int(str(one.row["series_id"])), commit)
    floor = floor_s if one.row["unit"] == "seconds" else None
    return replace(one, view=replace(one.view, floor=floor), floor_basis=basis)


def _draw(source: Source, shown: Sequence[ShownSeries], look: Look) -> None:
    st.html(legend_html())
    st.caption(HANDLES)
    is_comparable = len({(one.row["unit"], one.row["metric"]) for one in shown}) == 1
    if look.layout == ONE_CHART and len(shown) > 1 and is_comparable:
        _draw_over_one_another(source, shown, look)
    else:
        if look.layout == ONE_CHART and not is_comparable:
            st.caption(":material/info: The units of these series differ: shown in panels.")
        _draw_panels(source, shown, look)
    if look.log_axis and any((one.points["value"] <= 0).any() for one in shown):
        st.caption(":material/info: No logarithm has zero: such series have a linear axis.")
    for basis in dict.fromkeys(one.points.attrs["order_basis"] for one in shown):
        if note := order_note(basis):
            st.caption(f":material/sort: Commits are {note}.")


def _draw_panels(source: Source, shown: Sequence[ShownSeries], look: Look) -> None:
    if len(shown) == 1:
        slots = [st.container()]
    else:
        # Row by row, so that a long name does not push its column out of step.
        slots = [slot for _ in shown[::2] for slot in st.columns(2, gap="medium")]
    for one, slot in zip(shown, slots, strict=False):
        with slot:
            st.markdown(f"**{escaped(one.name)}**")
            picked = draw_pickable(
                partial(_history, one, look.last),
                state=(source.url, source.version, one.row["series_id"], look.last, repr(one.view)),
                key=f"history-{one.row['series_id']}",
                description=f"History of {one.name}: {one.view.y_title}",
                name=f"history-{one.name}-{one.row['series_id']}",
                table=_rows([one], newest(one.points, look.last)),
            )
            history_tables.pick(one, picked)
            st.caption(history_tables.summary(one))


def _draw_over_one_another(source: Source, shown: Sequence[ShownSeries], look: Look) -> None:
    points = pd.concat([one.points.assign(series=one.name) for one in shown], ignore_index=True)
    changes = pd.concat(
        [one.change_points.assign(series=one.name) for one in shown], ignore_index=True
    )
    aligned = newest(align(points, source.commits()), look.last)
    named = tuple((one.row["series_id"], one.name) for one in shown)
    picked = draw_pickable(
        partial(charts.overlay, aligned, changes, shown[0].view),
        state=(source.url, source.version, named, look.last, repr(shown[0].view)),
        key="overlay",
        description=f"{len(shown)} series over one another: {shown[0].view.y_title}",
        name="history-overlay",
        table=_rows(shown, aligned),
    )
    for one in shown:
        history_tables.pick(one, picked)


def _history(one: ShownSeries, last: int | None) -> alt.LayerChart:
    return charts.history(newest(one.points, last), one.change_points, one.view)


def _rows(shown: Sequence[ShownSeries], drawn: pd.DataFrame) -> pd.DataFrame:
    """Give what is drawn as a file has it."""
    kept = [one.points[one.points["result_id"].isin(drawn["result_id"])] for one in shown]
    pairs = zip(shown, kept, strict=True)
    return history_tables.rows([replace(one, points=points) for one, points in pairs])


def newest(points: pd.DataFrame, last: int | None) -> pd.DataFrame:
    """Keep the results of the newest commits."""
    if last is None or points.empty:
        return points
    kept: pd.DataFrame = points[points["order"] > points["order"].max() - last]
    return kept
