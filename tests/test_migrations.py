"""The tables of migrations are the models' on both databases, and bad databases are refused."""

from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

import db.migrations
from db.errors import DatabaseUrlError, MissingDatabaseError, SchemaError
from db.models import Commit
from db.session import check, downgrade, open_database, upgrade, writing

TABLES = set(Commit.metadata.tables)


def tables_at(url):
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    found = set(inspect(engine).get_table_names()) - {"alembic_version"}
    engine.dispose()
    return found


def test_upgrade_makes_the_models_tables_and_downgrade_leaves_none(empty_url):
    upgrade(empty_url)

    check(empty_url)
    assert tables_at(empty_url) == TABLES

    downgrade(empty_url, "base")

    assert tables_at(empty_url) == set()


def test_upgrading_twice_changes_nothing(empty_url):
    upgrade(empty_url)
    upgrade(empty_url)

    check(empty_url)


def test_a_table_that_lost_a_column_is_found(empty_url):
    engine = open_database(empty_url, must_exist=False)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE samples DROP COLUMN value"))
    engine.dispose()

    with pytest.raises(SchemaError, match="1 differences"):
        check(empty_url)


def test_every_constraint_and_index_has_the_name_of_the_convention(engine):
    inspector = inspect(engine)
    names = [
        found["name"]
        for table in TABLES
        for found in (
            inspector.get_pk_constraint(table),
            *inspector.get_foreign_keys(table),
            *inspector.get_unique_constraints(table),
            *inspector.get_check_constraints(table),
            *inspector.get_indexes(table),
        )
    ]

    assert len(names) > 60
    assert {name[:3] for name in names} == {"pk_", "fk_", "uq_", "ck_", "ix_"}


def test_no_migration_imports_the_models():
    folder = Path(next(iter(db.migrations.__path__))) / "versions"

    lines = [
        line
        for path in folder.glob("*.py")
        for line in path.read_text(encoding="utf-8").split("\n")
    ]

    assert lines
    assert not [line for line in lines if line.startswith(("import db", "from db"))]


def test_opening_an_empty_database_makes_its_tables_unless_it_must_exist(empty_url):
    with pytest.raises(MissingDatabaseError, match="db upgrade"):
        open_database(empty_url, must_exist=True)

    open_database(empty_url, must_exist=False).dispose()

    assert tables_at(empty_url) == TABLES


def test_a_database_of_another_revision_is_refused(empty_url):
    engine = open_database(empty_url, must_exist=False)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'older'"))

    with pytest.raises(SchemaError, match=r"expected revision 0001, got older .*db upgrade"):
        open_database(empty_url, must_exist=False)
    engine.dispose()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://admin:hunter2@host/results",
        "no url hunter2",
        "sqlite://",
        "sqlite:///:memory:",
        "postgresql://admin:hunter2@host:port/results",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url):
    with pytest.raises(DatabaseUrlError) as refusal:
        open_database(url, must_exist=False)

    assert "hunter2" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_server_that_does_not_answer_is_missing_and_the_password_stays_unsaid():
    url = "postgresql://admin:hunter2@127.0.0.1:1/results"

    with pytest.raises(MissingDatabaseError, match="none answers") as refusal:
        open_database(url, must_exist=True)

    assert "hunter2" not in str(refusal.value)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path):
    for path in (tmp_path / "none.db", tmp_path / "no" / "folder.db"):
        with pytest.raises(MissingDatabaseError, match=path.name):
            open_database(f"sqlite:///{path}", must_exist=True)
    assert not (tmp_path / "none.db").exists()

    with pytest.raises(MissingDatabaseError, match="folder"):
        open_database(f"sqlite:///{tmp_path / 'no' / 'folder.db'}", must_exist=False)


def test_a_file_that_is_no_database_is_refused(tmp_path):
    path = tmp_path / "notes.db"
    path.write_text("this is a text, not a database" * 100, encoding="utf-8")

    with pytest.raises(SchemaError, match="another kind"):
        open_database(f"sqlite:///{path}", must_exist=True)


def test_a_failed_write_leaves_nothing(engine):
    add = text("INSERT INTO users (email, name, role) VALUES ('a@example.org', 'A', 'viewer')")

    def write_and_fail():
        with writing(engine) as connection:
            connection.execute(add)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()

    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM users")) == 0


def test_sqlite_enforces_foreign_keys_and_waits_for_its_lock(tmp_path):
    engine = open_database(f"sqlite:///{tmp_path / 'a.db'}", must_exist=False)

    with engine.connect() as connection:
        on = connection.scalar(text("PRAGMA foreign_keys"))
        journal = connection.scalar(text("PRAGMA journal_mode"))
        busy = connection.scalar(text("PRAGMA busy_timeout"))
    engine.dispose()

    assert (on, journal, busy) == (1, "wal", 30_000)
