"""Results that somebody left out: who, why, and back again. Nothing is deleted.

An excluded result takes no part in histories, detection, comparisons or noise until the exclusion
is lifted; reading its file again does not bring it back.
"""

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sqlalchemy import Connection, Engine, insert, select, update
from sqlalchemy.orm import Session

from db.errors import DbError
from db.models import Benchmark, Commit, Exclusion, Machine, Result, Revision, Series
from db.queries import resolve_commit
from db.registry import table_of
from db.session import chunks, writing

LONGEST_NAME = 200


class ExclusionError(DbError):
    """Nobody or no reason is named, or there is nothing to leave out or bring back."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Results of a commit, of one machine or all, of benchmarks that a pattern names."""

    commit: str  # beginning of its hash
    machine: str | None = None
    benchmark: str = "*"

    @property
    def text(self) -> str:
        """What is named, for people."""
        where = f" on {self.machine}" if self.machine else ""
        which = f" of {self.benchmark}" if self.benchmark != "*" else ""
        return f"{self.commit[:12]}{where}{which}"


def exclude(engine: Engine, selection: Selection, *, author: str, reason: str) -> Exclusion:
    """Leave the selected results out.

    Raises
    ------
    UnknownCommitError
        No stored commit, or more than one, begins like that.
    ExclusionError
        Author or reason is empty, or no result that counts is selected.
    """
    who, why = _said("by", author), _said("reason", reason)
    with writing(engine) as connection:
        with Session(bind=connection) as session:
            commit = resolve_commit(session, selection.commit)
        named = Selection(commit, selection.machine, selection.benchmark)
        ids = _selected(connection, named)
        if not ids:
            raise ExclusionError(
                f"exclude: expected results of {named.text}, found none that count"
            )
        row = {
            "author": who,
            "reason": why,
            "what": named.text,
            "results": len(ids),
            "created_at": dt.datetime.now(dt.UTC),
        }
        table = table_of(Exclusion)
        exclusion_id = connection.scalars(insert(table).returning(table.c.id), row).one()
        for some in chunks(ids):
            held = update(table_of(Result)).where(Result.id.in_(some))
            connection.execute(held.values(exclusion_id=exclusion_id))
        _note(connection, {"excluded": len(ids)})
    return Exclusion(id=exclusion_id, **row)


def include(engine: Engine, exclusion_id: int, *, author: str) -> int:
    """Lift an exclusion; give how many results count again.

    Raises
    ------
    ExclusionError
        There is none with that number, or it was lifted before.
    """
    who = _said("by", author)
    with writing(engine) as connection:
        lifted = connection.execute(
            update(table_of(Exclusion))
            .where(Exclusion.id == exclusion_id, Exclusion.lifted_at.is_(None))
            .values(lifted_by=who, lifted_at=dt.datetime.now(dt.UTC))
        )
        if not lifted.rowcount:
            raise ExclusionError(f"include: expected an exclusion that holds, got {exclusion_id}")
        again = connection.execute(
            update(table_of(Result))
            .where(Result.exclusion_id == exclusion_id)
            .values(exclusion_id=None)
        ).rowcount
        _note(connection, {"included": again})
    return again


def exclusions(session: Session) -> Sequence[Exclusion]:
    """List all there ever were, the newest first."""
    return session.scalars(select(Exclusion).order_by(Exclusion.id.desc())).all()


def _said(what: str, text: str) -> str:
    found = text.strip()
    if not found:
        raise ExclusionError(
            f"{what}: expected a text, got an empty one (who and why stay on record)"
        )
    if what == "by" and len(found) > LONGEST_NAME:
        raise ExclusionError(
            f"{what}: expected at most {LONGEST_NAME} characters, got {len(found)}"
        )
    return found


def _selected(connection: Connection, selection: Selection) -> list[int]:
    query = (
        select(Result.id, Benchmark.name)
        .join(Commit, Commit.id == Result.commit_id)
        .join(Series, Series.id == Result.series_id)
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
        .join(Machine, Machine.id == Series.machine_id)
        .where(Commit.sha == selection.commit, Result.exclusion_id.is_(None))
    )
    if selection.machine is not None:
        query = query.where(Machine.name == selection.machine)
    rows = connection.execute(query).all()
    return [row.id for row in rows if fnmatchcase(row.name, selection.benchmark)]


def _note(connection: Connection, summary: dict[str, int]) -> None:
    now = dt.datetime.now(dt.UTC)
    row = {"kind": "exclude", "created_at": now, "summary": summary}
    connection.execute(insert(table_of(Revision)), row)
