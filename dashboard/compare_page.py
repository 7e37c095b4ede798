"""Compare: two commits case by case, what moved together, and where among the parameters."""

from collections.abc import Sequence
from functools import partial
from typing import Final

import pandas as pd
import streamlit as st

from dashboard import compare_charts, compare_frames
from dashboard.data import Source
from dashboard.downloads import offer
from dashboard.drawing import draw
from dashboard.evidence_view import list_claims
from dashboard.folded import folded
from dashboard.series_view import commit_labels
from dashboard.units import commit_text
from dashboard.url_filters import UrlFilters, url_filters
from dashboard.verdicts import headline, is_screened, told
from dashboard.words import count_text, escaped, heads
from db.change_queries import ExplainedCases
from db.compare import SEVERITY, CaseComparison, Comparison, Verdict
from db.errors import UnknownCommitError
from db.numbers import MISSING

MERGE_BASE: Final = "merge-base"
ALL_MACHINES: Final = "all"
MOST_MAPS: Final = 6
_GRAVE: Final = frozenset({Verdict.REGRESSION, Verdict.FAILED, Verdict.REMOVED})
_PERCENT: Final = {
    "change_pct": "Change (%)",
    "low_pct": "From (%)",
    "high_pct": "To (%)",
    "noise_pct": "Noise (%)",
}


def render(source: Source) -> None:
    """Show the page."""
    st.title("Compare")
    commits = source.commits()
    if commits.empty:
        st.info(
            "No commit has results yet: `ddtree-bench ingest PATH` reads any tree of asv results.",
            icon=":material/inbox:",
        )
        return
    with url_filters("compare") as filters:
        with st.container(border=True):
            picked = _picked(filters, source)
        if picked is None:
            return
        machine, base, head = picked
        found, moved = source.comparison(base, head, machine)
        with st.container(key="answer"):
            _verdict(found)
            _first(found)
        _moved(moved)
        cases = _filtered(filters, found.cases)
        if not cases:
            st.caption("No case fits these filters.")
            return
        name = f"compare-{commit_text(base)}-{commit_text(head)}"
        folded(
            f"{count_text(len(cases), 'case')}: table, intervals and maps",
            partial(_cases, cases, found, name),
            icon=":material/table:",
            key="compare.cases",
            is_open=len(cases) < len(found.cases),
        )


def _picked(filters: UrlFilters, source: Source) -> tuple[str | None, str, str] | None:
    """Ask for two commits; None where there are not two."""
    machines = source.machines()
    measured = machines[machines["commits"] > 0]["machine"].tolist()
    newest = machines.sort_values(["commits", "last_ingestion"], ascending=False)["machine"].iloc[0]
    first, second, third = st.columns([2, 3, 3])
    with first:
        machine = filters.one("Machine", "machine", [ALL_MACHINES, *measured], default=newest)
    commits = source.commits() if machine == ALL_MACHINES else source.machine_commits(machine)
    hashes, labels = commits["commit"].tolist(), commit_labels(commits)
    if len(hashes) < 2:
        st.info(
            f"Only one commit has results on {escaped(machine)}: there is nothing to compare it "
            "with until a second one is measured.",
            icon=":material/looks_one:",
        )
        return None
    with third:
        head = filters.one("Contender", "head", hashes, default=hashes[0], labels=labels)
    # The commit before the contender, of the oldest one the commit after it.
    place = hashes.index(head)
    before = hashes[place + 1] if place + 1 < len(hashes) else hashes[place - 1]
    with second:
        base = filters.one(
            "Baseline",
            "base",
            [MERGE_BASE, *hashes],
            default=before,
            labels={MERGE_BASE: "merge base with the main branch", **labels},
        )
    if base == MERGE_BASE:
        try:
            base = source.merge_base(head)
        except UnknownCommitError as error:
            st.warning(escaped(str(error)), icon=":material/fork_right:")
            return None
        st.caption(f"The merge base is `{commit_text(base)}`.")
    return (None if machine == ALL_MACHINES else machine), base, head


def _verdict(found: Comparison) -> None:
    text = headline(found)
    if found.verdict in _GRAVE:
        st.error(f"**{text}**", icon=":material/trending_up:")
    elif found.verdict in {Verdict.IMPROVEMENT, Verdict.NO_CHANGE}:
        st.success(f"**{text}**", icon=":material/check_circle:")
    else:
        st.info(f"**{text}**", icon=":material/help:")
    if is_screened(found):
        st.caption(
            "Screened by the stored results. `ddtree-bench confirm` decides on fresh runs in turns."
        )
    if found.environment_differs:
        st.warning(
            "Some cases ran under another environment on either side: their change may be the "
            "runner's.",
            icon=":material/dns:",
        )


def _first(found: Comparison) -> None:
    """Name the gravest cases as text, which a browser shows before it has the code of a table."""
    for verdict in compare_frames.NAMED:
        if line := compare_frames.names_line(found.cases, verdict):
            st.markdown(line)
    gravest = compare_frames.gravest(found.cases)
    if not gravest:
        return
    st.markdown(compare_frames.lines(gravest))
    num_told = sum(found.counts.get(verdict, 0) for verdict in compare_frames.NUMBERED)
    if num_told > len(gravest):
        st.caption(f"{len(gravest)} of {num_told:,}, the largest of each verdict; all stand below.")


def _moved(moved: Sequence[ExplainedCases]) -> None:
    if not moved:
        return
    st.header("What moved together")
    for place, one in enumerate(moved):
        with st.container(border=True):
            st.markdown(f"**{escaped(told(one.moved))}**")
            if one.summary:
                st.markdown(escaped(one.summary))
            label = f"{count_text(len(one.moved.cases), 'case')}, and what is known"
            known = partial(_known, one)
            folded(label, known, icon=":material/list:", key=f"compare.moved.{place}")


def _known(one: ExplainedCases) -> None:
    list_claims(one.claims, evidence=True)
    st.dataframe(pd.DataFrame({"case": list(one.moved.cases)}), hide_index=True)


def _filtered(filters: UrlFilters, cases: Sequence[CaseComparison]) -> list[CaseComparison]:
    st.header("Cases")
    present = {case.verdict for case in cases}
    left, right = st.columns(2)
    with left:
        verdicts = filters.many(
            "Verdicts", "verdict", [one.value for one in SEVERITY if one in present]
        )
    with right:
        benchmarks = filters.many(
            "Benchmarks", "benchmark", sorted({case.key.benchmark for case in cases})
        )
    return [
        case
        for case in cases
        if (not verdicts or case.verdict.value in verdicts)
        and (not benchmarks or case.key.benchmark in benchmarks)
    ]


def _cases(cases: Sequence[CaseComparison], found: Comparison, name: str) -> None:
    table = compare_frames.table_of(cases)
    number = st.column_config.NumberColumn
    st.dataframe(
        table,
        hide_index=True,
        placeholder=MISSING,
        column_config={
            **heads(table),
            **{column: number(label, format="%+.2f") for column, label in _PERCENT.items()},
            "noise_pct": number("Noise (%)", format="%.2f"),
            "n_before": number("Samples before"),
            "n_after": number("Samples after"),
            "why": st.column_config.TextColumn("Why", width="large"),
        },
    )
    offer(name, table)
    _charts(cases, found, name)


def _charts(cases: Sequence[CaseComparison], found: Comparison, name: str) -> None:
    frame = compare_frames.intervals(cases)
    if not frame.empty:
        st.subheader("Changes with their intervals")
        st.caption(
            "The gravest first. Grey bars are the noise of each series; dashed rules are where a "
            "change becomes worth acting on."
        )
        draw(
            compare_charts.intervals(frame, relevance_pct=100 * found.policy.relevance_rel),
            description=f"Relative changes of {count_text(len(frame), 'case')} with intervals",
            name=f"{name}-intervals",
        )
    maps = compare_frames.heat_maps(cases)
    if maps:
        st.subheader("Where the changes lie")
        st.caption("Every cell is a case of the table above, with the sign of its verdict.")
    for place, one in enumerate(maps[:MOST_MAPS]):
        st.markdown(f"**{escaped(one.title)}**")
        draw(
            compare_charts.heat_map(one),
            description=f"Changes of {one.title} over {one.across} and {one.down}",
            name=f"{name}-map-{place}",
        )
    if len(maps) > MOST_MAPS:
        st.caption(f"The first {MOST_MAPS} of {len(maps)} maps: filter by benchmark for others.")
