"""Which cases the detector has judged as they are: a mark on their series tells what it saw.

A mark covers the series that make up a case, every result that counts, the environment of each and
the windows beside it, none of which is ever changed in place. The order of the commits and the
detector itself hold for all marks; when either changes, none is worth anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sqlalchemy import bindparam, select, update

from db import (
    change_points,
    commit_places,
    detection_inputs,
    explained,
    partition,
    rank_test,
    segmentation,
    series,
)
from db.cells import digest_of
from db.counted import counts
from db.frames import listed, numbers
from db.models import DetectorState, Result, Series, Window
from db.registry import table_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from sqlalchemy.orm import Session

    from db.commit_places import CommitPlaces
    from db.detection_inputs import Case

JUDGES = (
    *(change_points, commit_places, detection_inputs, explained, partition),
    *(rank_test, segmentation, series),
)
ONLY_ID = 1


@dataclass(frozen=True, slots=True)
class Split:
    """The cases, and what to mark each with once it is judged."""

    anew: list[Case]
    as_before: list[Case]
    marks: Mapping[int, int]  # by series
    commits: Mapping[int, NDArray[np.int64]]  # of a series' results that count


def split(session: Session, found: Sequence[Case], places: CommitPlaces, *, anew: bool) -> Split:
    """Tell the cases that must be judged anew from those that are as they were."""
    stands = not anew and _stands(session, places)
    seen = _seen(session)
    marks: dict[int, int] = {}
    parts: tuple[list[Case], list[Case]] = ([], [])
    for case in found:
        told = [
            (
                one.series_id,
                one.declared,
                seen[one.series_id].marks if one.series_id in seen else (),
            )
            for one in case.members
        ]
        mark = digest_of(repr((case.key, told)).encode())
        is_as_before = stands and all(one.judged == mark for one in case.members)
        parts[is_as_before].append(case)
        marks.update((one.series_id, mark) for one in case.members)
    return Split(*parts, marks, {series_id: one.commits for series_id, one in seen.items()})


def remember(session: Session, parts: Split, unsure: set[Case], places: CommitPlaces) -> None:
    """Mark the series that were judged, and note what all marks rest on.

    Those of `unsure` cases stay without a mark, to be judged again whatever comes.
    """
    marks = [
        {"of": member.series_id, "mark": None if case in unsure else parts.marks[member.series_id]}
        for case in parts.anew
        for member in case.members
    ]
    if marks:
        table = table_of(Series)
        session.connection().execute(
            update(table).where(table.c.id == bindparam("of")).values(judged=bindparam("mark")),
            marks,
        )
    state = session.get(DetectorState, ONLY_ID) or DetectorState(id=ONLY_ID)
    state.code = _code()
    state.newest_commit_id = places.newest_id
    state.commit_order = places.digest(places.newest_id)
    session.add(state)


def _stands(session: Session, places: CommitPlaces) -> bool:
    """Whether the marks were made by this detector, over commits in the order they have now."""
    state = session.get(DetectorState, ONLY_ID)
    return (
        state is not None
        and state.code == _code()
        and state.commit_order == places.digest(state.newest_commit_id)
    )


def _code() -> int:
    """Tell this detector from any other."""
    return digest_of(b"".join(Path(str(one.__file__)).read_bytes() for one in JUDGES))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What counts of a series: numbers that any other set of results and windows has not."""

    marks: tuple[int, ...]
    commits: NDArray[np.int64]  # of its results, in no order


def _seen(session: Session) -> dict[int, _Seen]:
    """Look at all that counts of every series; a database lists numbers fastest as one text."""
    results = (
        select(Result.series_id, listed(Result.id), listed(Result.commit_id))
        .where(counts())
        .group_by(Result.series_id)
    )
    windows = (
        select(Result.series_id, listed(Window.id), listed(Window.result_id))
        .add_columns(listed(Window.runner_environment_id))
        .join(Window, Window.result_id == Result.id)
        .where(counts())
        .group_by(Result.series_id)
    )
    found: dict[int, _Seen] = {}
    for series_id, ids, commits in session.execute(results):
        found[series_id] = _Seen((_digest(ids),), numbers(commits))
    for series_id, *columns in session.execute(windows):
        one = found[series_id]
        found[series_id] = _Seen((*one.marks, _digest(*columns)), one.commits)
    return found


def _digest(*columns_listed: str) -> int:
    """Give a number for a set of rows, in whichever order the database listed their columns."""
    columns = np.stack([numbers(one) for one in columns_listed])
    ordered = columns[:, np.lexsort(columns[::-1])]
    return digest_of(ordered.tobytes())
