"""What may go, in the end: samples and windows of old results that no conclusion rests on.

A history keeps every point: results stay, so change points are found again as before and every
commit can be compared. What takes most room goes: the samples and the windows' samples of results
older than a date. They stay where they are evidence:

- around a change point, `AROUND` results of the series to each side,
- of the newest `BASELINE` results of every series, which new ones are compared with,
- of results with an exclusion, and of commits or series that somebody annotated.

Of commits that lie on another branch and not on the main one the old results go as a whole, with
the same exceptions.
"""

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from sqlalchemy import Connection, Engine, delete, exists, insert, or_, select, update

from db.columns import OrderBasis
from db.frames import AnyRow
from db.models import Annotation, ChangePoint, Commit, Result, Revision, Run, Sample, Window
from db.registry import table_of
from db.session import chunks, writing

ROWS_AT_ONCE = 10_000
AROUND = 10  # results to each side of a change point; a level needs three
BASELINE = 30  # newest results of a series; noise is learned from as many neighbours


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What went, or would go, and what was kept though it is old."""

    old: int  # results before the date
    kept_whole: int  # of them, with samples and windows as they are
    samples: int  # gone
    windows: int  # whose samples are gone
    results: int  # of side branches, gone as a whole


def prune(engine: Engine, before: dt.datetime, *, dry_run: bool = False) -> PruneReport:
    """Let go of the details of results of commits before a date."""
    with writing(engine) as connection:
        old = _old(connection, before)
        evidence = _evidence(connection)
        sides = [one for one, is_side in old.items() if is_side and one not in evidence]
        thinned = [one for one, is_side in old.items() if not is_side and one not in evidence]
        report = PruneReport(
            old=len(old),
            kept_whole=len(old) - len(sides) - len(thinned),
            samples=_delete_samples(connection, [*thinned, *sides]),
            windows=_empty_windows(connection, thinned),
            results=_delete_results(connection, sides),
        )
        if report.samples or report.windows or report.results:
            now = dt.datetime.now(dt.UTC)
            row = {"kind": "prune", "created_at": now, "summary": asdict(report)}
            connection.execute(insert(table_of(Revision)), row)
        if dry_run:
            connection.rollback()
    return report


def _old(connection: Connection, before: dt.datetime) -> dict[int, bool]:
    """Give the results of commits before the date, and whether a commit is of a side branch."""
    is_side = (
        (Commit.order_basis == OrderBasis.REPOSITORY)
        & Commit.branch.is_(None)
        & Commit.side_branch.is_not(None)
    )
    query = (
        select(Result.id, is_side)
        .join(Commit, Commit.id == Result.commit_id)
        .where(Commit.committed_at < before, Commit.external.is_(False))
    )
    return {result_id: bool(side) for result_id, side in connection.execute(query)}


def _evidence(connection: Connection) -> set[int]:
    """Give the results whose details a conclusion, a baseline or a person rests on."""
    commits = select(Annotation.commit_id).where(Annotation.commit_id.is_not(None))
    series = select(Annotation.series_id).where(Annotation.series_id.is_not(None))
    named = select(Result.id).where(
        or_(
            Result.exclusion_id.is_not(None),
            Result.commit_id.in_(commits),
            Result.series_id.in_(series),
        )
    )
    kept = set(connection.scalars(named))
    points = {
        tuple(one)
        for one in connection.execute(select(ChangePoint.series_id, ChangePoint.commit_id))
    }
    for _, rows in groupby(_results_by_series(connection), key=lambda row: row.series_id):
        ranked = _in_order(list(rows))
        ids = [row.id for row in ranked]
        kept.update(ids[-BASELINE:])
        for place, row in enumerate(ranked):
            if (row.series_id, row.commit_id) in points:
                kept.update(ids[max(place - AROUND, 0) : place + AROUND + 1])
    return kept


def _results_by_series(connection: Connection) -> Iterator[AnyRow]:
    query = (
        select(
            Result.id,
            Result.series_id,
            Result.commit_id,
            Commit.position,
            Commit.committed_at,
            Commit.order_basis,
        )
        .join(Commit, Commit.id == Result.commit_id)
        .order_by(Result.series_id, Result.started_at_ms, Result.id)
    )
    # Of the statement, not of the connection, which goes on to other things.
    yield from connection.execute(query.execution_options(yield_per=ROWS_AT_ONCE))


def _in_order(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Sort a series' results as its history does: by rank where all have one of a kind."""
    kinds = {row.order_basis for row in rows}
    if len(kinds) == 1 and OrderBasis.DATE not in kinds:
        return sorted(rows, key=lambda row: row.position)
    return sorted(rows, key=lambda row: row.committed_at)


def _delete_samples(connection: Connection, result_ids: Sequence[int]) -> int:
    table = table_of(Sample)
    return sum(
        connection.execute(delete(table).where(table.c.result_id.in_(some))).rowcount
        for some in chunks(result_ids)
    )


def _empty_windows(connection: Connection, result_ids: Sequence[int]) -> int:
    """Let go of windows' samples; their medians, counters and codes stay."""
    table = table_of(Window)
    there = [
        row.id
        for some in chunks(result_ids)
        for row in connection.execute(
            select(table.c.id, table.c.samples_s).where(table.c.result_id.in_(some))
        )
        if row.samples_s
    ]
    for some in chunks(there):
        connection.execute(update(table).where(table.c.id.in_(some)).values(samples_s=[]))
    return len(there)


def _delete_results(connection: Connection, result_ids: Sequence[int]) -> int:
    """Let results go with their windows, and runs that have none left."""
    results, windows, runs = table_of(Result), table_of(Window), table_of(Run)
    for some in chunks(result_ids):
        connection.execute(delete(windows).where(windows.c.result_id.in_(some)))
        connection.execute(delete(results).where(results.c.id.in_(some)))
    if result_ids:
        left = exists().where(results.c.run_id == runs.c.id)
        connection.execute(delete(runs).where(~left))
    return len(result_ids)
