"""What is stored as a whole: counts, machines, commits and all findings."""

import datetime as dt
from dataclasses import dataclass

import pandas as pd
from sqlalchemy import ColumnElement, exists, func, or_, select
from sqlalchemy.orm import Session

from db.columns import AlertState, Direction
from db.frames import frame_of, with_names
from db.models import (
    Alert,
    Benchmark,
    ChangePoint,
    Commit,
    Machine,
    Metric,
    Result,
    Revision,
    Run,
    Series,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A stored change point with what a reader needs to judge it."""

    series_id: int
    benchmark: str
    params: str
    machine: str
    commit: str
    commit_date: dt.datetime
    subject: str | None
    before: float
    after: float
    unit: str
    relative_change: float
    is_regression: bool
    cause: str
    alert_state: str | None
    position: int | None  # of the commit among those of its source; None: only its date is known


@dataclass(frozen=True, slots=True)
class Overview:
    """How much is stored, and all that was found, the newest first."""

    runs: int
    commits: int
    machines: int
    series: int
    results: int
    last_ingestion: dt.datetime | None
    findings: tuple[Finding, ...]


def machines(session: Session) -> pd.DataFrame:
    """List the machines with what is known of each and how much it measured."""
    rows = session.execute(
        select(
            Machine.name,
            Machine.arch,
            Machine.cpu,
            Machine.num_cpu,
            Machine.os,
            Machine.ram,
            func.count(Run.id),
            func.count(func.distinct(Run.commit_id)),
            func.max(Run.ingested_at),
        )
        .outerjoin(Run, Run.machine_id == Machine.id)
        .group_by(Machine.id)
        .order_by(Machine.name)
    ).all()
    columns = (
        "machine",
        "arch",
        "cpu",
        "num_cpu",
        "os",
        "ram",
        "runs",
        "commits",
        "last_ingestion",
    )
    return frame_of(rows, columns)


def commits(session: Session, machine: str | None = None) -> pd.DataFrame:
    """List the commits with results, newest first."""
    query = select(
        Commit.sha,
        Commit.committed_at,
        Commit.subject,
        Commit.branch,
        Commit.external,
        Commit.order_basis,
        Commit.position,
    )
    measured = exists().where(Run.commit_id == Commit.id)
    if machine is not None:
        measured = measured.where(Run.machine_id == Machine.id, Machine.name == machine)
    rows = session.execute(
        query.where(measured).order_by(Commit.committed_at.desc(), Commit.position.desc())
    ).all()
    columns = ("commit", "commit_date", "subject", "branch", "external", "order_basis", "position")
    frame = frame_of(rows, columns)
    frame["order_basis"] = frame["order_basis"].astype(str)
    return frame


def overview(session: Session) -> Overview:
    """Count what is stored and list what was found."""

    def count(table: type[Run | Commit | Machine | Series | Result]) -> int:
        return session.scalar(select(func.count()).select_from(table)) or 0

    return Overview(
        runs=count(Run),
        commits=count(Commit),
        machines=count(Machine),
        series=count(Series),
        results=count(Result),
        last_ingestion=session.scalar(
            select(func.max(Revision.created_at)).where(Revision.kind == "ingest")
        ),
        findings=_findings(session),
    )


def still_found() -> ColumnElement[bool]:
    """Leave out what stays for an alert's history alone; a term beside an outer join of alerts."""
    return or_(Alert.state.is_(None), Alert.state != AlertState.WITHDRAWN)


def _findings(session: Session) -> tuple[Finding, ...]:
    rows = session.execute(
        with_names(
            select(
                Series.id,
                Benchmark.name,
                Series.params,
                Machine.name,
                Commit.sha,
                Commit.committed_at,
                Commit.subject,
                ChangePoint.before,
                ChangePoint.after,
                Metric.unit,
                ChangePoint.relative_change,
                (ChangePoint.after > ChangePoint.before) == (Metric.direction == Direction.LOWER),
                ChangePoint.cause,
                Alert.state,
                Commit.position,
            )
        )
        .join(ChangePoint, ChangePoint.series_id == Series.id)
        .join(Commit, Commit.id == ChangePoint.commit_id)
        .outerjoin(Alert, Alert.change_point_id == ChangePoint.id)
        # So that a database begins there: it would else look at every commit for every series.
        .where(ChangePoint.id.in_(select(ChangePoint.id)), still_found())
        .order_by(Commit.committed_at.desc(), ChangePoint.id)
    ).all()
    return tuple(Finding(*row) for row in rows)
