"""Alerts: which findings somebody must look at, where they stand, and who said so.

An alert opens for a change point that made a case slower and whose level still holds, closes by
itself when the level returns, and is withdrawn when the detector does not find it any more. People
say the rest: seen, confirmed, expected, a false positive. Every step is kept with its author.
"""

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from db.cases import Verdict
from db.columns import AlertState, Direction, Role
from db.errors import AlertError
from db.frames import AnyRow
from db.models import Alert, AlertEvent, ChangePoint, Commit, Metric, Revision, Series, User

LIVE: Final = frozenset({AlertState.OPEN, AlertState.ACKNOWLEDGED, AlertState.CONFIRMED})
UNDECIDED: Final = frozenset({AlertState.OPEN, AlertState.ACKNOWLEDGED})
RE_RUN: Final = {
    Verdict.REGRESSION: AlertState.CONFIRMED,
    Verdict.NO_CHANGE: AlertState.FALSE_POSITIVE,
}
BY_THE_SERVICE: Final = frozenset({AlertState.WITHDRAWN})  # nobody sets these by hand
RETURNED_REL: Final = 0.02  # above the level before, within which it has returned
NOISE: Final = "noise"  # a cause nobody is told of


@dataclass(frozen=True, slots=True)
class AlertChanges:
    """What a pass over the change points did to the alerts."""

    opened: int
    fixed: int

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return bool(self.opened or self.fixed)


def update_alerts(session: Session, now: dt.datetime) -> AlertChanges:
    """Open alerts for new slowdowns that last, and close those whose level returned."""
    opened = fixed = 0
    for points in _points_by_series(session).values():
        for place, row in enumerate(points):
            back = _return_of(row, points[place + 1 :])
            if row.Alert is None:
                if _is_slower(row) and back is None and row.ChangePoint.cause != NOISE:
                    _open(session, row.ChangePoint, now)
                    opened += 1
            elif row.Alert.state in LIVE and back is not None:
                note = f"the level returned at {back.sha[:12]}"
                step(session, row.Alert, AlertState.FIXED, now, note=note)
                fixed += 1
    return AlertChanges(opened, fixed)


def withdraw(session: Session, alert: Alert, now: dt.datetime) -> None:
    """Take back an alert whose change point is not found any more."""
    if alert.state in LIVE:
        step(session, alert, AlertState.WITHDRAWN, now, note="not found any more")


def reopen(session: Session, alert: Alert, now: dt.datetime) -> None:
    """Open again what was withdrawn and is found after all."""
    if alert.state is AlertState.WITHDRAWN:
        step(session, alert, AlertState.OPEN, now, note="found again")


def settle(
    session: Session, alert_id: int, verdict: Verdict, now: dt.datetime, *, note: str
) -> bool:
    """Let a fresh re-run confirm an alert nobody decided yet, or refute it; say if it did."""
    alert = session.get(Alert, alert_id)
    to = RE_RUN.get(verdict)
    if alert is None or to is None or alert.state not in UNDECIDED:
        return False
    step(session, alert, to, now, note=note)
    session.add(Revision(kind="triage", created_at=now, summary={"alert": alert_id}))
    return True


def judge(
    session: Session, alert_id: int, state: AlertState, *, author: str, note: str | None = None
) -> Alert:
    """Set where an alert stands, in somebody's name; the caller commits.

    Raises
    ------
    AlertError
        No alert has that number, it stands there already, or nobody may set that state.
    """
    alert = session.get(Alert, alert_id)
    if alert is None:
        raise AlertError(f"alert: expected the number of a stored one, got {alert_id}")
    if state in BY_THE_SERVICE:
        raise AlertError(f"state: expected one that people set, got {state.value!r}")
    if alert.state is state:
        raise AlertError(f"alert {alert_id}: expected another state, got the one it is in, {state}")
    now = dt.datetime.now(dt.UTC)
    step(session, alert, state, now, user=_user(session, author), note=note)
    session.add(Revision(kind="triage", created_at=now, summary={"alert": alert_id}))
    return alert


def step(
    session: Session,
    alert: Alert,
    state: AlertState,
    now: dt.datetime,
    *,
    user: User | None = None,
    note: str | None = None,
) -> None:
    """Move an alert and keep the step; without a user it is the service's."""
    alert.state = state
    user_id = None if user is None else user.id
    session.add(
        AlertEvent(alert_id=alert.id, user_id=user_id, state=state, note=note, created_at=now)
    )


def _points_by_series(session: Session) -> dict[int, list[AnyRow]]:
    """Give the change points of each series that may open or close an alert, in their order."""
    is_slower = (ChangePoint.after > ChangePoint.before) == (Metric.direction == Direction.LOWER)
    is_new = and_(Alert.id.is_(None), ChangePoint.cause != NOISE, is_slower)
    concerned = (
        select(ChangePoint.series_id)
        .join(Series, Series.id == ChangePoint.series_id)
        .join(Metric, Metric.id == Series.metric_id)
        .outerjoin(Alert, Alert.change_point_id == ChangePoint.id)
        .where(or_(is_new, Alert.state.in_(list(LIVE))))
    )
    query = (
        select(
            ChangePoint,
            Alert,
            Metric.direction,
            Commit.sha,
            Commit.position,
            Commit.committed_at,
        )
        .join(Commit, Commit.id == ChangePoint.commit_id)
        .join(Series, Series.id == ChangePoint.series_id)
        .join(Metric, Metric.id == Series.metric_id)
        .outerjoin(Alert, Alert.change_point_id == ChangePoint.id)
        .where(ChangePoint.series_id.in_(concerned))
    )
    found: dict[int, list[AnyRow]] = defaultdict(list)
    for row in session.execute(query):
        found[row.ChangePoint.series_id].append(row)
    # Sorted, so that alerts have the same numbers on every kind of database.
    return {series_id: in_order(found[series_id]) for series_id in sorted(found)}


def in_order(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Sort rows that name a commit by its rank, or by date where not all have one."""
    is_ranked = all(row.position is not None for row in rows)
    return sorted(rows, key=lambda row: (row.position if is_ranked else row.committed_at, row.sha))


def _is_slower(row: AnyRow) -> bool:
    point = row.ChangePoint
    is_slower: bool = (point.after > point.before) == (row.direction == "lower")
    return is_slower


def _return_of(row: AnyRow, later: Iterable[AnyRow]) -> Any:  # noqa: ANN401 - a row of the query
    """Give the later change point that brought the level back; None while it lasts."""
    before = row.ChangePoint.before
    for one in later:
        level = one.ChangePoint.after
        ratio = level / before if row.direction == "lower" else before / level
        if ratio <= 1.0 + RETURNED_REL:
            return one
    return None


def _open(session: Session, point: ChangePoint, now: dt.datetime) -> None:
    alert = Alert(change_point_id=point.id, state=AlertState.OPEN, opened_at=now)
    session.add(alert)
    session.flush()
    step(session, alert, AlertState.OPEN, now)


def _user(session: Session, author: str) -> User:
    """Give the person of an address; whoever writes here for the first time may judge."""
    found = session.scalar(select(User).where(User.email == author))
    if found is None:
        found = User(email=author, name=author.partition("@")[0], role=Role.TRIAGER)
        session.add(found)
        session.flush()
    if found.role is Role.VIEWER:
        raise AlertError(f"author: expected somebody who may judge, got the viewer {author}")
    return found
