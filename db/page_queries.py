"""What single pages read beside `db.queries`: age, samples, noise, telemetry."""

import datetime as dt
from typing import Any

import pandas as pd
from sqlalchemy import and_, exists, func, select
from sqlalchemy.orm import Session

from db.counted import counts
from db.counters import CAPPED
from db.frames import AnySelect, frame_of
from db.labels import environment_label
from db.models import (
    Commit,
    Machine,
    Result,
    Revision,
    Run,
    Runner,
    RunnerEnvironment,
    Sample,
    Series,
    Window,
    WindowCounter,
)
from db.session import chunks

ENVIRONMENT_COLUMNS = ("machine", "environment", "first", "last", "windows")
FRESHNESS_COLUMNS = ("machine", "series", "stale", "last_date")
HEALTH_COLUMNS = ("machine", "last_result", "noise_pct", "throttled_pct")
NOISE_COLUMNS = ("machine", "week", "noise_pct", "results")
WINDOW_COLUMNS = ("window_id", "machine", "at", "benchmark", "seconds", "validity")
MOST_WINDOWS = 2_000  # the newest ones are drawn
MOST_NOISY = 20_000  # results, the newest ones, from which noise is told
MOST_OF_LATE = 500  # results and windows that tell how a machine is now


def newest_change(session: Session) -> dt.datetime | None:
    """Say when the data changed last; None where there is none."""
    return session.scalar(select(func.max(Revision.created_at)))


def freshness(session: Session) -> pd.DataFrame:
    """Count each machine's series, and those of them without a result on its newest commit."""
    has_results = exists().where(Result.series_id == Series.id, counts())
    query = select(Machine.id, Machine.name, func.count(Series.id)).join(
        Series, Series.machine_id == Machine.id
    )
    rows = []
    for machine_id, name, total in session.execute(
        query.where(has_results).group_by(Machine.id).order_by(Machine.name)
    ):
        newest = _newest_commit(session, machine_id)
        fresh = session.scalar(
            _results_of(machine_id, func.count(Result.series_id.distinct())).where(
                Commit.committed_at == newest
            )
        )
        rows.append((name, total, total - (fresh or 0), newest))
    return pd.DataFrame(rows, columns=list(FRESHNESS_COLUMNS))


def _newest_commit(session: Session, machine_id: int) -> dt.datetime | None:
    """Give the date of the newest commit of which a result of the machine counts.

    Commit by commit, because nearly always the first one has it: a machine has a million results.
    """
    measured = (
        select(Commit.committed_at, Commit.id)
        .where(exists().where(Run.commit_id == Commit.id, Run.machine_id == machine_id))
        .order_by(Commit.committed_at.desc())
    )
    for at, commit_id in session.execute(measured).all():
        of_it = _results_of(machine_id, Result.id).where(Result.commit_id == commit_id)
        if session.scalar(of_it.limit(1)) is not None:
            return at
    return None


def _results_of(machine_id: int, what: Any) -> AnySelect:  # noqa: ANN401 - a column or an aggregate
    return (
        select(what)
        .select_from(Result)
        .join(Commit, Commit.id == Result.commit_id)
        .join(Series, Series.id == Result.series_id)
        .where(Series.machine_id == machine_id, counts())
    )


def samples(session: Session, result_id: int) -> list[float]:
    """Give the recorded samples of a result in their order, in the metric's unit."""
    query = select(Sample.value).where(Sample.result_id == result_id).order_by(Sample.position)
    return list(session.scalars(query))


def environments(session: Session) -> pd.DataFrame:
    """List the environments of each machine with when telemetry was read under each."""
    query = (
        select(
            Machine.name,
            RunnerEnvironment,
            Runner,
            func.min(Window.started_at_s),
            func.max(Window.started_at_s),
            func.count(Window.id),
        )
        .join(Runner, Runner.id == RunnerEnvironment.runner_id)
        .join(Machine, Machine.id == Runner.machine_id)
        .outerjoin(Window, Window.runner_environment_id == RunnerEnvironment.id)
        .group_by(Machine.name, RunnerEnvironment.id, Runner.id)
        .order_by(Machine.name, func.min(Window.started_at_s), RunnerEnvironment.id)
    )
    rows = [
        (machine, environment_label(runner, environment), first, last, count)
        for machine, environment, runner, first, last, count in session.execute(query)
    ]
    frame = pd.DataFrame(rows, columns=list(ENVIRONMENT_COLUMNS))
    for name in ("first", "last"):
        frame[name] = pd.to_datetime(frame[name].astype(float), unit="s", utc=True)
    return frame


def health(session: Session) -> pd.DataFrame:
    """Say of each machine when it measured last, how noisy it is of late, and how often throttled.

    Throttled is the share of its newest windows in which a clock was held down; nothing is said of
    machines without windows.
    """
    rows = []
    for machine in session.scalars(select(Machine.name).order_by(Machine.name)):
        spreads = _spreads(session, machine, MOST_OF_LATE)
        codes = session.scalars(
            select(Window.validity)
            .join(Result, Result.id == Window.result_id)
            .join(Run, Run.id == Result.run_id)
            .join(Machine, and_(Machine.id == Run.machine_id, Machine.name == machine))
            .order_by(Window.started_at_s.desc())
            .limit(MOST_OF_LATE)
        ).all()
        throttled = [100.0 * (CAPPED in one) for one in codes]
        share = sum(throttled) / len(throttled) if throttled else None
        rows.append((machine, _last_at(session, machine), spreads["noise_pct"].median(), share))
    return pd.DataFrame(rows, columns=list(HEALTH_COLUMNS))


def _last_at(session: Session, machine: str) -> dt.datetime | None:
    """Give when a machine measured last: when its newest result began, or its commit was made."""
    query = (
        select(Result.started_at_ms, Commit.committed_at)
        .join(Run, Run.id == Result.run_id)
        .join(Commit, Commit.id == Result.commit_id)
        .join(Machine, and_(Machine.id == Run.machine_id, Machine.name == machine))
        .order_by(Result.id.desc())
        .limit(1)
    )
    for started_ms, committed_at in session.execute(query):
        return (
            committed_at
            if started_ms is None
            else dt.datetime.fromtimestamp(started_ms / 1e3, dt.UTC)
        )
    return None


def noise_by_week(session: Session, machine: str) -> pd.DataFrame:
    """Give the median spread of a machine's results for each week in which it measured.

    Half the distance between the quartiles over the median, in percent; of a week's results the
    median, so that one noisy case is not the machine.
    """
    frame = _spreads(session, machine, MOST_NOISY)
    at = frame["at"]
    frame["week"] = at.dt.floor("D") - pd.to_timedelta(at.dt.day_of_week, unit="D")
    found = frame.groupby("week")["noise_pct"].agg(["median", "size"]).reset_index()
    found.columns = pd.Index(["week", "noise_pct", "results"])
    return found.assign(machine=machine)[list(NOISE_COLUMNS)]


def _spreads(session: Session, machine: str, most: int) -> pd.DataFrame:
    """Give when the newest results of a machine were measured, and their spreads."""
    query = (
        select(Commit.committed_at, Result.started_at_ms, Result.value, Result.q25, Result.q75)
        .join(Run, Run.id == Result.run_id)
        .join(Commit, Commit.id == Result.commit_id)
        .join(Machine, and_(Machine.id == Run.machine_id, Machine.name == machine))
        .where(counts(), Result.q25.is_not(None), Result.q75.is_not(None), Result.value > 0)
        .order_by(Result.id.desc())
        .limit(most)
    )
    rows = session.execute(query).all()
    names = ["committed", "started", "value", "q25", "q75"]
    frame = pd.DataFrame([tuple(row) for row in rows], columns=names)
    started = pd.to_datetime(frame["started"].astype(float), unit="ms", utc=True)
    frame["at"] = started.fillna(pd.to_datetime(frame["committed"], utc=True))
    frame["noise_pct"] = 50.0 * (frame["q75"] - frame["q25"]) / frame["value"]
    return frame[["at", "noise_pct"]]


def telemetry(session: Session, machine: str) -> pd.DataFrame:
    """Give the newest windows of a machine, oldest first, with the medians of their counters."""
    query = (
        select(
            Window.id,
            Machine.name,
            Window.started_at_s,
            Window.benchmark,
            Window.median_s,
            Window.validity,
        )
        .join(Result, Result.id == Window.result_id)
        .join(Series, Series.id == Result.series_id)
        .join(Machine, Machine.id == Series.machine_id)
        .where(Machine.name == machine)
        .order_by(Window.started_at_s.desc())
        .limit(MOST_WINDOWS)
    )
    frame = frame_of(session.execute(query).all(), WINDOW_COLUMNS).iloc[::-1]
    frame["at"] = pd.to_datetime(frame["at"].astype(float), unit="s", utc=True)
    medians = [
        row
        for some in chunks([int(one) for one in frame["window_id"]])
        for row in session.execute(
            select(WindowCounter.window_id, WindowCounter.name, WindowCounter.median).where(
                WindowCounter.window_id.in_(some)
            )
        )
    ]
    wide = pd.DataFrame(
        [tuple(row) for row in medians], columns=["window_id", "name", "median"]
    ).pivot_table(index="window_id", columns="name", values="median")
    return frame.join(wide, on="window_id").reset_index(drop=True)
