"""What is stored as a whole: counts, machines, commits and the newest findings."""

import datetime as dt
from dataclasses import dataclass

import pandas as pd
from sqlalchemy import ColumnElement, exists, func, or_, select
from sqlalchemy.orm import Session

from db.columns import AlertState
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

NEWEST_FINDINGS = 50


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


@dataclass(frozen=True, slots=True)
class Overview:
    """How much is stored, and what was found last."""

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
    """Count what is stored and list the newest findings."""

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
    order = (Commit.committed_at.desc(), ChangePoint.id)
    # Chosen first: a database would else look for change points of every series at every commit.
    newest = (
        select(ChangePoint.id)
        .join(Commit, Commit.id == ChangePoint.commit_id)
        .outerjoin(Alert, Alert.change_point_id == ChangePoint.id)
        .where(still_found())
        .order_by(*order)
        .limit(NEWEST_FINDINGS)
    )
    rows = session.execute(
        with_names(select(ChangePoint, Series, Benchmark, Metric, Machine, Commit, Alert.state))
        .join(ChangePoint, ChangePoint.series_id == Series.id)
        .join(Commit, Commit.id == ChangePoint.commit_id)
        .outerjoin(Alert, Alert.change_point_id == ChangePoint.id)
        .where(ChangePoint.id.in_(newest))
        .order_by(*order)
    ).all()
    return tuple(
        Finding(
            series_id=line.id,
            benchmark=benchmark.name,
            params=line.params,
            machine=machine.name,
            commit=commit.sha,
            commit_date=commit.committed_at,
            subject=commit.subject,
            before=point.before,
            after=point.after,
            unit=metric.unit,
            relative_change=point.relative_change,
            is_regression=(point.after > point.before) == (metric.direction == "lower"),
            cause=point.cause,
            alert_state=None if state is None else str(state),
        )
        for point, line, benchmark, metric, machine, commit, state in rows
    )
