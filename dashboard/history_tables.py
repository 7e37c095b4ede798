"""What stands below a history: its change points, its numbers, and one point in full."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import pandas as pd
import streamlit as st
from streamlit.elements.lib.column_types import ColumnConfig

from dashboard.data import Source
from dashboard.folded import folded
from dashboard.reproduce import Recipe, recipe
from dashboard.series_view import ShownSeries, commit_labels
from dashboard.units import change_text, commit_text, p_value_text
from dashboard.url_filters import UrlFilters
from dashboard.words import count_text, escaped, heads, with_known_subjects
from db.queries import EXCLUDED

_LAST_PICK: Final = "history.picked"
_STEP, _TABLE = ":material/stairs:", ":material/table:"
_SAMPLES, _SENSORS = ":material/scatter_plot:", ":material/sensors:"
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
_SERIES_COLUMNS: Final = ("benchmark", "version", "params", "machine", "variant", "metric")
_FILE_COLUMNS: Final = tuple(name for name in _RESULT_COLUMNS if name != "series")


def summary(shown: ShownSeries) -> str:
    """Count what a panel shows, and name its floor with what it rests on."""
    counts = shown.points["status"].value_counts()
    num_results = sum(shown.points["status"] != EXCLUDED)
    num_commits = shown.points["commit"].nunique()
    parts = [
        f"{count_text(num_results, 'result')} on {count_text(num_commits, 'commit')}",
        *(
            f"{counts[name]:,} {name}"
            for name in ("failed", "skipped", "single-sample", EXCLUDED)
            if name in counts
        ),
        count_text(len(shown.change_points), "change point"),
    ]
    if shown.view.floor is not None:
        parts.append(f"floor {shown.view.unit.text(shown.view.floor)} ({shown.floor_basis})")
    return escaped(" · ".join(parts))


def change_points(shown: Sequence[ShownSeries]) -> None:
    """List the change points of what is shown, newest first, once a reader opens them."""
    count = sum(len(one.change_points) for one in shown)
    if count:
        label = f"{count_text(count, 'change point')} as a table"
        folded(label, partial(_change_points, shown), icon=_STEP, key="history.changes")


def _change_points(shown: Sequence[ShownSeries]) -> None:
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
    newest_first = pd.DataFrame(rows).sort_values("date", ascending=False, kind="stable")
    table = with_known_subjects(newest_first)
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
    """Give every number of the charts as a table, once a reader opens it."""
    folded("Results as a table", partial(_results, shown), icon=_TABLE, key="history.results")


def _results(shown: Sequence[ShownSeries]) -> None:
    table = with_known_subjects(pd.concat([_printed(one) for one in shown], ignore_index=True))
    st.dataframe(
        table,
        hide_index=True,
        column_order=[column for column in _RESULT_COLUMNS if column in table],
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
    scaled = _scaled(one)
    return scaled.assign(series=one.name, commit=scaled["commit"].map(commit_text))


def rows(shown: Sequence[ShownSeries]) -> pd.DataFrame:
    """Give every number of the charts with its unit and all that names it, for a file."""
    tables = [
        _scaled(one).assign(**{name: str(one.row[name]) for name in _SERIES_COLUMNS})
        for one in shown
    ]
    return pd.concat(tables, ignore_index=True)[[*_SERIES_COLUMNS, *_FILE_COLUMNS]]


def _scaled(one: ShownSeries) -> pd.DataFrame:
    newest_first = one.points.iloc[::-1]
    scaled = {name: newest_first[name] / one.view.unit.divisor for name in ("value", "q25", "q75")}
    return newest_first.assign(
        **scaled,
        unit=one.view.unit.label,
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
    st.session_state["history.filter.result"] = [str(found["result_id"].iloc[0])]


def point(filters: UrlFilters, source: Source, shown: Sequence[ShownSeries]) -> None:
    """Show one point: its commit, its samples, its telemetry, and how to measure it again."""
    st.header("One point")
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
    row = _result(filters, one, one.points[one.points["commit"] == commit])
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
    # A browser loads more than a megabyte for a block of code: only for one who looks at a point.
    _again(how, is_asked=commit != hashes[0] or _LAST_PICK in st.session_state)


def _result(filters: UrlFilters, one: ShownSeries, found: pd.DataFrame) -> "pd.Series[Any]":
    """Ask which result of a commit is meant, unless it is the only one; the last that counts."""
    if len(found) == 1:
        return found.iloc[0]
    numbers = [str(number) for number in found["result_id"]]
    counted = found.loc[found["status"] != EXCLUDED, "result_id"].astype(str).tolist()
    labels = {
        number: f"run {run} · {_value(one, value)} · {status}"
        for number, run, value, status in zip(
            numbers, found["run_id"], found["value"], found["status"], strict=True
        )
    }
    number = filters.one(
        "Result", "result", numbers[::-1], default=[*numbers, *counted][-1], labels=labels
    )
    return found.iloc[numbers.index(number)]


def _value(one: ShownSeries, value: float | None) -> str:
    return one.view.unit.text(None if pd.isna(value) else float(value))


def _again(how: Recipe, *, is_asked: bool) -> None:
    st.markdown("**Measure it again**")
    if how.command is not None and is_asked:
        st.code(how.command, "shell", wrap_lines=True)
    elif how.command is not None:
        st.text(how.command)
    st.caption(how.note)


def _said(one: ShownSeries, row: "pd.Series[Any]") -> None:
    subject = escaped(str(row["subject"] or "subject not known"))
    value = escaped(_value(one, row["value"]))
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
    table = pd.DataFrame({"sample": range(len(scaled)), one.view.unit.label or "value": scaled})
    label = count_text(len(samples), "sample")
    folded(label, partial(_plain, table), icon=_SAMPLES, key="history.samples")


def _telemetry(source: Source, row: "pd.Series[Any]") -> None:
    windows = source.windows(int(row["result_id"]))
    if windows.empty:
        st.caption("No telemetry belongs to it.")
        return
    label = f"Telemetry: {count_text(len(windows), 'window')}"
    known = windows.dropna(axis="columns", how="all").drop(columns=["commit", "result_id"])
    folded(label, partial(_plain, known), icon=_SENSORS, key="history.telemetry")


def _plain(table: pd.DataFrame) -> None:
    st.dataframe(table, hide_index=True)
