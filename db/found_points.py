"""The stored change points, brought into line with what a pass found."""

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.alerts import reopen, withdraw
from db.change_points import ChangePoint
from db.models import Alert
from db.models import ChangePoint as StoredPoint

FIELDS = ("before", "after", "relative_change", "p_value", "cause")
Key = tuple[int, int]  # series and commit


@dataclass(frozen=True, slots=True)
class Found:
    """A change point, and the cause that its series alone told."""

    point: ChangePoint
    own_cause: str


@dataclass(slots=True)
class Changes:
    """What became of the rows."""

    new: int = 0
    gone: int = 0
    moved: int = 0  # found again, not quite as before

    def __bool__(self) -> bool:
        """Whether anything changed that a page shows."""
        return bool(self.new or self.gone or self.moved)


class StoredPoints:
    """All change points there are, with their alerts."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rows: dict[Key, StoredPoint] = {}
        self._alerts: dict[Key, Alert] = {}
        query = select(StoredPoint, Alert).outerjoin(Alert, Alert.change_point_id == StoredPoint.id)
        for row, alert in session.execute(query):
            key = row.series_id, row.commit_id
            self.rows[key] = row
            if alert is not None:
                self._alerts[key] = alert

    def update(self, found: Mapping[Key, Found], now: dt.datetime) -> Changes:
        """Write what is found; what is not goes, or its alert is withdrawn."""
        changes = Changes()
        for key, one in found.items():
            row = self.rows.get(key)
            if row is None:
                row = StoredPoint(series_id=key[0], commit_id=key[1], detected_at=now)
                self._session.add(row)
                changes.new += 1
            else:
                changes.moved += _differs(row, one.point)
                changes.moved += self._tell(reopen, key, now)
            for name in FIELDS:
                setattr(row, name, getattr(one.point, name))
            row.own_cause = one.own_cause
        for key in self.rows.keys() - found.keys():
            row = self.rows[key]
            if key in self._alerts:
                row.own_cause = None
                changes.moved += self._tell(withdraw, key, now)
            else:
                self._session.delete(row)
                changes.gone += 1
        return changes

    def _tell(
        self, act: Callable[[Session, Alert, dt.datetime], None], key: Key, now: dt.datetime
    ) -> bool:
        """Let an alert follow its point, if there is one; say if it did."""
        alert = self._alerts.get(key)
        if alert is None:
            return False
        state = alert.state
        act(self._session, alert, now)
        return alert.state is not state


def _differs(row: StoredPoint, point: ChangePoint) -> bool:
    return any(getattr(row, name) != getattr(point, name) for name in FIELDS)
