"""What a reader of a history came for, in a line for each series: its level, its last change.

Text, because a browser shows it before it has the code of a chart or of a table.
"""

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd
import streamlit as st

from dashboard.series_view import ShownSeries
from dashboard.units import change_text, commit_text, p_value_text
from dashboard.words import count_text, escaped
from db.queries import EXCLUDED

_LONGEST_SUBJECT: Final = 100  # characters


def answer(shown: Sequence[ShownSeries]) -> None:
    """Say of each series where it stands and since when."""
    lines = [line(one) for one in shown]
    if len(shown) > 1:
        named = zip(shown, lines, strict=True)
        lines = [f"- **{escaped(one.name)}**: {text}" for one, text in named]
    with st.container(key="answer"):
        st.markdown("\n".join(lines))


def line(one: ShownSeries) -> str:
    """Say where a series stands and since when, as Markdown."""
    counted = one.points[one.points["status"] != EXCLUDED]
    newest = _newest(one, counted.iloc[-1])
    if one.change_points.empty:
        return f"{newest}; no change point on {count_text(counted['commit'].nunique(), 'commit')}."
    last = one.change_points.iloc[-1]
    return f"{_change(one, last)} {newest[:1].upper()}{newest[1:]}."


def _change(one: ShownSeries, last: "pd.Series[Any]") -> str:
    rises = last["relative_change"] > 0
    colour = "red" if rises == one.view.lower_is_better else "green"
    change = f"{'▲' if rises else '▼'} {change_text(last['relative_change'])}"
    before, after = (escaped(one.view.unit.text(last[name])) for name in ("before", "after"))
    subject = f", “{escaped(_short(last['subject']))}”" if last["subject"] else ""
    sure = [f"p {p_value_text(last['p_value'])}", f"cause {last['cause']}"]
    if last["alert_state"]:
        sure.append(f"alert {last['alert_state']}")
    return (
        f"Level **{after}**, :{colour}[**{change}**] from {before} since "
        f"`{commit_text(last['commit'])}` of {last['commit_date']:%Y-%m-%d}{subject} "
        f"({escaped(', '.join(sure))})."
    )


def _newest(one: ShownSeries, row: "pd.Series[Any]") -> str:
    value = None if pd.isna(row["value"]) else float(row["value"])
    said = row["status"] if value is None else f"**{escaped(one.view.unit.text(value))}**"
    return (
        f"newest result {said} at `{commit_text(row['commit'])}` of {row['commit_date']:%Y-%m-%d}"
    )


def _short(subject: str) -> str:
    return subject if len(subject) <= _LONGEST_SUBJECT else f"{subject[:_LONGEST_SUBJECT]}…"
