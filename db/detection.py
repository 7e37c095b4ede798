"""Change points of every stored series, found anew and stored in one transaction.

What is found again keeps its row and the time it was first seen; what is not found any more goes,
unless somebody was alerted to it.
"""

import datetime as dt
from collections import Counter
from dataclasses import asdict, dataclass

import pandas as pd
from sqlalchemy import Engine, exists, select
from sqlalchemy.orm import Session

from db.change_points import ChangePoint, detect
from db.models import Alert, Commit, Revision, Runner, RunnerEnvironment, Series, Window
from db.models import ChangePoint as StoredPoint
from db.queries import history
from db.session import writing
from db.window_queries import windows

CLOCKS = ("sm_clock_mhz", "memory_clock_mhz")  # counters that explain a change of the same ratio
FIELDS = ("before", "after", "relative_change", "p_value", "cause")


@dataclass(frozen=True, slots=True)
class DetectionReport:
    """What a pass over all series found, and what that changed."""

    series: int
    change_points: int
    new: int
    gone: int
    causes: dict[str, int]  # of the change points


def detect_all(engine: Engine) -> DetectionReport:
    """Look for change points in every series, and store them together or not at all."""
    now = dt.datetime.now(dt.UTC)
    causes: Counter[str] = Counter()
    with writing(engine) as connection, Session(bind=connection, autoflush=False) as session:
        ids = session.scalars(select(Series.id).order_by(Series.id)).all()
        for series_id in ids:
            points = _points(session, series_id)
            causes.update(point.cause for point in points.values())
            _store(session, series_id, points, now)
        changed = any(session.is_modified(row) for row in session.dirty)
        report = DetectionReport(
            series=len(ids),
            change_points=causes.total(),
            new=len(session.new),
            gone=len(session.deleted),
            causes=dict(causes),
        )
        if report.new or report.gone or changed:
            session.add(Revision(kind="detect", created_at=now, summary=asdict(report)))
        session.flush()
    return report


def _points(session: Session, series_id: int) -> dict[str, ChangePoint]:
    """Find the change points of a series by the commit that begins each level."""
    results = history(session, series_id, main_only=True)
    readings = _readings(session, series_id)
    clocks = readings.reindex(results["result_id"])[list(CLOCKS)]
    found = detect(
        results["value"].to_numpy(),
        spread=(results["q75"] - results["q25"]).to_numpy(),
        covariates={name: clocks[name].to_numpy(dtype=float) for name in CLOCKS},
        epochs=_known(results["environment"]),
        runners=_known(readings.reindex(results["result_id"])["runner"]),
    )
    commits = results["commit"].tolist()
    # Results of one commit may be apart; the first of them names the level.
    return {commits[point.index]: point for point in reversed(found)}


def _readings(session: Session, series_id: int) -> pd.DataFrame:
    """Give each result's clocks, the median over its windows, and the runner it ran on."""
    frame = windows(session, series_id=series_id).reindex(columns=["result_id", *CLOCKS])
    clocks = frame.astype(float).groupby("result_id").median()
    runners = dict(
        session.execute(
            select(Window.result_id, Runner.uid)
            .join(RunnerEnvironment, RunnerEnvironment.id == Window.runner_environment_id)
            .join(Runner, Runner.id == RunnerEnvironment.runner_id)
            .where(Window.result_id.in_(clocks.index.astype(int).tolist()))
        ).all()
    )
    clocks["runner"] = pd.Series(runners, dtype=object).reindex(clocks.index)
    return clocks


def _known(labels: pd.Series) -> list[str | None]:
    return [None if pd.isna(label) else label for label in labels]


def _store(
    session: Session, series_id: int, points: dict[str, ChangePoint], now: dt.datetime
) -> None:
    """Bring the stored points of a series into line with what was found."""
    rows = session.execute(
        select(Commit.sha, StoredPoint)
        .join(Commit, Commit.id == StoredPoint.commit_id)
        .where(StoredPoint.series_id == series_id)
    )
    stored = {row[0]: row[1] for row in rows}
    for sha, point in points.items():
        row = stored.pop(sha, None)
        if row is None:
            commit_id = session.scalars(select(Commit.id).where(Commit.sha == sha)).one()
            row = StoredPoint(series_id=series_id, commit_id=commit_id, detected_at=now)
            session.add(row)
        for name in FIELDS:
            setattr(row, name, getattr(point, name))
    for row in stored.values():
        if not session.scalar(select(exists().where(Alert.change_point_id == row.id))):
            session.delete(row)
