"""A first load checks foreign keys at its end; on PostgreSQL alone, and only where nobody waits for it."""

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError

from db.first_load import put_keys_back, take_keys_off
from db.ingest import ingest
from db.models import Commit, Result, Sample
from db.registry import table_of
from db.session import check, open_database, writing
from tests.asv_trees import BENCHMARK, START_S, AsvTree, row

CASES = 6
ORPHAN = {
    "series_id": 1,
    "commit_id": 1,
    "run_id": 1,
    "digest": 1,
    "status": "ok",
    "value": 1.0,
    "dirty": False,
}
DEFINED = text(
    "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid), convalidated "
    "FROM pg_constraint WHERE contype = 'f' ORDER BY conname"
)


@pytest.fixture
def postgres(postgres_server, postgres_url):
    engine = open_database(postgres_url, must_exist=True)
    with engine.begin() as connection:
        tables = ", ".join(Commit.metadata.tables)
        connection.execute(text(f"TRUNCATE {tables} RESTART IDENTITY CASCADE"))
    yield engine
    engine.dispose()


def keys(connection):
    return [tuple(key) for key in connection.execute(DEFINED)]


def tree(root, commit):
    """A tree of one commit with some samples."""
    told = AsvTree(root)
    params = [[str(case) for case in range(CASES)]]
    told.benchmark(params=params, names=["n"])
    samples = [[0.5, 0.6] if case % 2 else None for case in range(CASES)]
    start = START_S * 1000
    rows = {BENCHMARK: row([0.5] * CASES, params=params, samples=samples, started_at=start)}
    told.results(rows, commit, date=start)
    return told.root


def load_an_orphan(engine):
    with writing(engine) as connection:
        off = take_keys_off(connection, most_stored=0)
        connection.execute(insert(table_of(Result)), ORPHAN)
        put_keys_back(connection, off)


@pytest.mark.postgres
def test_a_first_load_leaves_the_keys_as_they_were(postgres, tmp_path, monkeypatch):
    monkeypatch.setattr("db.result_store.CELLS_AT_ONCE", 4)
    with postgres.connect() as connection:
        before = keys(connection)
    asked = []

    def spy(connection, keys_off):
        asked.append((len(keys(connection)), len(keys_off)))
        put_keys_back(connection, keys_off)

    monkeypatch.setattr("db.result_store.put_keys_back", spy)

    for number, commit in enumerate(("1a" * 20, "2b" * 20)):
        ingest(postgres, [tree(tmp_path / str(number), commit)])

    with postgres.connect() as connection:
        assert keys(connection) == before
        assert len(connection.scalars(select(Result.id)).all()) == 2 * CASES
        assert len(connection.scalars(select(Sample.result_id)).all()) == 2 * CASES
    # Of the second load, more is there already than the first one may find.
    assert asked == [(len(before) - 6, 6), (len(before), 0)]
    check(postgres.url.render_as_string(hide_password=False))


@pytest.mark.postgres
def test_a_result_without_its_parents_ends_a_first_load(postgres):
    with pytest.raises(IntegrityError, match="fk_results_"):
        load_an_orphan(postgres)

    with postgres.connect() as connection:
        assert connection.scalars(select(Result.id)).all() == []


@pytest.mark.postgres
def test_keys_stay_on_while_somebody_reads(postgres):
    with postgres.connect() as reader, writing(postgres) as connection:
        reader.execute(select(Result.id)).all()

        assert take_keys_off(connection, most_stored=0) == ()
        with pytest.raises(IntegrityError), connection.begin_nested():
            connection.execute(insert(table_of(Result)), ORPHAN)


def test_sqlite_keeps_its_keys(tmp_path):
    engine = open_database(f"sqlite:///{tmp_path / 'a.db'}", must_exist=False)
    with writing(engine) as connection:
        assert take_keys_off(connection, most_stored=0) == ()
    engine.dispose()
