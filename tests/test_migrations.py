"""The tables of migrations are the models' on both databases, and bad databases are refused."""

from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import IntegrityError

import db.migrations
from db.errors import DatabaseUrlError, MissingDatabaseError, SchemaError
from db.models import Commit
from db.session import check, downgrade, open_database, upgrade, writing

TABLES = set(Commit.metadata.tables)
HEAD = "0004"


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


@pytest.mark.parametrize(
    ("revision", "advice"), [("0001", "db upgrade brings it"), ("9999", "a newer ddtree-bench")]
)
def test_a_database_of_another_revision_is_refused(empty_url, revision, advice):
    engine = open_database(empty_url, must_exist=False)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))

    with pytest.raises(SchemaError, match=rf"expected revision {HEAD}, got {revision} .*{advice}"):
        open_database(empty_url, must_exist=False)
    engine.dispose()


def test_a_newer_database_is_not_brought_to_this_version(empty_url):
    engine = open_database(empty_url, must_exist=False)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()

    with pytest.raises(SchemaError, match=r"got 9999 .*a newer ddtree-bench made it"):
        upgrade(empty_url)


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


def shape(connection):
    """What a schema is made of, CHECKs too, which comparing with the models leaves out."""
    inspector = inspect(connection)
    return {
        table: (
            sorted(
                (one["name"], str(one["type"]), one["nullable"])
                for one in inspector.get_columns(table)
            ),
            sorted(one["name"] for one in inspector.get_check_constraints(table)),
            sorted(one["name"] for one in inspector.get_foreign_keys(table)),
            sorted(one["name"] for one in inspector.get_unique_constraints(table)),
            sorted(
                (one["name"], tuple(one["column_names"])) for one in inspector.get_indexes(table)
            ),
        )
        for table in inspector.get_table_names()
        if table != "alembic_version"
    }


FIRST_ROWS = """
INSERT INTO commits (id, sha, committed_at, order_basis, external) VALUES
  (1, 'aaa', '2026-03-01 12:00:00+00', 'date', false),
  (2, 'bbb', '2026-03-02 12:00:00+00', 'repository', false);
INSERT INTO machines (id, name) VALUES (1, 'laptop');
INSERT INTO variants (id, label, python, requirements, env_vars, digest) VALUES
  (1, 'python 3.11', '3.11', '{"torch": "2.13.0"}', '{}', -9223372036854775808);
INSERT INTO runs (id, commit_id, machine_id, variant_id, source_digest, ingested_at) VALUES
  (1, 1, 1, 1, 7, '2026-03-01 13:00:00+00');
INSERT INTO benchmarks (id, name, version, kind, param_names) VALUES
  (1, 'step.Step.time_step', '1', 'time', '["n"]');
INSERT INTO metrics (id, name, unit, direction) VALUES (1, 'time', 'seconds', 'lower');
INSERT INTO series (id, benchmark_id, params, metric_id, machine_id, variant_id) VALUES
  (1, 1, 'n=1', 1, 1, 1);
INSERT INTO runners (id, machine_id, uid, kind, name) VALUES (1, 1, 'GPU-1', 'cuda', 'H200');
INSERT INTO runner_environments (id, runner_id, driver, digest) VALUES (1, 1, '580', 5);
INSERT INTO results (id, series_id, commit_id, run_id, runner_environment_id, started_at_ms, digest,
  status, value, n, dirty) VALUES
  (1, 1, 1, 1, 1, 1780000000000, 11, 'ok', 0.5, 3, false),
  (2, 1, 2, 1, NULL, NULL, 12, 'failed', NULL, NULL, true);
INSERT INTO samples (result_id, position, value) VALUES (1, 0, 0.4), (1, 1, 0.6);
INSERT INTO ceilings (id, runner_environment_id, source, digest) VALUES (1, 1, 'measured', 6);
INSERT INTO windows (id, uid, result_id, runner_environment_id, ceiling_id, benchmark, param_values,
  invocation, pid, started_at_s, ended_at_s, n, median_s, samples_s, timer, validity, external)
  VALUES (1, 'w', 1, 1, 1, 'step.Step.time_step', '["1"]', 'run-1', 4711, 1.0, 2.0, 3, 0.5,
  '[0.4, 0.6]', 'wall', '[]', false);
INSERT INTO window_stages (window_id, name, seconds) VALUES (1, 'verify', 0.25);
INSERT INTO window_counters (window_id, name, unit, median) VALUES (1, 'sm_active', '%', 5.5);
INSERT INTO change_points (id, series_id, commit_id, before, after, relative_change, p_value, cause,
  detected_at) VALUES (1, 1, 1, 0.4, 0.5, 0.25, 0.001, 'code', '2026-03-03 12:00:00+00');
INSERT INTO users (id, email, name, role) VALUES (1, 'a@example.org', 'A', 'triager');
INSERT INTO alerts (id, change_point_id, state, owner_id, opened_at) VALUES
  (1, 1, 'open', 1, '2026-03-03 12:00:00+00');
INSERT INTO alert_events (id, alert_id, user_id, state, created_at) VALUES
  (1, 1, 1, 'open', '2026-03-03 12:00:00+00');
INSERT INTO annotations (id, series_id, user_id, text, created_at) VALUES
  (1, 1, 1, 'noise', '2026-03-03 12:00:00+00');
INSERT INTO revisions (id, kind, created_at, summary) VALUES
  (1, 'ingest', '2026-03-01 13:00:00+00', '{}');
"""


def rows_at(url, columns=None):
    """Everything that is stored, by table; of the columns that are asked for where they are."""
    engine = open_engine(url)
    with engine.connect() as connection:
        names = columns or {
            table: [one["name"] for one in inspect(connection).get_columns(table)]
            for table in inspect(connection).get_table_names()
            if table != "alembic_version"
        }
        found = {
            table: sorted(
                map(
                    repr, connection.execute(text(f"SELECT {', '.join(names[table])} FROM {table}"))
                )
            )
            for table in names
        }
    engine.dispose()
    return names, found


def open_engine(url):
    return create_engine(url.replace("postgresql:", "postgresql+psycopg:"))


def test_the_first_schema_with_data_comes_to_the_newest_and_back_without_a_loss(empty_url):
    upgrade(empty_url, "0001")
    engine = open_engine(empty_url)
    with engine.begin() as connection:
        for statement in FIRST_ROWS.strip().split(";\n"):
            connection.execute(text(statement.rstrip(";\n").replace(":00", r"\:00")))
    with engine.connect() as connection:
        first_shape = shape(connection)
    engine.dispose()
    columns, first_rows = rows_at(empty_url)

    upgrade(empty_url)

    check(empty_url)
    assert rows_at(empty_url, columns)[1] == first_rows
    assert all(first_rows.values())

    downgrade(empty_url, "0001")

    engine = open_engine(empty_url)
    with engine.connect() as connection:
        assert shape(connection) == first_shape
    engine.dispose()
    assert rows_at(empty_url)[1] == first_rows


def test_an_upgraded_schema_is_the_one_that_new_databases_get(empty_url, engine):
    upgrade(empty_url, "0001")
    upgrade(empty_url)
    upgraded = open_engine(empty_url)

    with upgraded.connect() as connection, engine.connect() as fresh:
        if connection.dialect.name == fresh.dialect.name:
            assert shape(connection) == shape(fresh)
    upgraded.dispose()


def test_an_upgraded_table_still_refuses_what_its_first_version_refused(empty_url):
    upgrade(empty_url, "0001")
    upgrade(empty_url)
    engine = open_engine(empty_url)
    wrong = (
        "INSERT INTO results (series_id, commit_id, run_id, digest, status, value, dirty) "
        "VALUES (1, 1, 1, 1, 'failed', 1.0, false)"
    )

    with engine.connect() as connection, pytest.raises(IntegrityError, match="value_iff_measured"):
        connection.execute(text(wrong))
    engine.dispose()
