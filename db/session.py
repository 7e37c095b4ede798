"""How a database is opened, brought up to date and checked; nothing knows what it holds.

SQLite is put into WAL mode with foreign keys on, and begins its transactions itself, so that a
writer takes the write lock at once instead of failing half-way. PostgreSQL is reached through
psycopg 3.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    RootTransaction,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from db import schema_revisions as schema
from db.errors import (
    BusyError,
    DatabaseUrlError,
    DbError,
    MissingDatabaseError,
    SchemaError,
)
from db.models import Commit

DEFAULT_URL = "sqlite:///ddtree-bench.db"  # where nobody names another
BUSY_TIMEOUT_MS = 30_000  # of a reader; it meets a lock only while tables are being changed
WRITE_TIMEOUT_MS = 600_000  # of a writer, who waits for all that came before
MOST_BOUND = 10_000  # parameters of one statement; SQLite takes 32 766, PostgreSQL 65 535
T = TypeVar("T")
DRIVERS = {
    "sqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


def open_database(url: str, *, must_exist: bool) -> Engine:
    """Give back an engine on a database whose tables are this version's.

    Parameters
    ----------
    url : `sqlite:///FILE` or `postgresql://…`
    must_exist : False creates the file and the tables of an empty database

    Raises
    ------
    DatabaseUrlError
        The URL cannot be read, or names another kind of database.
    MissingDatabaseError
        Nothing answers there, or (`must_exist`) it has no tables.
    SchemaError
        Its tables are of another version; `upgrade` brings them up to date.
    DamagedDatabaseError
        The file is cut off or overwritten.
    """
    engine = _connectable(url, must_exist=must_exist)
    try:
        _bring_to_head(engine, create=not must_exist)
    except BaseException:
        engine.dispose()
        raise
    return engine


def check_again(engine: Engine) -> None:
    """Refuse what has become of an opened database since; raises what `open_database` raises."""
    if engine.dialect.name == "sqlite":
        _require_file(Path(engine.url.database or ""))
    _bring_to_head(engine, create=False)


def chunks(values: Sequence[T]) -> list[Sequence[T]]:
    """Cut values into pieces that fit the bound parameters of both databases."""
    return [values[start : start + MOST_BOUND] for start in range(0, len(values), MOST_BOUND)]


@contextmanager
def opened(url: str, *, must_exist: bool) -> Iterator[Engine]:
    """Open a database for a block and close it; raises what `open_database` raises.

    A SQLite file that was made for the block goes again if the block ends in a `DbError`: bad
    input leaves no empty database behind.
    """
    parsed = _parse(url)
    file = Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None
    is_new = file is not None and not file.exists()
    engine = open_database(url, must_exist=must_exist)
    try:
        yield engine
    except DbError:
        engine.dispose()
        if file is not None and is_new:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{file}{suffix}").unlink(missing_ok=True)
        raise
    finally:
        engine.dispose()


def upgrade(url: str, revision: str = "head") -> None:
    """Create the tables or bring them to a revision, the newest unless told otherwise.

    Raises
    ------
    SchemaError
        A newer version of this program made them.
    """
    engine = _connectable(url, must_exist=False)
    try:
        current = schema.revision_of(engine)
        if current is not None and current not in schema.known():
            raise schema.other_revision(current, engine.url)
        schema.migrate(engine, revision)
    finally:
        engine.dispose()


def downgrade(url: str, revision: str) -> None:
    """Take the tables back to a revision; `base` leaves none."""
    engine = _connectable(url, must_exist=True)
    try:
        schema.migrate(engine, revision, down=True)
    finally:
        engine.dispose()


def check(url: str) -> None:
    """Compare the tables with the models.

    Raises
    ------
    SchemaError
        They differ; the message names the first difference.
    """
    engine = open_database(url, must_exist=True)
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            differences = compare_metadata(context, Commit.metadata)
    finally:
        engine.dispose()
    if differences:
        raise SchemaError(
            f"schema: expected the models' tables, got {len(differences)} differences "
            f"(first: {differences[0]})"
        )


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """One transaction that holds the write lock from its start; an error leaves nothing of it.

    Raises
    ------
    BusyError
        Others held the lock for `WRITE_TIMEOUT_MS`.
    """
    writer = engine.execution_options(ddtree_begin="IMMEDIATE")
    with writer.connect() as connection, _begin_to_write(connection):
        yield connection


def _begin_to_write(connection: Connection) -> RootTransaction:
    """Begin a transaction that nobody else can write beside.

    SQLite has one writer at a time; the same on PostgreSQL, so that both behave alike.
    """
    is_sqlite = connection.dialect.name == "sqlite"
    try:
        if is_sqlite:
            _set_busy_timeout(connection, WRITE_TIMEOUT_MS)
        transaction = connection.begin()
        if not is_sqlite:
            connection.execute(text(f"SET LOCAL lock_timeout = {WRITE_TIMEOUT_MS}"))
            connection.execute(text("LOCK TABLE commits IN SHARE ROW EXCLUSIVE MODE"))
            connection.execute(text("SET LOCAL lock_timeout = 0"))
    except OperationalError as error:
        raise BusyError(
            f"database: expected to write within {WRITE_TIMEOUT_MS // 1000} s, others held its "
            f"lock all the time ({str(error.orig).strip().splitlines()[0]})"
        ) from None
    finally:
        if is_sqlite:
            _set_busy_timeout(connection, BUSY_TIMEOUT_MS)
    return transaction


def _connectable(url: str, *, must_exist: bool) -> Engine:
    """Check the URL and give back an engine; SQLite's file must exist where it is asked to."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        file = Path(parsed.database or "")
        if must_exist:
            _require_file(file)
        if not file.parent.is_dir():
            raise MissingDatabaseError(f"database: expected a folder {file.parent}, found none")
    # A server may have been started anew since; a file's connections do not outlive it.
    engine = create_engine(parsed, pool_pre_ping=parsed.get_backend_name() != "sqlite")
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
    return engine


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise MissingDatabaseError(
            f"database: expected a SQLite file at {file}, found none "
            "(ddtree-bench db upgrade makes it)"
        )


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The text itself may carry a password, so it is not repeated.
        raise DatabaseUrlError(
            "database URL: expected sqlite:///FILE or postgresql://…, got text without that form"
        ) from None
    driver = DRIVERS.get(parsed.drivername)
    if driver is None:
        raise DatabaseUrlError(
            f"database URL: expected one of {', '.join(sorted(DRIVERS))}, got {parsed.drivername}"
        )
    if driver == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise DatabaseUrlError("database URL: expected sqlite:///FILE, got no file")
    return parsed.set(drivername=driver)


def _bring_to_head(engine: Engine, *, create: bool) -> None:
    """Refuse tables of another revision; make them where there are none and `create` says so."""
    current = schema.revision_of(engine)
    if current is None and not create:
        raise MissingDatabaseError(
            f"database: expected tables at {schema.shown(engine.url)}, found none "
            "(ddtree-bench db upgrade makes them)"
        )
    if current is None:
        schema.migrate(engine, "head")
    elif current != schema.newest():
        raise schema.other_revision(current, engine.url)


def _set_busy_timeout(connection: Connection, milliseconds: int) -> None:
    driver = connection.connection.driver_connection
    if driver is not None:
        driver.execute(f"PRAGMA busy_timeout = {milliseconds}").close()


def _on_sqlite_connect(connection: object, record: ConnectionPoolEntry) -> None:
    del record
    # The driver's own transactions begin late and not around DDL; _on_sqlite_begin does it.
    connection.isolation_level = None  # type: ignore[attr-defined]
    for pragma in (
        f"busy_timeout = {BUSY_TIMEOUT_MS}",
        "journal_mode = WAL",
        "synchronous = NORMAL",
        "foreign_keys = ON",
        "cache_size = -65536",
    ):
        connection.execute(f"PRAGMA {pragma}").close()  # type: ignore[attr-defined]


def _on_sqlite_begin(connection: Connection) -> None:
    mode = connection.get_execution_options().get("ddtree_begin", "DEFERRED")
    connection.exec_driver_sql(f"BEGIN {mode}")
