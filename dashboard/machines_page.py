"""Machines: environments, what telemetry saw, which windows were doubted, and noise by week."""

from collections import Counter
from typing import Final

import pandas as pd
import streamlit as st

from dashboard import machine_charts
from dashboard.data import Source
from dashboard.downloads import offer
from dashboard.drawing import draw
from dashboard.units import display_unit
from dashboard.url_filters import url_filters
from dashboard.words import count_text, escaped
from db.counters import DOUBTS, REASONS

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
            description=f"{STRIPS[counter]} of {name} over {len(kept)} windows",
            key=f"strip-{counter}",
        )
    offer(f"telemetry-{name}", marked.drop(columns=["validity", "window_id"]))
    _validity(codes)
    with st.expander("Windows as a table", icon=":material/table:"):
        st.dataframe(marked.drop(columns=["validity", "window_id"]), hide_index=True)


def _validity(codes: list[list[str]]) -> None:
    counts = Counter(code for one in codes for code in one)
    if not counts:
        st.caption("Every window is complete: none has a validity code.")
        return
    st.subheader("Validity codes")
    st.dataframe(
        pd.DataFrame(
            [
                {
                    "code": code,
                    "windows": count,
                    "share_pct": 100 * count / len(codes),
                    "what it says": CODES.get(code, "something was not recorded"),
                }
                for code, count in counts.most_common()
            ]
        ),
        hide_index=True,
        column_config={
            "code": "Code",
            "windows": "Windows",
            "share_pct": st.column_config.NumberColumn("Share (%)", format="%.1f"),
            "what it says": "What it says",
        },
    )


def _noise(frame: pd.DataFrame, name: str) -> None:
    st.header("Noise by week")
    if frame.empty:
        st.caption("No result of this machine has quartiles.")
        return
    st.caption("Half the distance between the quartiles of a result; of a week the median result.")
    if len(frame) > ONE_WEEK:
        draw(
            machine_charts.noise(frame),
            description=f"Noise of {name} in {len(frame)} weeks",
            name=f"noise-{name}",
        )
    st.dataframe(
        frame.drop(columns=["machine"]),
        hide_index=True,
        column_config={
            "week": st.column_config.DateColumn("Week of"),
            "noise_pct": st.column_config.NumberColumn("Spread (%)", format="%.3f"),
            "results": "Results",
        },
    )
