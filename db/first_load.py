"""A first load into PostgreSQL checks its foreign keys at once, not a row at a time.

PostgreSQL asks for the parents of each row it gets, by a trigger a row and key: of a large load
three quarters of the server's time. A load into tables that are as good as empty takes the keys of
results and samples off and puts the same ones back before it commits, when each is one join over
what is there then. It is all in the load's own transaction, so nobody sees tables without them, and
a load that dies leaves them as they were.

Meanwhile the tables are locked for readers too, which is why only a first load does it. Where
somebody reads them just then, or our role does not own them, the keys stay on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import DBAPIError

from db.models import Result, Sample
from db.registry import table_of

LOCK_WAIT_MS = 500  # for those who read just then
LOADED = (Result, Sample)


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key as the server defines it."""

    table: str
    name: str
    definition: str


def take_keys_off(connection: Connection, *, most_stored: int) -> Sequence[ForeignKey]:
    """Drop the keys of results and samples, if this is a first load; give what was dropped.

    Parameters
    ----------
    most_stored : results in the database with which a load still counts as the first
    """
    if not _is_first(connection, most_stored):
        return ()
    keys = _keys(connection)
    try:
        with connection.begin_nested():
            connection.execute(text(f"SET LOCAL lock_timeout = {LOCK_WAIT_MS}"))
            for key in keys:
                _alter(connection, f"{key.table} DROP CONSTRAINT {key.name}")
            connection.execute(text("SET LOCAL lock_timeout = 0"))
    except DBAPIError:
        return ()
    return keys


def put_keys_back(connection: Connection, keys: Sequence[ForeignKey]) -> None:
    """Make them again; a row without its parent ends the load."""
    for key in keys:
        _alter(connection, f"{key.table} ADD CONSTRAINT {key.name} {key.definition}")


def _is_first(connection: Connection, most_stored: int) -> bool:
    if connection.dialect.name != "postgresql":
        return False
    some = select(Result.id).limit(most_stored + 1).subquery()
    return (connection.scalar(select(func.count()).select_from(some)) or 0) <= most_stored


def _keys(connection: Connection) -> list[ForeignKey]:
    query = text(
        "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE contype = 'f' AND conrelid = ANY (CAST(:tables AS regclass[])) ORDER BY conname"
    )
    tables = [table_of(model).name for model in LOADED]
    return [ForeignKey(*row) for row in connection.execute(query, {"tables": tables})]


def _alter(connection: Connection, what: str) -> None:
    connection.execute(text(f"ALTER TABLE {what}"))
