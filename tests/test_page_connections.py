"""Readers at once share a database: nobody's connection is lost, a file's are closed after all."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from dashboard.data import opened
from dashboard.open_databases import close
from tests import pages_database as demo

READERS = 8
RUNS = 40
KEPT = 5  # by SQLAlchemy, unless told otherwise


def held(path):
    """Name the open files of this process that belong to a database."""
    files = {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}
    return {file for file in files if file.startswith(str(path))}


def ask(source):
    with Session(source.engine) as session:
        return session.execute(text("SELECT count(*) FROM results")).scalar_one()


def test_a_reader_who_leaves_keeps_the_connection_of_another(tmp_path):
    path = tmp_path / "demo.db"
    demo.build_one_commit(f"sqlite:///{path}")
    with opened(f"sqlite:///{path}") as stays:
        pool = stays.engine.pool
        with opened(f"sqlite:///{path}") as leaves:
            assert ask(leaves) == 2
        assert stays.engine.pool is pool
        assert ask(stays) == 2
        assert held(path)
    assert not held(path)


def test_a_file_is_replaced_between_two_runs(tmp_path):
    path, other = tmp_path / "demo.db", tmp_path / "other.db"
    demo.build_one_commit(f"sqlite:///{path}")
    demo.build_empty(f"sqlite:///{other}")
    with opened(f"sqlite:///{path}") as source:
        assert ask(source) == 2
    Path(other).replace(path)
    with opened(f"sqlite:///{path}") as source:
        assert ask(source) == 0


@pytest.mark.postgres
def test_a_server_keeps_as_few_connections_as_read_at_once(postgres_server, postgres_url):
    def read(_):
        with opened(postgres_url) as source:
            return ask(source)

    def has_at_most(most):
        """Whether the others have gone: they were told to, and do so in their own time."""
        until = time.monotonic() + 30
        count = "SELECT count(*) FROM pg_stat_activity WHERE datname = 'results'"
        while server.execute(count).fetchone()[0] > most and time.monotonic() < until:
            time.sleep(0.05)
        return server.execute(count).fetchone()[0] <= most

    with psycopg.connect(
        postgres_server.replace("&", " "), dbname="postgres", autocommit=True
    ) as server:
        with ThreadPoolExecutor(READERS) as pool:
            assert len(list(pool.map(read, range(RUNS)))) == RUNS
        assert has_at_most(KEPT)
        # A restart of the server ends them all; the next reader does not notice.
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'results'"
        )
        assert read(0) >= 0
        close()
        assert has_at_most(0)
