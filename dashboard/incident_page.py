"""Incident: times against their floors, the counter that misled, and the status of each claim."""

from collections.abc import Sequence
from typing import Final

import pandas as pd
import streamlit as st

from dashboard import incident_charts
from dashboard.data import Source
from dashboard.diagnose_frames import cases_table
from dashboard.drawing import draw_whole
from dashboard.evidence_view import show_claim, show_counters
from dashboard.folded import folded_table
from dashboard.incident_frames import cases_over_context, telling_cases
from dashboard.series_view import commit_labels
from dashboard.theme import CLAIM_BADGES
from dashboard.units import commit_text
from dashboard.url_filters import UrlFilters, url_filters
from dashboard.words import case_name, count_text, escaped
from db.evidence import CaseDiagnosis, Diagnosis, Evidence, EvidencePoint
from db.numbers import digits
from db.reproduction import SideBySide

# Machines under this label repeated the incident's attention with their own telemetry.
REPRODUCTION_MACHINES: Final = "h200"
REPRODUCTION_SUITE: Final = "attention."
MOST_RUNS: Final = 3
MOST_COMMITS: Final = 4
BESIDE_COLUMNS: Final = (2.0, 3.0, 3.0)


def render(source: Source) -> None:
    """Show the page."""
    st.title("Incident")
    table = source.machines()
    machines = table[table["commits"] > 0]["machine"].tolist()
    if not machines:
        st.info(
            "No recording yet: `ddtree-bench ingest benchmarks/recorded` reads the original one.",
            icon=":material/inbox:",
        )
        return
    beside = source.incident()
    with url_filters("incident") as filters:
        machine, commit = _picked(filters, source, machines)
        found = source.diagnoses(machine, commit)
        if not found:
            st.info(
                f"No telemetry of {escaped(machine)} belongs to this commit: nothing to diagnose. "
                "Choose another recording above.",
                icon=":material/sensors_off:",
            )
        for place, (evidence, diagnosis) in enumerate(found[:MOST_RUNS]):
            _recording(evidence, diagnosis, place)
        if len(found) > MOST_RUNS:
            st.caption(f"The newest {MOST_RUNS} of {len(found)} runs of this commit are shown.")
    if beside is not None:
        _beside(beside)
    _reproduction(source, [name for name in machines if name != machine])


def _picked(filters: UrlFilters, source: Source, machines: Sequence[str]) -> tuple[str, str]:
    """Ask for a recording; one that was made elsewhere is what this page is about."""
    commits = {name: source.machine_commits(name) for name in machines}
    external = [name for name, table in commits.items() if table["external"].any()]
    left, right = st.columns(2)
    with left:
        machine = filters.one("Machine", "machine", machines, default=[*external, *machines][0])
    hashes = commits[machine]["commit"].tolist()
    with right:
        return machine, filters.one(
            "Commit", "commit", hashes, default=hashes[0], labels=commit_labels(commits[machine])
        )


def _recording(evidence: Evidence, diagnosis: Diagnosis, place: int) -> None:
    st.header(escaped(evidence.gpu or evidence.label), divider="gray")
    st.caption(escaped(evidence.label))
    for claim in diagnosis.alarms[:1]:
        st.error(escaped(claim.statement), icon=":material/warning:")
    telling = telling_cases(evidence, diagnosis)[:1]
    for point, case in telling:
        _numbers(point, case, evidence.power_limit_w)
    left, right = st.columns([3, 2], gap="large")
    with left:
        st.subheader("Times against the KV-read floor")
        _times(evidence, cases_over_context(diagnosis, only_kv=True), only_kv=True)
    with right:
        st.subheader("The counter that misled")
        show_counters(evidence, telling)
    st.subheader("What is known, and how well")
    for claim in sorted(diagnosis.claims, key=lambda claim: not claim.is_alarm):
        show_claim(claim)
    folded_table("Cases as a table", cases_table(diagnosis.cases), key=f"incident.cases.{place}")


def _numbers(point: EvidencePoint, case: CaseDiagnosis, power_limit_w: float | None) -> None:
    limit = "limit not recorded" if power_limit_w is None else f"of {power_limit_w:g} W"
    known = (
        ("Time", f"{digits(case.time_ms, 4)} ms", count_text(case.n, "sample")),
        ("Effective rate", _number(case.effective_gb_s, "GB/s"), case.bytes_basis),
        ("Above the KV-read floor", _number(case.kv_floor_ratio, "\N{MULTIPLICATION SIGN}"), None),
        (
            "Of peak bandwidth",
            _number(None if case.fraction_of_peak is None else 100 * case.fraction_of_peak, "%"),
            None,
        ),
        ("Power", _number(point.counters.get("power_w"), "W"), limit),
    )
    st.caption(escaped(f"Measured in {case_name(case.benchmark, case.params)}:"))
    for column, (label, value, detail) in zip(st.columns(len(known)), known, strict=True):
        column.metric(
            label,
            value,
            delta=detail,
            delta_color="off",
            delta_arrow="off",
            border=True,
            height="stretch",
        )


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "not known"
    gap = "" if unit == "\N{MULTIPLICATION SIGN}" else " "
    return f"{digits(value, 3)}{gap}{unit}"


def _times(evidence: Evidence, cases: pd.DataFrame, *, only_kv: bool) -> None:
    if cases.empty:
        st.caption("No case of this recording has a context length.")
        return
    rate = evidence.ceilings.read_bytes_per_s
    what = "KV-read floor" if only_kv else "floor"
    against = "" if rate is None else f" at {rate / 1e12:.3g} TB/s ({evidence.peak_source})"
    draw_whole(
        incident_charts.times_over_context(cases, floor_name=f"{what}{against}"),
        description=f"Time over context against the {what}, {evidence.label}",
        name=f"times-{evidence.label}",
        table=cases,
    )


def _beside(found: SideBySide) -> None:
    """Lay the incident beside the run that repeated it: what was measured, and what is known."""
    st.header("The incident beside its reproduction", divider="gray")
    for side, said in found.sources:
        st.caption(f"**{side}**: {escaped(said)}")
    titles = {"original": "original", "repeated": "repeated", "fast": "the fast kernel there"}
    for title, lines, more in (
        ("What was measured", found.measured, {}),
        ("Counters", found.counters, {"alone": "taken alone", "worth": "worth"}),
    ):
        st.subheader(title)
        table = pd.DataFrame(
            [
                {"": line.what, **{shown: getattr(line, name) for name, shown in columns.items()}}
                for columns in [titles | more]
                for line in lines
            ]
        )
        st.table(table.map(escaped).set_index(""))
    st.subheader("What is known of either")
    for one in found.known:
        what, original, repeated = st.columns(BESIDE_COLUMNS)
        what.markdown(f"**{escaped(one.what)}**")
        for column, side, status, said in (
            (original, "original", one.original, one.original_says),
            (repeated, "repeated", one.repeated, one.repeated_says),
        ):
            # With its side, because a narrow window lays the columns below each other.
            column.badge(f"{side}: {status}", color=CLAIM_BADGES[status])
            column.caption(escaped(said))
    for line in found.summary:
        st.markdown(f"- {escaped(line)}")


def _reproduction(source: Source, machines: Sequence[str]) -> None:
    """Show the newest recording in which a machine that repeated the incident varied attention."""
    for machine in machines:
        if not machine.lower().startswith(REPRODUCTION_MACHINES):
            continue
        for commit in source.machine_commits(machine)["commit"].head(MOST_COMMITS):
            shown = [
                _repeated(machine, commit, evidence, diagnosis)
                for evidence, diagnosis in source.diagnoses(machine, commit)[:MOST_RUNS]
            ]
            if any(shown):
                return


def _repeated(machine: str, commit: str, evidence: Evidence, diagnosis: Diagnosis) -> bool:
    """Show a run of several kinds of attention; one kind alone repeats nothing."""
    cases = cases_over_context(diagnosis, prefix=REPRODUCTION_SUITE)
    if cases.empty or len(cases["series"].unique()) < 2:
        return False
    st.header(f"Reproduced on {escaped(evidence.gpu or machine)}", divider="gray")
    benchmarks = sorted(
        {
            case.benchmark
            for case in diagnosis.cases
            if case.benchmark.startswith(REPRODUCTION_SUITE)
        }
    )
    st.caption(escaped(f"{', '.join(benchmarks)} on {machine}, commit {commit_text(commit)}"))
    _times(evidence, cases, only_kv=False)
    telling = telling_cases(evidence, diagnosis, prefix=REPRODUCTION_SUITE)
    # The series farthest from its floor and the one nearest to it.
    show_counters(evidence, telling if len(telling) <= 2 else [telling[0], telling[-1]])
    return True
