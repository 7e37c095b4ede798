"""What is read of alerts: findings with their owner and history, precision, and what went stale."""

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from scipy.special import betaincinv
from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from db.alerts import LIVE
from db.cases import jsonable
from db.columns import AlertState
from db.errors import AlertError
from db.frames import AnySelect, with_names
from db.models import (
    Alert,
    AlertEvent,
    AlertNotice,
    Benchmark,
    ChangePoint,
    Commit,
    Machine,
    Metric,
    Result,
    Revision,
    Series,
    User,
)
from db.session import chunks

OF_THE_RUNNER: Final = frozenset({"environment", "clock", "hardware"})  # causes its owner answers
REAL: Final = frozenset({AlertState.CONFIRMED, AlertState.EXPECTED})
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class AlertStep:
    """One step in the history of an alert."""

    state: str
    author: str | None  # None: the service itself
    note: str | None
    at: dt.datetime


@dataclass(frozen=True, slots=True)
class AlertView:
    """An alert with the finding it is about."""

    id: int
    state: str
    owner: str  # "runner h200" where a machine's keeper answers, else "commit 1a2b3c4d5e6f"
    series_id: int
    benchmark: str
    params: str
    machine: str
    commit: str
    cause: str
    before: float
    after: float
    unit: str
    relative_change: float
    opened_at: dt.datetime
    history: tuple[AlertStep, ...]

    @property
    def case(self) -> str:
        """The benchmark with its parameters."""
        return f"{self.benchmark}({self.params})" if self.params else self.benchmark

    @property
    def finding(self) -> tuple[str, str, str]:
        """What alerts of one event share."""
        return self.machine, self.commit, self.cause

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        return {
            **jsonable(asdict(self)),
            "opened_at": self.opened_at.isoformat(),
            "history": [{**asdict(one), "at": one.at.isoformat()} for one in self.history],
        }


@dataclass(frozen=True, slots=True)
class Precision:
    """How often the detector was right, by what people and re-runs said of its alerts."""

    real: int
    false_positives: int
    unjudged: int

    @property
    def value(self) -> float | None:
        """Share of the judged alerts that were real; None before anybody judged."""
        judged = self.real + self.false_positives
        return self.real / judged if judged else None

    @property
    def at_least(self) -> float:
        """Lower end of its one-sided interval (Clopper and Pearson)."""
        if not self.real:
            return 0.0
        return float(betaincinv(self.real, self.false_positives + 1, 1.0 - CONFIDENCE))


@dataclass(frozen=True, slots=True)
class Stale:
    """Data that nobody added to for longer than was allowed."""

    what: str  # "runner h200" or "database"
    newest: dt.datetime
    hours: float


def alerts(session: Session, states: Collection[AlertState] = LIVE) -> list[AlertView]:
    """List the alerts in the given states, the newest commit and the largest change first."""
    query = _alert_rows().where(Alert.state.in_(list(states)))
    found = _views(session, query.order_by(Commit.committed_at.desc(), Alert.id))
    commits = {view.commit: place for place, view in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda view: (commits[view.commit], -abs(view.relative_change)))


def alert(session: Session, alert_id: int) -> AlertView:
    """Give one alert.

    Raises
    ------
    AlertError
        No alert has that number.
    """
    for view in _views(session, _alert_rows().where(Alert.id == alert_id)):
        return view
    raise AlertError(f"alert: expected the number of a stored one, got {alert_id}")


def _alert_rows() -> AnySelect:
    return (
        with_names(select(Alert, ChangePoint, Series, Benchmark, Metric, Machine, Commit))
        .join(ChangePoint, ChangePoint.series_id == Series.id)
        .join(Alert, Alert.change_point_id == ChangePoint.id)
        .join(Commit, Commit.id == ChangePoint.commit_id)
        # So that a database begins there: it would else look at every commit for every series.
        .where(ChangePoint.id.in_(select(Alert.change_point_id)))
    )


def _views(session: Session, query: AnySelect) -> list[AlertView]:
    """Make a view of each row, with its own history."""
    rows = session.execute(query).all()
    steps = _steps(session, [row.Alert.id for row in rows])
    return [
        AlertView(
            id=alert.id,
            state=alert.state.value,
            owner=_owner(point.cause, machine.name, commit.sha),
            series_id=line.id,
            benchmark=benchmark.name,
            params=line.params,
            machine=machine.name,
            commit=commit.sha,
            cause=point.cause,
            before=point.before,
            after=point.after,
            unit=metric.unit,
            relative_change=point.relative_change,
            opened_at=alert.opened_at,
            history=tuple(steps[alert.id]),
        )
        for alert, point, line, benchmark, metric, machine, commit in rows
    ]


def untold(session: Session, channel: str) -> list[AlertView]:
    """List what somebody must hear of and was not sent to a channel yet.

    Nobody is told of the code before a re-run or a person confirmed it; a runner's keeper is told
    at once, as no re-run on the same runner says more.
    """
    told = select(AlertNotice.alert_id).where(AlertNotice.channel == channel)
    query = _alert_rows().where(
        Alert.state.in_(list(LIVE)),
        or_(Alert.state == AlertState.CONFIRMED, ChangePoint.cause.in_(sorted(OF_THE_RUNNER))),
        Alert.id.not_in(told),
    )
    return _views(session, query.order_by(Commit.committed_at.desc(), Alert.id))


def precision(session: Session) -> Precision:
    """Count what was said last of each alert, by people or by a re-run."""
    last: dict[int, AlertState] = {}
    judged = [*REAL, AlertState.FALSE_POSITIVE]
    query = select(AlertEvent).where(AlertEvent.state.in_(judged))
    for event in session.scalars(query.order_by(AlertEvent.id)):
        last[event.alert_id] = event.state
    real = sum(state in REAL for state in last.values())
    total = session.scalar(select(func.count()).select_from(Alert)) or 0
    return Precision(real, len(last) - real, total - len(last))


def stale(session: Session, *, hours: float, now: dt.datetime) -> list[Stale]:
    """Name every runner that measured nothing for so long, and the database if nothing came."""
    rows = session.execute(select(Series.id, Machine.name).join(Machine))
    machines = {series_id: name for series_id, name in rows}  # noqa: C416 - rows are no pairs
    # Not by the column itself, whose index does not hold the start: a million rows would be read.
    line = Result.series_id + 0
    newest: dict[str, int] = {}
    for series_id, started in session.execute(
        select(line, func.max(Result.started_at_ms)).group_by(line)
    ):
        if started is not None:
            name = machines[series_id]
            newest[name] = max(started, newest.get(name, started))
    seen = {
        f"runner {name}": dt.datetime.fromtimestamp(started / 1e3, dt.UTC)
        for name, started in sorted(newest.items())
    }
    ingested = session.scalar(select(func.max(Revision.created_at)))
    if ingested is not None:
        seen["database"] = ingested
    ages = {what: (now - at).total_seconds() / 3600.0 for what, at in seen.items()}
    return [Stale(what, seen[what], age) for what, age in ages.items() if age > hours]


def _owner(cause: str, machine: str, commit: str) -> str:
    return f"runner {machine}" if cause in OF_THE_RUNNER else f"commit {commit[:12]}"


def _steps(session: Session, alert_ids: Sequence[int]) -> dict[int, list[AlertStep]]:
    """Read the history of these alerts, and of no others."""
    query = select(AlertEvent, User.email).outerjoin(User, User.id == AlertEvent.user_id)
    found: dict[int, list[AlertStep]] = defaultdict(list)
    for chunk in chunks(alert_ids):
        asked = query.where(AlertEvent.alert_id.in_(chunk)).order_by(AlertEvent.id)
        for event, email in session.execute(asked):
            one = AlertStep(event.state.value, email, event.note, event.created_at)
            found[event.alert_id].append(one)
    return found
