"""Overview: what got slower, since when and why; then what is stored and what is stale."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import streamlit as st

from dashboard import charts, overview_tables
from dashboard.data import Source
from dashboard.drawing import draw
from dashboard.findings import FindingGroup, group_findings, replaced, standing, verdict_line
from dashboard.folded import folded
from dashboard.freshness import local_text
from dashboard.series_view import view_of
from dashboard.units import change_text, commit_text, display_unit, p_value_text
from dashboard.words import case_name, count_text, escaped, heads, with_known_subjects
from db.queries import Finding, Overview

MOST_GROUPS = 5
MOST_LINES = 2
SPARKLINE_PX = 64
COUNT_PX = 160
MILLION = 1_000_000
# Widths of a finding's line: change, case, from and to, cause, picture, link.
LINE_COLUMNS = (1.2, 4.2, 2.0, 1.2, 2.2, 1.0)


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the findings lead."""

    history: st.Page
    compare: st.Page
    diagnose: st.Page
    machines: st.Page


def render(source: Source, pages: Pages) -> None:
    """Show the page; its findings link to the pages that tell more."""
    overview = source.overview()
    st.title("Overview")
    if not overview.results:
        st.info(
            "The database is empty: no result has been ingested yet. `ddtree-bench ingest PATH` "
            "reads any tree of asv results.",
            icon=":material/inbox:",
        )
        return
    _verdict(overview)
    _findings(source, overview.findings, pages)
    left, right = st.columns([3, 2], gap="large")
    with left:
        overview_tables.machines(source)
        st.page_link(
            pages.machines, label="Telemetry and noise of each machine", icon=":material/dns:"
        )
    with right:
        overview_tables.commits(source)
    _counts(overview)


def _verdict(overview: Overview) -> None:
    line = verdict_line(overview.findings)
    if line.is_alarming:
        st.error(line.text, icon=":material/trending_up:")
    elif overview.findings:
        st.success(line.text, icon=":material/check_circle:")
    else:
        st.info(line.text, icon=":material/info:")


def _counts(overview: Overview) -> None:
    counted = (
        ("Results", overview.results),
        ("Series", overview.series),
        ("Commits", overview.commits),
        ("Machines", overview.machines),
        ("Runs", overview.runs),
    )
    st.header("What is stored")
    with st.container(horizontal=True):  # as many beside each other as a window holds
        for label, count in counted:
            shown = f"{count:,}" if count < MILLION else f"{count / MILLION:.3g} M"
            st.metric(label, shown, border=True, width=COUNT_PX, help=f"{count:,}")
    if overview.last_ingestion is not None:
        st.caption(f"Last ingestion: {local_text(overview.last_ingestion)}")


def _findings(source: Source, findings: Sequence[Finding], pages: Pages) -> None:
    groups = group_findings(standing(findings))
    if not groups:
        return
    st.header("Findings")
    st.caption(
        "The latest level change of each series, by the first commit of the new level, the worst "
        "first. "
        "The cause is named as far as the recorded telemetry decides it."
    )
    for group in groups[:MOST_GROUPS]:
        with st.container(border=True):
            _group(source, group, pages)
    rest = [finding for group in groups[MOST_GROUPS:] for finding in group.findings]
    if rest:
        commits = count_text(len(groups) - MOST_GROUPS, "more commit")
        _listed(f"Findings at {commits}", rest, "rest")
    gone = replaced(findings)
    if gone:
        earlier = count_text(len(gone), "earlier finding")
        _listed(f"{earlier} in the same series", gone, "replaced")


def _listed(label: str, findings: Sequence[Finding], key: str) -> None:
    """Fold findings away as a table."""
    whole = partial(_table, findings)
    folded(label, whole, icon=":material/table:", key=f"overview.findings.{key}")


def _group(source: Source, group: FindingGroup, pages: Pages) -> None:
    subject = escaped(group.subject) if group.subject else ":gray[subject not known]"
    st.markdown(
        f"`{commit_text(group.commit)}` **{subject}** "
        f":gray[· {group.commit_date:%Y-%m-%d} · {group.summary}]"
    )
    machine = group.findings[0].machine
    with st.container(horizontal=True):
        st.page_link(
            pages.compare,
            label="All that moved at this commit",
            icon=":material/compare:",
            query_params={"machine": machine, "head": group.commit},
        )
        st.page_link(
            pages.diagnose,
            label="Why it is slow" if group.findings[0].is_regression else "Why it is faster",
            icon=":material/stethoscope:",
            query_params={"machine": machine, "commit": group.commit},
        )
    for finding in group.findings[:MOST_LINES]:
        _line(source, finding, pages)
    hidden = group.findings[MOST_LINES:]
    if hidden:
        _listed(f"{len(hidden)} more at this commit", hidden, group.commit)


def _line(source: Source, finding: Finding, pages: Pages) -> None:
    columns = st.columns(LINE_COLUMNS, vertical_alignment="center")
    change, case, levels, cause, picture, link = columns
    unit = display_unit(finding.unit, finding.after)
    changes = source.change_points(finding.series_id)
    stored = changes[changes["commit"] == finding.commit].iloc[0]
    colour = "red" if finding.is_regression else "green"
    arrow = "▲" if finding.relative_change > 0 else "▼"
    change.markdown(f"### :{colour}[{arrow} {change_text(finding.relative_change)}]")
    case.markdown(f"**{escaped(finding.benchmark)}**")
    state = f"alert {finding.alert_state}" if finding.alert_state else ""
    case.caption(escaped(" · ".join(filter(None, (finding.params, finding.machine, state)))))
    before, after = (escaped(unit.text(value)) for value in (finding.before, finding.after))
    levels.markdown(f"{before} → **{after}**")
    levels.caption(f"p {p_value_text(stored['p_value'])}")
    cause.badge(finding.cause, color="blue" if finding.cause == "code" else "gray")
    link.page_link(pages.history, label="History", query_params=source.history_query(finding))
    series = source.one_series(finding.series_id)
    if series is None:
        picture.caption("All its results were left out since.")
        return
    history = source.history(finding.series_id)
    view = view_of(series, history, height_px=SPARKLINE_PX)
    with picture:
        draw(
            charts.sparkline(history, changes, view),
            description=f"History of {case_name(finding.benchmark, finding.params)}",
            key=f"sparkline-{finding.series_id}-{finding.commit}",
        )


def _table(found: Sequence[Finding]) -> None:
    """Show findings as a table."""
    table = pd.DataFrame(
        {
            "change": [change_text(finding.relative_change) for finding in found],
            "benchmark": [finding.benchmark for finding in found],
            "params": [finding.params for finding in found],
            "machine": [finding.machine for finding in found],
            "cause": [finding.cause for finding in found],
            "commit": [commit_text(finding.commit) for finding in found],
            "date": [finding.commit_date.date() for finding in found],
            "subject": [finding.subject for finding in found],
        }
    )
    table = with_known_subjects(table)
    st.dataframe(table, hide_index=True, column_config=heads(table))
