"""A copy of everything that is stored, taken while others read and write.

A backup is one SQLite file, whichever database it is of: it can be opened as it is, and `restore`
puts it into an empty database of either kind. It is taken from one state of the data, checked, and
only then given its name, so that a file of that name is whole.
"""

import os
import sqlite3
from pathlib import Path

from sqlalchemy import Connection, Engine, Table, func, insert, select, text

from db.errors import DbError
from db.models import Commit
from db.session import open_database, writing

ROWS_AT_ONCE = 5000
UNFINISHED = ".part"
TABLES = Commit.metadata.sorted_tables  # what is referred to comes first


class BackupError(DbError):
    """A backup or its restoration would overwrite something, or does not hold what it should."""


def backup(engine: Engine, file: Path) -> dict[str, int]:
    """Write a backup; give how many rows it has of each table.

    Raises
    ------
    BackupError
        The file exists, cannot be written, or is not what was stored.
    """
    if file.exists():
        raise BackupError(f"backup: expected a new file, got {file}, which exists")
    part = file.with_name(f"{file.name}{UNFINISHED}")
    _remove(part)
    try:
        counted = _copy_pages(engine, part) if _is_sqlite(engine) else _copy_out(engine, part)
        _finish(part, counted)
        os.link(part, file)  # unlike a rename it refuses a file that came in the meantime
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f"backup: expected to write {file}, got {error}") from None
    finally:
        _remove(part)
    return counted


def restore(file: Path, engine: Engine) -> dict[str, int]:
    """Put a backup into an empty database; give how many rows it has of each table now.

    Raises
    ------
    BackupError
        The database holds something; nothing was written.
    MissingDatabaseError, SchemaError
        The file is no backup, or one of another version; `db upgrade` brings it up to date.
    """
    source = open_database(f"sqlite:///{file}", must_exist=True)
    try:
        with source.connect() as reading, writing(engine) as connection:
            filled = [name for name, rows in _counted(connection).items() if rows]
            if filled:
                raise BackupError(f"restore: expected an empty database, got rows in {filled[0]}")
            _copy_rows(reading, connection)
            if not _is_sqlite(engine):
                _continue_numbering(connection)
            return _counted(connection)
    finally:
        source.dispose()


def _copy_pages(engine: Engine, part: Path) -> dict[str, int]:
    """Copy a SQLite file as it is at one moment."""
    target = sqlite3.connect(part)
    try:
        with engine.connect() as connection:
            counted = _counted(connection)  # begins a transaction: what follows is of its state
            driver = connection.connection.driver_connection
            if not isinstance(driver, sqlite3.Connection):
                raise BackupError("backup: expected SQLite's own driver, got another")
            driver.backup(target)
    finally:
        target.close()
    return counted


def _copy_out(engine: Engine, part: Path) -> dict[str, int]:
    """Copy PostgreSQL's rows as they are at one moment into a SQLite file."""
    target = open_database(f"sqlite:///{part}", must_exist=False)
    snapshot = engine.execution_options(isolation_level="REPEATABLE READ")
    try:
        with snapshot.connect() as reading, writing(target) as connection:
            counted = _counted(reading)
            _copy_rows(reading, connection)
    finally:
        target.dispose()
    return counted


def _copy_rows(source: Connection, target: Connection) -> None:
    for table in TABLES:
        query = select(table).execution_options(yield_per=ROWS_AT_ONCE)
        for some in source.execute(query).mappings().partitions():
            target.execute(insert(table), [dict(row) for row in some])


def _finish(part: Path, expected: dict[str, int]) -> None:
    """Make it one file on disk, and hold it against what was stored."""
    copy = sqlite3.connect(part, isolation_level=None)
    try:
        copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        state = copy.execute("PRAGMA integrity_check").fetchone()[0]
        found = {
            name: copy.execute(f"SELECT count(*) FROM {name}").fetchone()[0]  # noqa: S608 - ours
            for name in expected
        }
    finally:
        copy.close()
    if state != "ok" or found != expected:
        raise BackupError(f"backup: expected a whole copy, got one that is not ({state})")
    with part.open("rb") as file:
        os.fsync(file.fileno())


def _counted(connection: Connection) -> dict[str, int]:
    return {
        table.name: connection.scalar(select(func.count()).select_from(table)) or 0
        for table in TABLES
    }


def _continue_numbering(connection: Connection) -> None:
    """Let new rows be numbered after those that brought their numbers with them."""
    for table in (one for one in TABLES if _is_numbered(one)):
        connection.execute(
            text(
                f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), "  # noqa: S608 - ours
                f"COALESCE(max(id), 0) + 1, false) FROM {table.name}"
            )
        )


def _is_numbered(table: Table) -> bool:
    return [column.name for column in table.primary_key] == ["id"]


def _is_sqlite(engine: Engine) -> bool:
    return engine.dialect.name == "sqlite"


def _remove(part: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{part}{suffix}").unlink(missing_ok=True)
