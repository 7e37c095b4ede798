"""Machines: environments, what telemetry saw, which windows were doubted, and noise by week."""

from collections import Counter
from functools import partial
from typing import Final

import pandas as pd
import streamlit as st

from dashboard import machine_charts, text_tables
from dashboard.data import Source
from dashboard.downloads import offer
from dashboard.drawing import draw
from dashboard.folded import folded
from dashboard.freshness import local_text
from dashboard.markdown import head, row
from dashboard.units import display_unit
from dashboard.url_filters import url_filters
from dashboard.words import count_text, escaped, unbroken
from db.counters import DOUBTS, REASONS
from db.numbers import MISSING
from db.page_queries import MOST_NOISY

# The counters that tell a machine's state, with what each is called.
STRIPS: Final = {
    "power_w": "power (W)",
    "sm_clock_mhz": "SM clock (MHz)",
    "memory_clock_mhz": "memory clock (MHz)",
    "gpm_sm_active_pct": "SM active (%)",
    "temperature_c": "temperature (°C)",
    REASONS: "throttle reasons (bits)",
}
CODES: Final = {
    **DOUBTS,
    "warm_window": "its counters are of repetitions with a warm cache; its times are not",
    "exposed_enqueue": "the device may have waited for the host in it",
}
ONE_WEEK: Final = 1


def render(source: Source) -> None:
    """Show the page."""
    st.title("Machines")
    machines = source.machines()
    names = machines[machines["runs"] > 0]["machine"].tolist()
    if not names:
        st.info(
            "No machine has measured anything yet: `ddtree-bench run` measures this one.",
            icon=":material/inbox:",
        )
        return
    with url_filters("machines") as filters:
        busiest = machines.sort_values(["commits", "last_ingestion"])["machine"].iloc[-1]
        name = filters.one("Machine", "machine", names, default=busiest)
    _facts(machines[machines["machine"] == name].iloc[0])
    _environments(source, name)
    _telemetry(source.telemetry(name), name)
    _noise(source.noise_by_week(name), name)


def _facts(row: "pd.Series[str]") -> None:
    known = [("CPU", row["cpu"]), ("CPUs", row["num_cpu"]), ("Memory", _memory(row["ram"]))]
    said = [f"{label} {value}" for label, value in known if isinstance(value, str) and value]
    counted = [count_text(int(row["runs"]), "run"), count_text(int(row["commits"]), "commit")]
    st.caption(escaped(" · ".join([*said, *counted])))


def _memory(told: object) -> object:
    """Write bytes, as asv tells memory, in a unit for people; other texts as they are."""
    if not isinstance(told, str) or not told.isdecimal():
        return told
    return display_unit("bytes", float(told)).text(float(told))


def _environments(source: Source, name: str) -> None:
    st.header("Environments")
    table = source.environments()
    table = table[table["machine"] == name].drop(columns=["machine"])
    if table.empty:
        st.caption("None was recorded: only runs with telemetry say under which one they ran.")
        return
    st.caption("Each is an epoch of the machine's histories; one that returns has its level again.")
    text_tables.show(
        [
            (escaped(str(name)), *map(_day, (first, last)), f"{windows:,}")
            for name, first, last, windows in table[
                ["environment", "first", "last", "windows"]
            ].itertuples(index=False)
        ],
        ("Environment", "First telemetry", "Last telemetry", "Windows"),
        right=("Windows",),
        whole=partial(_all_environments, table),
        key="machines.environments",
    )


def _day(at: "pd.Timestamp") -> str:
    return MISSING if pd.isna(at) else unbroken(local_text(at))


def _all_environments(table: pd.DataFrame) -> None:
    zone = st.context.timezone
    dates = {
        column: st.column_config.DatetimeColumn(label, timezone=zone, format="YYYY-MM-DD HH:mm")
        for column, label in (("first", "First telemetry"), ("last", "Last telemetry"))
    }
    st.dataframe(
        table,
        hide_index=True,
        column_config={"environment": "Environment", "windows": "Windows", **dates},
    )


def _telemetry(windows: pd.DataFrame, name: str) -> None:
    st.header("Telemetry")
    if windows.empty:
        st.caption("No window of telemetry belongs to a result of this machine.")
        return
    codes = [[str(code) for code in one] for one in windows["validity"]]
    marked = windows.assign(
        codes=[", ".join(one) or "none" for one in codes],
        kind=["doubted" if DOUBTS.keys() & set(one) else "sound" for one in codes],
    )
    st.caption(
        f"The newest {count_text(len(marked), 'window')}. Crosses are windows whose counters "
        "support no claim."
    )
    drawn = [counter for counter in STRIPS if counter in marked and marked[counter].notna().any()]
    if not drawn:
        st.caption("None of them has a counter of a GPU.")
    span = marked["at"].min(), marked["at"].max()
    for counter in drawn:
        kept = marked.dropna(subset=[counter]).rename(columns={counter: "reading"})
        draw(
            machine_charts.strip(
                kept[["at", "reading", "kind", "codes", "benchmark"]], STRIPS[counter], span
            ),
            description=f"{STRIPS[counter]} of {name} over {count_text(len(kept), 'window')}",
            key=f"strip-{counter}",
            name=f"telemetry-{name}-{counter}",
        )
    _validity(codes)
    whole = partial(_windows, marked.drop(columns=["validity", "window_id"]), name)
    folded("Windows as a table", whole, icon=":material/table:", key="machines.windows")


def _windows(table: pd.DataFrame, name: str) -> None:
    at = st.column_config.DatetimeColumn(
        "at", timezone=st.context.timezone, format="YYYY-MM-DD HH:mm:ss"
    )
    st.dataframe(table, hide_index=True, column_config={"at": at})
    offer(f"telemetry-{name}", table)


def _validity(codes: list[list[str]]) -> None:
    counts = Counter(code for one in codes for code in one)
    if not counts:
        st.caption("Every window is complete: none has a validity code.")
        return
    st.subheader("Validity codes")
    lines = [
        row(
            (
                escaped(code),
                f"{count:,}",
                f"{count / len(codes):.1%}",
                CODES.get(code, "something was not recorded"),
            )
        )
        for code, count in counts.most_common()
    ]
    titles = ("Code", "Windows", "Share", "What it says")
    st.markdown("\n".join((head(titles, right=titles[1:3]), *lines)))


def _noise(frame: pd.DataFrame, name: str) -> None:
    st.header("Noise by week")
    if frame.empty:
        st.caption("No result of this machine has quartiles.")
        return
    st.caption("Half the distance between the quartiles of a result; of a week the median result.")
    if int(frame["results"].sum()) == MOST_NOISY:
        st.caption(f"Told by the newest {MOST_NOISY:,} results alone: older ones are not counted.")
    if len(frame) > ONE_WEEK:
        draw(
            machine_charts.noise(frame),
            description=f"Noise of {name} in {count_text(len(frame), 'week')}",
            name=f"noise-{name}",
        )
    newest = frame.sort_values("week", ascending=False)
    text_tables.show(
        [
            (f"{week:%Y-%m-%d}", f"{noise_pct:.3f}", f"{results:,}")
            for week, noise_pct, results in newest[["week", "noise_pct", "results"]].itertuples(
                index=False
            )
        ],
        ("Week of", "Spread (%)", "Results"),
        right=("Spread (%)", "Results"),
        whole=partial(_weeks, newest.drop(columns=["machine"])),
        key="machines.weeks",
    )


def _weeks(table: pd.DataFrame) -> None:
    st.dataframe(
        table,
        hide_index=True,
        column_config={
            "week": st.column_config.DateColumn("Week of"),
            "noise_pct": st.column_config.NumberColumn("Spread (%)", format="%.3f"),
            "results": "Results",
        },
    )
