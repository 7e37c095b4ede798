"""Diagnose: where the cases of a run stand against the machine, and what made a slow one slow."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import streamlit as st

from dashboard import diagnose_charts, diagnose_frames
from dashboard.data import Source
from dashboard.diagnose_frames import LINE, ROOFLINE
from dashboard.downloads import offer
from dashboard.drawing import draw
from dashboard.evidence_view import list_claims, show_claim, show_counters
from dashboard.findings import group_findings, standing
from dashboard.folded import folded, folded_table
from dashboard.incident_frames import telling_cases
from dashboard.series_view import commit_labels
from dashboard.units import change_text, display_unit
from dashboard.url_filters import UrlFilters, url_filters
from dashboard.words import case_name, count_text, escaped
from db.evidence import Claim, Diagnosis, Evidence, LadderReading

MOST_DISTANCES: Final = 25
MOST_COUNTERS: Final = 2
MOST_CLAIMS: Final = 16
MOST_CHANGES: Final = 5
_DRAWN: Final = "distance_from_floor"
_NOTHING: Final = (
    "No telemetry is stored yet: `ddtree-bench run` records it beside the results, and "
    "`ddtree-bench ingest PATH` reads it."
)


def render(source: Source) -> None:
    """Show the page."""
    st.title("Diagnose")
    table = source.machines()
    machines = table[table["commits"] > 0]["machine"].tolist()
    if not machines:
        st.info(_NOTHING, icon=":material/inbox:")
        return
    with url_filters("diagnose") as filters:
        with st.container(border=True):
            machine, commit = _picked(filters, source, machines)
        _changed(source, machine, commit)
        found = source.diagnoses(machine, commit)
        if not found:
            st.info(
                f"No telemetry of {escaped(machine)} belongs to this commit: neither floors nor "
                "counters are known. Choose another machine or commit above.",
                icon=":material/sensors_off:",
            )
            return
        evidence, diagnosis = _run(filters, found)
        name = f"diagnose-{machine}-{commit[:10]}"
        _alarms(evidence, diagnosis)
        _roofline(evidence, diagnosis, name)
        _distances(diagnosis, name)
        _lines(filters, evidence, diagnosis, name)
        _ladders(filters, diagnosis.ladder, name)
        _known(evidence, diagnosis, name)


def _picked(filters: UrlFilters, source: Source, machines: Sequence[str]) -> tuple[str, str]:
    """Ask for a machine and a commit; begin where telemetry was read last."""
    known = source.environments().dropna(subset=["last"]).sort_values("last")
    newest = [name for name in known["machine"].iloc[::-1] if name in machines]
    left, right = st.columns(2)
    with left:
        machine = filters.one("Machine", "machine", machines, default=[*newest, *machines][0])
    commits = source.machine_commits(machine)
    hashes = commits["commit"].tolist()
    with right:
        return machine, filters.one(
            "Commit", "commit", hashes, default=hashes[0], labels=commit_labels(commits)
        )


def _changed(source: Source, machine: str, commit: str) -> None:
    """Say which levels changed at the commit, and what was recorded to have changed with them."""
    findings = [
        one
        for one in standing(source.overview().findings)
        if (one.machine, one.commit) == (machine, commit)
    ]
    if not findings:
        return
    st.header("What changed at this commit")
    (group,) = group_findings(findings)
    st.markdown(f"**{escaped(group.subject or 'subject not known')}** · {group.summary}")
    for one in group.findings[:MOST_CHANGES]:
        unit = display_unit(one.unit, one.after)
        st.markdown(
            f"- **{change_text(one.relative_change)}** "
            f"{escaped(case_name(one.benchmark, one.params))}: {escaped(unit.text(one.before))} → "
            f"**{escaped(unit.text(one.after))}**, cause {escaped(one.cause)}"
        )
    if len(group.findings) > MOST_CHANGES:
        st.caption(f"The gravest {MOST_CHANGES} of {len(group.findings)}.")
    worst = group.findings[0]
    views = (view for view in source.alerts() if view.commit == commit)
    view = next((one for one in views if one.series_id == worst.series_id), None)
    claims = () if view is None else source.alert_claims(view)
    if claims:
        st.markdown("Against the commit before, as its telemetry has it:")
        list_claims(claims)


def _run(
    filters: UrlFilters, found: Sequence[tuple[Evidence, Diagnosis]]
) -> tuple[Evidence, Diagnosis]:
    """Ask which run of the commit is meant, where it has several; the newest is the first."""
    if len(found) == 1:
        return found[0]
    places = [str(place + 1) for place in range(len(found))]
    labels = {
        place: f"run {place} · {count_text(len(evidence.points), 'case')} of {_suites(evidence)}"
        for place, (evidence, _) in zip(places, found, strict=True)
    }
    place = filters.one("Run, newest first", "run", places, default=places[0], labels=labels)
    return found[int(place) - 1]


def _suites(evidence: Evidence) -> str:
    return ", ".join(sorted({point.benchmark.partition(".")[0] for point in evidence.points}))


def _alarms(evidence: Evidence, diagnosis: Diagnosis) -> None:
    known = (evidence.gpu or "no GPU", evidence.imposed or "environment not recorded")
    st.caption(escaped(f"{evidence.label} · {' · '.join(known)}"))
    if not diagnosis.alarms:
        st.success("Nothing in this run calls for action.", icon=":material/check_circle:")
    for claim in diagnosis.alarms[:1]:
        case = f"**{escaped(claim.case)}**: " if claim.case else ""
        st.error(f"{case}{escaped(claim.statement)}", icon=":material/warning:")


def _roofline(evidence: Evidence, diagnosis: Diagnosis, name: str) -> None:
    st.header("Roofline")
    cases = diagnose_frames.roofline_cases(evidence, diagnosis)
    if cases.empty:
        st.caption("No case of this run has both its bytes and its FLOP recorded.")
        return
    roof = diagnose_frames.roof(evidence, cases)
    basis = f"its {evidence.peak_source} ceilings" if len(roof) else "no ceiling is recorded"
    st.caption(
        f"Each case by the work of its bytes and its rate; the line is the machine: {basis}."
    )
    draw(
        diagnose_charts.roofline(cases, roof),
        description=f"Roofline of {count_text(len(cases), 'case')} of {evidence.label}",
        name=f"{name}-roofline",
    )
    folded_table("Roofline as a table", cases, key="diagnose.roofline", titles=ROOFLINE)


def _distances(diagnosis: Diagnosis, name: str) -> None:
    st.header("Distance from the floor")
    frame = diagnose_frames.distances(diagnosis, MOST_DISTANCES)
    if frame.empty:
        st.caption("No case of this run has a floor: its work or the ceilings are not recorded.")
    else:
        draw(
            diagnose_charts.distances(frame),
            description=f"Times over their floors, the farthest {count_text(len(frame), 'case')}",
            name=f"{name}-distances",
        )
    table = diagnose_frames.cases_table(diagnosis.cases)
    folded_table("Cases as a table", table, key="diagnose.cases")


def _lines(filters: UrlFilters, evidence: Evidence, diagnosis: Diagnosis, name: str) -> None:
    if not diagnosis.fits:
        return
    st.header("Time over context: t₀ + bytes / bandwidth")
    labels = [fit.label for fit in diagnosis.fits]
    longest = diagnosis.fit or diagnosis.fits[0]
    label = filters.one("Sweep", "sweep", labels, default=longest.label)
    fit = diagnosis.fits[labels.index(label)]
    if fit.refused is not None:
        st.caption(f":material/block: No line is laid through it: {escaped(fit.refused)}")
    cases = diagnose_frames.fitted_cases(evidence, fit)
    draw(
        diagnose_charts.line_over_bytes(cases, diagnose_frames.line_of(fit, cases)),
        description=f"Time over bytes of {label}",
        name=f"{name}-line",
    )
    folded_table("Points as a table", cases, key=f"diagnose.points.{label}", titles=LINE)
    lines = diagnose_frames.fits_table(diagnosis.fits)
    folded_table("All lines as a table, with intervals", lines, key="diagnose.lines")


def _ladders(filters: UrlFilters, readings: Sequence[LadderReading], name: str) -> None:
    if not readings:
        return
    st.header("The ladder: one factor at a time")
    found = diagnose_frames.ladders(readings)
    labels = [f"{label} at {context}" if context else label for label, context in found]
    chosen = filters.one("Ladder", "ladder", labels, default=labels[-1])
    key = found[labels.index(chosen)]
    own = [one for one in readings if (one.ladder, one.context_tokens) == key]
    steps = diagnose_frames.waterfall(own)
    three = diagnose_frames.three_readings(own)
    left, right = st.columns([3, 2], gap="large")
    with left:
        st.subheader("In the fixed order")
        if steps.empty:
            st.caption("This ladder has no reading in the fixed order.")
        else:
            draw(
                diagnose_charts.waterfall(steps),
                description=f"Times of {chosen} as each factor is added",
                name=f"{name}-ladder",
            )
    with right:
        st.subheader("Alone, in order, removed")
        draw(
            diagnose_charts.three_readings(three),
            description=f"What each factor of {chosen} is worth at its three places",
            name=f"{name}-ladder-readings",
        )
    folded_table("Readings as a table", three, key=f"diagnose.readings.{chosen}")


def _known(evidence: Evidence, diagnosis: Diagnosis, name: str) -> None:
    st.header("Counters, and what they can say")
    telling = [pair for pair in telling_cases(evidence, diagnosis) if pair[0].counters]
    show_counters(evidence, telling[:MOST_COUNTERS])
    st.header("What is known, and how well")
    st.caption("Distances stand in their chart above; everything is in the table below.")
    told = [claim for claim in diagnosis.claims if claim.name != _DRAWN]
    told.sort(key=lambda claim: not claim.is_alarm)
    same = Counter(claim.name for claim in told)
    first = {claim.name: claim for claim in reversed(told)}
    for claim in [one for one in told if first[one.name] is one][:MOST_CLAIMS]:
        show_claim(claim)
        if same[claim.name] > 1:
            more = same[claim.name] - 1
            others = count_text(more, "other case")
            each = "each with numbers" if more > 1 else "with numbers"
            st.caption(f"This is claimed of {others} as well, {each} of its own.")
    whole = partial(_claims, diagnosis.claims, name)
    claims = f"All {count_text(len(diagnosis.claims), 'claim')}"
    folded(claims, whole, icon=":material/table:", key="diagnose.claims")


def _claims(claims: Sequence[Claim], name: str) -> None:
    table = diagnose_frames.claims_table(claims)
    st.dataframe(table, hide_index=True)
    offer(f"{name}-claims", table)
