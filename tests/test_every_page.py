"""Every page on databases that are empty, small, hostile, damaged or missing: nothing is raised."""

import os
import re
import sqlite3
from contextlib import closing

import pytest

from dashboard.theme import FIRST_PAGE, PAGES
from tests import pages_database as demo
from tests.test_pages import opened, words

EVERY_PAGE = (FIRST_PAGE, *PAGES)
HOSTILE = (
    "<script>alert(1)</script> **b** [x](javascript:alert(1)) `c` $x^2$ :red[r] ![i](http://e/x) "
    "\u202eltr \u05d0 😀 " + "y" * 10_000
)


@pytest.mark.parametrize("name", EVERY_PAGE)
def test_an_empty_database_is_explained(tmp_path, name):
    address = f"sqlite:///{tmp_path}/empty.db"
    demo.build_empty(address)

    app = opened(name, address)

    assert not app.exception
    assert re.search("ddtree-bench (ingest|run|detect)", words(app))
    assert "Nothing has been stored yet" in words(app)


@pytest.mark.parametrize("text", ["first", HOSTILE], ids=["plain", "hostile"])
def test_a_database_of_one_commit_looks_deliberate_whatever_is_written_in_it(tmp_path, text):
    address = f"sqlite:///{tmp_path}/one.db"
    demo.build_one_commit(address, name=f"step.Step.time_{text}", said=text)

    for name in EVERY_PAGE:
        app = opened(name, address)

        assert not app.exception, name
        assert "nan" not in words(app).split()
        assert not re.search(r"(?<!\\)(<|!\[|\$x|:red\[)", words(app))
        assert max(map(len, words(app).splitlines())) < 3_000


def damaged(path, kind):
    """Copy the demo and damage it."""
    file = path / f"{kind}.db"
    demo.build(f"sqlite:///{file}")
    with closing(sqlite3.connect(file)) as connection:
        if kind == "missing table":
            connection.execute("DROP TABLE alerts")
        if kind == "other revision":
            connection.execute("UPDATE alembic_version SET version_num = 'beef'")
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if kind == "cut off":
        os.truncate(file, file.stat().st_size // 2)
    return f"sqlite:///{file}"


@pytest.mark.parametrize(
    ("kind", "message", "names"),
    [
        ("missing table", "no such table", ("overview", "history", "diagnose", "alerts")),
        ("other revision", "expected revision", EVERY_PAGE),
        ("cut off", "got a damaged", EVERY_PAGE),
    ],
)
def test_a_damaged_database_is_told_once(tmp_path, kind, message, names):
    address = damaged(tmp_path, kind)

    for name in names:
        app = opened(name, address)

        assert not app.exception, name
        (error,) = app.error
        assert message in error.value


@pytest.mark.parametrize("name", ["overview", "alerts"])
def test_a_missing_database_is_explained_and_not_made(tmp_path, name):
    file = tmp_path / "missing.db"

    app = opened(name, f"sqlite:///{file}")

    assert not app.exception
    assert "found none" in app.error[0].value
    assert not file.exists()


def test_a_database_without_tables_is_explained(tmp_path):
    file = tmp_path / "bare.db"
    sqlite3.connect(file).close()

    app = opened("overview", f"sqlite:///{file}")

    assert not app.exception
    assert "expected tables" in app.error[0].value


def test_a_file_that_is_no_database_is_explained(tmp_path):
    file = tmp_path / "notes.db"
    file.write_text("these are notes, not tables\n" * 50)

    app = opened("overview", f"sqlite:///{file}")

    assert not app.exception
    assert "another kind" in app.error[0].value
