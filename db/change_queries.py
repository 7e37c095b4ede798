"""What stored telemetry says of a change: of the findings of a comparison, and of one alert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from db.alerts import in_order
from db.changes import change_claims, likely_cause, summary
from db.counted import counts
from db.models import Commit, Result, Series
from db.moved_cases import findings
from db.window_queries import evidence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.orm import Session

    from db.alert_queries import AlertView
    from db.cases import Comparison
    from db.evidence import Claim, Evidence
    from db.moved_cases import MovedCases


@dataclass(frozen=True, slots=True)
class ExplainedCases:
    """Cases that moved together, and what was recorded to have changed with them."""

    moved: MovedCases
    claims: tuple[Claim, ...]

    @property
    def summary(self) -> str:
        """What moved and what did not; empty where nothing was recorded."""
        return summary(self.claims)

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        claims = [claim.to_dict() for claim in self.claims]
        return {**self.moved.to_dict(), "summary": self.summary, "changes": claims}


def explained(
    session: Session, base: str, head: str, comparison: Comparison
) -> list[ExplainedCases]:
    """Group the flagged cases of two commits, and say of each group what changed with it."""
    found = []
    grouped = findings(comparison)
    runs = {
        machine: [_runs(session, commit, machine) for commit in (base, head)]
        for machine in {moved.machine for moved in grouped}
    }
    for moved in grouped:
        before, after = runs[moved.machine]
        claims = tuple(_claims(before, after, moved.cases))
        found.append(
            ExplainedCases(replace(moved, cause=likely_cause(moved.cause, claims)), claims)
        )
    return found


def explained_alert(session: Session, view: AlertView) -> tuple[Claim, ...]:
    """Say what changed at an alert's commit against the one before it that has the case."""
    before = commit_before(session, view)
    if before is None:
        return ()
    old, new = (_runs(session, commit, view.machine) for commit in (before, view.commit))
    return tuple(_claims(old, new, [view.case]))


def _claims(
    before: Sequence[Evidence], after: Sequence[Evidence], cases: Sequence[str]
) -> list[Claim]:
    """Hold the newest runs that measured the first of the cases against each other."""
    newest = [
        next((run for run in side if any(point.name == cases[0] for point in run.points)), None)
        for side in (before, after)
    ]
    old, new = newest
    return [] if old is None or new is None else change_claims(old, new, frozenset(cases))


def _runs(session: Session, commit: str, machine: str) -> list[Evidence]:
    return evidence(session, commit=commit, machine=machine)


def commit_before(session: Session, view: AlertView) -> str | None:
    """Give the commit before an alert's that has the case, under whatever it declared."""
    line = session.get_one(Series, view.series_id)
    query = (
        select(Commit.sha, Commit.position, Commit.committed_at, Commit.branch)
        .join(Result, Result.commit_id == Commit.id)
        .join(Series, Series.id == Result.series_id)
        .where(
            Series.benchmark_id == line.benchmark_id,
            Series.params == line.params,
            Series.metric_id == line.metric_id,
            Series.machine_id == line.machine_id,
            counts(),
        )
        .distinct()
    )
    rows = session.execute(query).all()
    own = next((row for row in rows if row.sha == view.commit), None)
    if own is None:
        return None
    order = [row.sha for row in in_order([row for row in rows if row.branch == own.branch])]
    place = order.index(view.commit)
    return order[place - 1] if place else None
