"""Change points of every stored series, found and stored in one transaction.

Only cases that are not as the last pass saw them are judged; the result is that of judging all.
What is found again keeps its row and the time it was first seen; what is not found any more goes,
or its alert is withdrawn if there is one. Alerts are opened and closed in the same transaction.
"""

import datetime as dt
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from db.alerts import update_alerts
from db.change_points import Cause, ChangePoint, detect_many
from db.commit_places import CommitPlaces
from db.detection_inputs import Case, Line, cases, chains, lines
from db.found_points import Found, Key, StoredPoints
from db.judged import Split, remember, split
from db.models import ChangePoint as StoredPoint
from db.models import Revision, Series
from db.session import writing
from db.together import Moved, name_hardware, suspects


@dataclass(frozen=True, slots=True)
class DetectionReport:
    """What a pass over all series found, and what that changed."""

    series: int
    judged: int  # of them; the others are as they were
    change_points: int
    new: int
    gone: int
    causes: dict[str, int]  # of the change points


@dataclass(frozen=True, slots=True)
class _Told:
    """What one line's results told."""

    case: Case
    places: NDArray[np.int64]  # of each result's commit
    keys: tuple[Key, ...]  # of each point
    points: tuple[ChangePoint, ...]

    @classmethod
    def of(cls, line: Line, points: Sequence[ChangePoint], places: CommitPlaces) -> "_Told":
        """Keep of a line what is asked for later."""
        at = [point.index for point in points]
        keys = zip(line.series_ids[at].tolist(), line.commit_ids[at].tolist(), strict=True)
        return cls(line.case, places.place[line.commit_ids], tuple(keys), tuple(points))

    @property
    def moved(self) -> Moved:
        """Give what cases are compared by."""
        return Moved(self.case.machine_id, self.case.benchmark, self.places, self.points)


def detect_all(engine: Engine, *, anew: bool = False) -> DetectionReport:
    """Look for change points in every case, and store them together or not at all.

    `anew` judges those as well that are as the last pass saw them, and finds the same.
    """
    now = dt.datetime.now(dt.UTC)
    with writing(engine) as connection, Session(bind=connection, autoflush=False) as session:
        places = CommitPlaces.of(session)
        parts = split(session, cases(session), places, anew=anew)
        stored = StoredPoints(session)
        told = _judge(session, parts.anew, places)
        before = _found_before(stored, parts.as_before)
        found = _found(parts, places, told, before)
        changes = stored.update(found, now)
        causes: Counter[str] = Counter(one.point.cause for one in found.values())
        report = DetectionReport(
            series=session.scalar(select(func.count(Series.id))) or 0,
            judged=sum(len(case.members) for case in parts.anew),
            change_points=len(found),
            new=changes.new,
            gone=changes.gone,
            causes=dict(causes),
        )
        session.flush()
        alerts = update_alerts(session, now)
        if changes or alerts:
            session.add(Revision(kind="detect", created_at=now, summary=asdict(report)))
        remember(session, parts, _ambiguous(told), places)
        session.flush()
    return report


def _judge(session: Session, anew: Sequence[Case], places: CommitPlaces) -> list[_Told]:
    """Find the change points of cases by what each line tells alone."""
    return [
        _Told.of(line, points, places)
        for batch in lines(session, anew, places)
        for line, points in zip(batch, detect_many([line.observed for line in batch]), strict=True)
    ]


def _found_before(
    stored: StoredPoints, as_before: Sequence[Case]
) -> dict[Case, dict[Key, ChangePoint]]:
    """Give what was found last in each of the cases that are as they were."""
    case_of = {member.series_id: case for case in as_before for member in case.members}
    found: dict[Case, dict[Key, ChangePoint]] = {case: {} for case in as_before}
    for key, row in stored.rows.items():
        if key[0] in case_of and row.own_cause is not None:
            found[case_of[key[0]]][key] = _as_told(row, row.own_cause)
    return found


def _as_told(row: StoredPoint, own_cause: str) -> ChangePoint:
    """Give a stored point as its series alone told it; where in the series is not known."""
    numbers = (row.before, row.after, row.relative_change, row.p_value)
    return ChangePoint(0, *numbers, cause=cast("Cause", own_cause))


def _found(
    parts: Split,
    places: CommitPlaces,
    told: Sequence[_Told],
    before: Mapping[Case, Mapping[Key, ChangePoint]],
) -> dict[Key, Found]:
    """Join what was found now and before, and name what moved with its whole machine."""
    found = {
        key: Found(point, point.cause)
        for points in before.values()
        for key, point in points.items()
    }
    suspected = suspects(_moves(places, told, before))
    again = [case for case in before if case.machine_id in suspected]
    every = [
        *told,
        *(one for case in again for one in _told_before(case, before[case], parts, places)),
    ]
    named = name_hardware([one.moved for one in every])
    for one, points in zip(every, named, strict=True):
        # Results of one commit may be apart; the first of them names the level.
        for key, own, point in reversed(list(zip(one.keys, one.points, points, strict=True))):
            found[key] = Found(point, own.cause)
    return found


def _moves(
    places: CommitPlaces,
    told: Sequence[_Told],
    before: Mapping[Case, Mapping[Key, ChangePoint]],
) -> Iterator[tuple[int, str, int, str]]:
    """Give machine, benchmark, place and cause of every change point."""
    every = [(one.case, zip(one.keys, one.points, strict=True)) for one in told]
    for case, points in (*every, *((case, points.items()) for case, points in before.items())):
        for (_, commit_id), point in points:
            yield case.machine_id, case.benchmark, int(places.place[commit_id]), point.cause


def _told_before(
    case: Case, points: Mapping[Key, ChangePoint], parts: Split, places: CommitPlaces
) -> Iterator[_Told]:
    """Put what was found last in a case to the results that began it, line by line."""
    on_main = {
        one.series_id: commits[places.is_main(commits)]
        for one in case.members
        if (commits := parts.commits.get(one.series_id)) is not None
    }
    found = [(series_id, commits) for series_id, commits in on_main.items() if len(commits)]
    for chain in chains(found, places):
        commits = np.concatenate([on_main[series_id] for series_id in chain])
        here = {key: point for key, point in points.items() if key[0] in chain}
        at = [int(np.flatnonzero(commits == commit_id)[0]) for _, commit_id in here]
        placed = [replace(point, index=i) for point, i in zip(here.values(), at, strict=True)]
        yield _Told(case, places.place[commits], tuple(here), tuple(placed))


def _ambiguous(told: Sequence[_Told]) -> set[Case]:
    """Give the cases of which a commit began two levels, as only one of them is stored."""
    return {one.case for one in told if len(set(one.keys)) < len(one.keys)}
