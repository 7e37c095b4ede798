"""Which revision a database's tables are of, and how they come to another; Alembic does it.

It is configured here in code; there is no alembic.ini.
"""

from functools import cache
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError

from db.errors import DamagedDatabaseError, MissingDatabaseError, SchemaError


def other_revision(current: str, url: URL) -> SchemaError:
    """Say what to do about tables of another revision: bring them, or this program, up to date."""
    advice = (
        "ddtree-bench db upgrade brings it up to date"
        if current in known()
        else "a newer ddtree-bench made it: install that one"
    )
    return SchemaError(
        f"schema: expected revision {newest()}, got {current} at {shown(url)} ({advice})"
    )


def shown(url: URL) -> str:
    """Write an address without its password."""
    return url.render_as_string(hide_password=True)


def revision_of(engine: Engine) -> str | None:
    """Read the revision of the tables; None where there are none.

    Raises
    ------
    DbError
        No database answers, it is damaged, or its file is none.
    """
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except DBAPIError as error:
        reason = str(error.orig).strip().splitlines()[0]
        if "not a database" in reason:
            raise SchemaError(
                f"database: expected a SQLite file at {shown(engine.url)}, got another kind"
            ) from None
        if "malformed" in reason:
            raise DamagedDatabaseError(
                f"database: expected a whole SQLite file at {shown(engine.url)}, got a damaged "
                f"one ({reason}); a backup or the result files bring it back"
            ) from None
        raise MissingDatabaseError(
            f"database: expected one at {shown(engine.url)}, none answers ({reason})"
        ) from None


@cache
def known() -> frozenset[str]:
    """Name all revisions that this program can bring tables to."""
    scripts = ScriptDirectory.from_config(_config()).walk_revisions()
    return frozenset(script.revision for script in scripts)


@cache
def newest() -> str | None:
    """Name the revision that this program's models are of."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


def migrate(engine: Engine, revision: str, *, down: bool = False) -> None:
    """Run the migrations in one transaction on a connection handed to them."""
    config = _config()
    with engine.connect() as connection:
        # Copying a table in batch mode drops the old one, which must not cascade.
        _set_foreign_keys(connection, "OFF")
        config.attributes["connection"] = connection
        (command.downgrade if down else command.upgrade)(config, revision)
        connection.commit()
        _set_foreign_keys(connection, "ON")


def _set_foreign_keys(connection: Connection, state: str) -> None:
    """Switch SQLite's foreign keys outside of a transaction, where alone it has an effect."""
    driver = connection.connection.driver_connection
    if connection.dialect.name == "sqlite" and driver is not None:
        driver.execute(f"PRAGMA foreign_keys = {state}").close()
