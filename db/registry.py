"""Rows that are looked up by their identity and made where they are missing.

One registry serves one table within one write transaction, whose lock keeps other writers out,
so what it has read stays true.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import Connection, Table, func, insert, select

from db.columns import Base

if TYPE_CHECKING:
    import psycopg


class Registry:
    """Ids of a table's rows by the columns that identify them."""

    def __init__(self, connection: Connection, model: type[Base], identity: Sequence[str]) -> None:
        self._connection = connection
        self._table = table_of(model)
        self._identity = tuple(identity)
        self._ids: dict[tuple[Any, ...], int] | None = None
        self.created: set[int] = set()

    def ids(self, rows: Sequence[dict[str, Any]]) -> list[int]:
        """Give the id of every row, in their order, after making those that are missing."""
        known = self._known()
        keys = [tuple(row[name] for name in self._identity) for row in rows]
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in known}
        if missing:
            statement = insert(self._table).returning(
                self._table.c.id, sort_by_parameter_order=True
            )
            made = self._connection.scalars(statement, list(missing.values())).all()
            known.update(zip(missing, made, strict=True))
            self.created.update(made)
        return [known[key] for key in keys]

    def id(self, row: dict[str, Any]) -> int:
        """Give the id of one row, made if it is missing."""
        return self.ids([row])[0]

    def _known(self) -> dict[tuple[Any, ...], int]:
        if self._ids is None:
            columns = [self._table.c[name] for name in self._identity]
            found = self._connection.execute(select(self._table.c.id, *columns))
            self._ids = {tuple(row[1:]): row[0] for row in found}
        return self._ids


def insert_many(
    connection: Connection,
    model: type[Base],
    columns: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
) -> None:
    """Insert plain values by the driver's own bulk call, several times as fast as through names.

    Only for numbers, texts and truth values: nothing converts them on the way.
    """
    if not rows:
        return
    table, names = model.__tablename__, ", ".join(columns)
    if connection.dialect.name == "postgresql":
        cursor = cast("psycopg.Cursor", connection.connection.cursor())
        with cursor, cursor.copy(f"COPY {table} ({names}) FROM STDIN".encode()) as copy:
            for row in rows:
                copy.write_row(row)
        return
    marks = ", ".join("?" for _ in columns)
    connection.exec_driver_sql(
        f"INSERT INTO {table} ({names}) VALUES ({marks})",  # noqa: S608 - names are our own
        list(rows),
    )


def reserve_ids(connection: Connection, model: type[Base], count: int) -> list[int]:
    """Give ids that no row has and none will get, so that a bulk call can carry them.

    Within a write transaction only: on SQLite it is the lock that keeps them free.
    """
    table = table_of(model)
    if connection.dialect.name == "postgresql":
        sequence = func.nextval(func.pg_get_serial_sequence(table.name, "id"))
        return list(
            connection.scalars(select(sequence).select_from(func.generate_series(1, count)))
        )
    last = connection.scalar(select(func.max(table.c.id))) or 0
    return list(range(last + 1, last + 1 + count))


def table_of(model: type[Base]) -> Table:
    """Give the table behind a model."""
    table = model.__table__
    if not isinstance(table, Table):
        raise TypeError(f"model: expected one mapped to a table, got {model.__name__}")
    return table
