"""What stands below a history: its change points, its numbers, and one point in full."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd
import streamlit as st
from streamlit.elements.lib.column_types import ColumnConfig

from dashboard.data import Source
from dashboard.reproduce import recipe
from dashboard.series_view import ShownSeries, commit_labels
from dashboard.units import change_text, commit_text, p_value_text
from dashboard.url_filters import UrlFilters
from dashboard.words import count_text, escaped, heads
from db.queries import EXCLUDED

_LAST_PICK: Final = "history.picked"
_RESULT_COLUMNS = {
    "series": "Series",
    "commit": "Commit",
    "commit_date": "Date",
    "subject": "Subject",
    "value": "Value",
    "q25": "Lower quartile",
    "q75": "Upper quartile",
    "unit": "Unit",
    "n": "Samples",
    "status": "Status",
    "run_id": "Run",
    "environment": "Environment",
}


def summary(shown: ShownSeries) -> str:
    """Count what a panel shows, and name its floor with what it rests on."""
    counts = shown.points["status"].value_counts()
    num_commits = shown.points["commit"].nunique()
    parts = [
        count_text(sum(shown.points["status"] != EXCLUDED), "result")
        + " on "
        + count_text(num_commits, "commit"),
        *(
            f"{counts[name]} {name}"
            for name in ("failed", "skipped", "single-sample", EXCLUDED)
            if name in counts
        ),
        count_text(len(shown.change_points), "change point"),
    ]
    if shown.view.floor is not None:
        parts.append(f"floor {shown.view.unit.text(shown.view.floor)} ({shown.floor_basis})")
    return escaped(" · ".join(parts))


def change_points(shown: Sequence[ShownSeries]) -> None:
    """List the change points of what is shown, newest first."""
    rows = [
        {
            "date": change["commit_date"],
            "series": one.name,
            "change": change_text(change["relative_change"]),
            "before": one.view.unit.text(change["before"]),
            "after": one.view.unit.text(change["after"]),
            "p": p_value_text(change["p_value"]),
            "cause": change["cause"],
            "commit": commit_text(change["commit"]),
            "subject": change["subject"] or "",
        }
        for one in shown
        for change in one.change_points.to_dict("records")
    ]
    if not rows:
        return
    st.subheader("Change points")
    table = pd.DataFrame(rows).sort_values("date", ascending=False, kind="stable")
    st.dataframe(
        table,
        hide_index=True,
        column_config={
            **heads(table),
            "date": st.column_config.DateColumn("Date"),
            "p": "p-value",
        },
    )


def results(shown: Sequence[ShownSeries]) -> None:
    """Give every number of the charts as a table."""
    with st.expander("Results as a table", icon=":material/table:"):
        table = pd.concat([_printed(one) for one in shown], ignore_index=True)
        st.dataframe(
            table,
            hide_index=True,
            column_order=list(_RESULT_COLUMNS),
            column_config={
                **_RESULT_COLUMNS,
                "commit_date": st.column_config.DateColumn("Date"),
                **{name: _number(_RESULT_COLUMNS[name]) for name in ("value", "q25", "q75")},
                "n": st.column_config.NumberColumn("Samples", format="%d"),
            },
        )


def _number(label: str) -> ColumnConfig:
    return st.column_config.NumberColumn(label, format="%.5g")


def _printed(one: ShownSeries) -> pd.DataFrame:
    newest_first = one.points.iloc[::-1]
    scaled = {name: newest_first[name] / one.view.unit.divisor for name in ("value", "q25", "q75")}
    return newest_first.assign(
        **scaled,
        unit=one.view.unit.label,
        series=one.name,
        commit=newest_first["commit"].map(commit_text),
        subject=newest_first["subject"].fillna(""),
        environment=newest_first["environment"].fillna(""),
    )


def pick(one: ShownSeries, picked: Mapping[str, Any] | None) -> None:
    """Let a click on a point of a series choose it below; a click counts once."""
    if picked is None or st.session_state.get(_LAST_PICK) == picked:
        return
    found = one.points[one.points["result_id"] == picked.get("result_id")]
    if found.empty:
        return
    st.session_state[_LAST_PICK] = dict(picked)
    st.session_state["history.filter.point"] = [one.name]
    st.session_state["history.filter.commit"] = [str(found["commit"].iloc[0])]


def point(filters: UrlFilters, source: Source, shown: Sequence[ShownSeries]) -> None:
    """Show one point: its commit, its samples, its telemetry, and how to measure it again."""
    st.subheader("One point")
    st.caption("Click a point of a chart, or choose it here.")
    left, right = st.columns(2)
    names = [one.name for one in shown]
    with left:
        name = filters.one("Series", "point", names, default=names[0])
    one = shown[names.index(name)]
    hashes = list(dict.fromkeys(one.points["commit"].iloc[::-1]))
    with right:
        commit = filters.one(
            "Commit", "commit", hashes, default=hashes[0], labels=commit_labels(one.points)
        )
    found = one.points[one.points["commit"] == commit]
    found = found[found["status"] != EXCLUDED] if len(found) > 1 else found
    row = found.iloc[-1]
    _said(one, row)
    _samples(source, one, row)
    _telemetry(source, row)
    how = recipe(
        benchmark=str(one.row["benchmark"]),
        params=str(one.row["params"]),
        commit=commit,
        is_external=bool(row["external"]),
        has_repository=one.points.attrs["order_basis"] == "repository",
    )
    st.markdown("**Measure it again**")
    if how.command is not None:
        st.code(how.command, "shell", wrap_lines=True)
    st.caption(how.note)


def _said(one: ShownSeries, row: "pd.Series[Any]") -> None:
    subject = escaped(str(row["subject"] or "subject not known"))
    value = escaped(one.view.unit.text(None if pd.isna(row["value"]) else float(row["value"])))
    st.markdown(
        f"`{row['commit']}`  \n**{subject}**  \n{value} · {row['status']} · run {row['run_id']} · "
        f"{escaped(str(row['environment'] or 'environment not recorded'))}"
    )


def _samples(source: Source, one: ShownSeries, row: "pd.Series[Any]") -> None:
    samples = source.samples(int(row["result_id"]))
    if not samples:
        st.caption("No single sample of it is stored.")
        return
    scaled = [value / one.view.unit.divisor for value in samples]
    with st.expander(f"{count_text(len(samples), 'sample')}", icon=":material/scatter_plot:"):
        st.dataframe(
            pd.DataFrame({"sample": range(len(scaled)), one.view.unit.label or "value": scaled}),
            hide_index=True,
        )


def _telemetry(source: Source, row: "pd.Series[Any]") -> None:
    windows = source.windows(int(row["result_id"]))
    if windows.empty:
        st.caption("No telemetry belongs to it.")
        return
    label = f"Telemetry: {count_text(len(windows), 'window')}"
    with st.expander(label, icon=":material/sensors:"):
        known = windows.dropna(axis="columns", how="all").drop(columns=["commit", "result_id"])
        st.dataframe(known, hide_index=True)
