"""The overview's tables: machines and newest commits, as text until a whole table is opened."""

from functools import partial
from typing import Any, Final

import pandas as pd
import streamlit as st

from dashboard import text_tables
from dashboard.data import Source
from dashboard.freshness import local_text
from dashboard.series_view import order_note
from dashboard.units import commit_text
from dashboard.words import count_text, escaped, excerpt, unbroken, with_known_subjects
from db.numbers import MISSING

_LONGEST_SUBJECT: Final = 100  # characters of a subject as text; the whole table has all of them
_MACHINE: Final = {
    "machine": "Machine",
    "last_result": "Last result",
    "noise_pct": "Noise (%)",
    "throttled_pct": "Throttled (%)",
    "series": "Series",
    "stale": "Stale",
    "last_date": "Newest commit",
}
# What a column's head cannot say.
_HELP: Final = {
    "noise_pct": "Half the quartiles' distance, of its newest results",
    "throttled_pct": "Share of its newest windows of telemetry in which a clock was held down",
    "stale": "Series without a result on the machine's newest commit",
}
_DECIMALS: Final = {"noise_pct": 2, "throttled_pct": 0, "series": 0, "stale": 0}
_COMMIT: Final = {"short": "Commit", "commit_date": "Date", "subject": "Subject"}


def machines(source: Source) -> None:
    """Show of each machine when it measured last, its noise, and what of it is stale."""
    st.header("Machines")
    table = source.machines().merge(source.freshness(), on="machine", how="left")
    table = table.merge(source.health(), on="machine", how="left")[list(_MACHINE)]
    text_tables.show(
        [_health(row) for row in table.to_dict("records")],
        list(_MACHINE.values()),
        right=[_MACHINE[name] for name in _DECIMALS],
        whole=partial(_all_machines, table),
        key="overview.machines",
    )
    told = [f"**{_MACHINE[name]}**: {_HELP[name]}." for name in ("noise_pct", "throttled_pct")]
    stale = int(table["stale"].sum())
    told.append(f"**Stale**: {stale:,} series without a result on their machine's newest commit.")
    st.caption("  \n".join(told))


def _health(row: dict[Any, Any]) -> tuple[str, ...]:
    at, day = row["last_result"], row["last_date"]
    return (
        escaped(row["machine"]),
        MISSING if pd.isna(at) else unbroken(local_text(at)),
        *(
            MISSING if pd.isna(row[name]) else f"{row[name]:,.{decimals}f}"
            for name, decimals in _DECIMALS.items()
        ),
        MISSING if pd.isna(day) else unbroken(f"{day:%Y-%m-%d}"),
    )


def _all_machines(table: pd.DataFrame) -> None:
    column = st.column_config
    st.dataframe(
        table,
        hide_index=True,
        placeholder=MISSING,
        column_config={
            **_MACHINE,
            **{
                name: column.NumberColumn(
                    _MACHINE[name], format=f"%.{decimals}f", help=_HELP.get(name)
                )
                for name, decimals in _DECIMALS.items()
            },
            "last_result": column.DatetimeColumn(
                _MACHINE["last_result"], timezone=st.context.timezone, format="YYYY-MM-DD HH:mm"
            ),
            "last_date": column.DateColumn(_MACHINE["last_date"]),
        },
    )


def commits(source: Source) -> None:
    """Show the newest commits, and what the order of all of them rests on."""
    st.header("Newest commits")
    table = source.commits()
    listed = with_known_subjects(
        table.assign(short=table["commit"].map(commit_text))[list(_COMMIT)]
    )
    text_tables.show(
        [_told(row) for row in listed.head(text_tables.MOST_ROWS).to_dict("records")],
        [_COMMIT[str(name)] for name in listed],
        right=(),
        whole=partial(_all_commits, listed),
        key="overview.commits",
        total=len(listed),
    )
    for basis, count in table["order_basis"].value_counts().items():
        if note := order_note(str(basis)):
            st.caption(f":material/sort: {count_text(int(count), 'commit')}: {note}")


def _told(row: dict[Any, Any]) -> list[str]:
    cells = [f"`{row['short']}`", unbroken(f"{row['commit_date']:%Y-%m-%d}")]
    subject = [row["subject"]] if "subject" in row else []
    return [*cells, *(escaped(excerpt(one, _LONGEST_SUBJECT)) for one in subject)]


def _all_commits(table: pd.DataFrame) -> None:
    st.dataframe(
        table,
        hide_index=True,
        column_config={
            **_COMMIT,
            "commit_date": st.column_config.DateColumn("Date"),
            "subject": st.column_config.TextColumn("Subject", width="large"),
        },
    )
