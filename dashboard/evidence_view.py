"""Evidence on a page: claims with their status, and counters with what each can say."""

from collections.abc import Sequence
from typing import Final

import pandas as pd
import streamlit as st

from dashboard import incident_charts
from dashboard.drawing import draw_whole
from dashboard.incident_frames import counter_readings, series_name
from dashboard.theme import CLAIM_BADGES
from dashboard.words import escaped, unit_text
from db.evidence import CaseDiagnosis, Claim, Evidence, EvidencePoint
from db.numbers import digits

COUNTER_MARKS: Final = {
    "misleads": ":red[:material/warning: misleads]",
    "evidence": ":blue[:material/check: evidence]",
}
CLAIM_COLUMNS: Final = (1.1, 4.4, 1.3, 3.2)


def show_counters(
    evidence: Evidence, telling: Sequence[tuple[EvidencePoint, CaseDiagnosis]]
) -> None:
    """Draw the counters of each case, and say once what each counter can and cannot say."""
    tables = [
        (case, counter_readings(point, case, evidence.power_limit_w))
        for point, case in telling
        if point.counters
    ]
    if not tables:
        st.caption("No counter was recorded.")
        return
    for slot, (case, readings) in zip(st.columns(len(tables), gap="large"), tables, strict=True):
        slot.markdown(f"**{escaped(series_name(case))}**")
        with slot:
            draw_whole(
                incident_charts.counters(readings),
                description=f"Counters of {series_name(case)} as shares of their greatest reading",
                name=f"counters-{evidence.label}-{series_name(case)}",
                table=readings,
            )
    meanings = pd.concat([readings for _, readings in tables]).drop_duplicates("counter")
    st.caption(
        "  \n".join(
            f"{COUNTER_MARKS[role]} **{counter}**: {escaped(meaning)}"
            for role, counter, meaning in zip(
                meanings["role"], meanings["counter"], meanings["meaning"], strict=True
            )
        )
    )


def show_claim(claim: Claim) -> None:
    """Show a claim with its status, its number and its evidence."""
    badge, statement, value, evidence = st.columns(CLAIM_COLUMNS, vertical_alignment="top")
    badge.badge(claim.status, color=CLAIM_BADGES[claim.status])
    statement.markdown(escaped(claim.statement))
    if claim.case:
        statement.caption(escaped(claim.case))
    value.markdown(f"**{digits(claim.value, 4)}** {escaped(unit_text(claim.value, claim.unit))}")
    evidence.caption(escaped(claim.evidence))


def list_claims(claims: Sequence[Claim], *, evidence: bool = False) -> None:
    """List claims with their status on a line each, with their evidence where it is asked for."""
    lines = [
        f"- :{CLAIM_BADGES[claim.status]}-badge[{claim.status}] {escaped(claim.statement)}"
        + (f"  \n  :gray[{escaped(claim.evidence)}]" if evidence else "")
        for claim in claims
    ]
    st.markdown("\n".join(lines))
