"""Change points of every stored series, found anew and stored in one transaction.

What is found again keeps its row and the time it was first seen; what is not found any more goes,
or its alert is withdrawn if there is one. Alerts are opened and closed in the same transaction.
"""

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from db.alerts import reopen, update_alerts, withdraw
from db.change_points import ChangePoint, detect_many
from db.detection_inputs import lines
from db.models import Alert, Commit, Revision, Series
from db.models import ChangePoint as StoredPoint
from db.session import writing
from db.together import Moved, name_hardware

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
    """Look for change points in every case, and store them together or not at all."""
    now = dt.datetime.now(dt.UTC)
    causes: Counter[str] = Counter()
    with writing(engine) as connection, Session(bind=connection, autoflush=False) as session:
        ids = session.scalars(select(Series.id).order_by(Series.id)).all()
        found = _found(session)
        for series_id in ids:
            points = found.get(series_id, {})
            causes.update(point.cause for point in points.values())
            _store(session, series_id, points, now)
        changed = any(session.is_modified(row) for row in session.dirty)
        report = DetectionReport(
            series=len(ids),
            change_points=causes.total(),
            new=_count(session.new),
            gone=_count(session.deleted),
            causes=dict(causes),
        )
        session.flush()
        alerts = update_alerts(session, now)
        if report.new or report.gone or changed or alerts:
            session.add(Revision(kind="detect", created_at=now, summary=asdict(report)))
        session.flush()
    return report


def _count(rows: Iterable[object]) -> int:
    return sum(isinstance(row, StoredPoint) for row in rows)


def _found(session: Session) -> dict[int, dict[str, ChangePoint]]:
    """Find the change points of every series by the commit that begins each level."""
    watched = lines(session)
    points = detect_many([line.observed for line in watched])
    places = _places(session)
    moved = [
        Moved(
            line.machine_id,
            line.benchmark,
            tuple(places[commit] for commit in line.commits),
            tuple(found),
        )
        for line, found in zip(watched, points, strict=True)
    ]
    stored: dict[int, dict[str, ChangePoint]] = defaultdict(dict)
    for line, named in zip(watched, name_hardware(moved), strict=True):
        # Results of one commit may be apart; the first of them names the level.
        for point in reversed(named):
            stored[line.series_ids[point.index]][line.commits[point.index]] = point
    return stored


def _places(session: Session) -> dict[str, int]:
    """Number the commits by their rank, or by date where they have none of one kind."""
    rows = session.execute(select(Commit.sha, Commit.position, Commit.committed_at)).all()
    is_ranked = all(row.position is not None for row in rows)
    ordered = sorted(
        rows, key=lambda row: (row.position if is_ranked else row.committed_at, row.sha)
    )
    return {row.sha: place for place, row in enumerate(ordered)}


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
    watched = _alerts(session, series_id)
    for sha, point in points.items():
        row = stored.pop(sha, None)
        if row is not None and row.id in watched:
            reopen(session, watched[row.id], now)
        if row is None:
            commit_id = session.scalars(select(Commit.id).where(Commit.sha == sha)).one()
            row = StoredPoint(series_id=series_id, commit_id=commit_id, detected_at=now)
            session.add(row)
        for name in FIELDS:
            setattr(row, name, getattr(point, name))
    for row in stored.values():
        if row.id in watched:
            withdraw(session, watched[row.id], now)
        else:
            session.delete(row)


def _alerts(session: Session, series_id: int) -> dict[int, Alert]:
    """Give the alerts of a series by their change point."""
    query = (
        select(Alert)
        .join(StoredPoint, StoredPoint.id == Alert.change_point_id)
        .where(StoredPoint.series_id == series_id)
    )
    return {alert.change_point_id: alert for alert in session.scalars(query)}
