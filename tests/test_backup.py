"""A backup is everything there was at one moment, and comes back into either database."""

import sqlite3
import threading

import pytest
from click.testing import CliRunner
from sqlalchemy import select
from sqlalchemy.orm import Session

from dashboard.cli import main
from db.backup import BackupError, backup, restore
from db.errors import MissingDatabaseError, SchemaError
from db.exclusions import Selection, exclude
from db.ingest import ingest
from db.models import Commit
from db.session import check, open_database
from tests.asv_trees import BENCHMARK, AsvTree, row


@pytest.fixture(autouse=True)
def away_from_any_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tree(engine, tmp_path):
    tree = AsvTree(tmp_path / "results")
    params = [[str(number) for number in range(40)]]
    tree.benchmark(params=params, names=["n"])
    samples = [[1.0, 2.0, float(number)] for number in range(40)]
    for number in range(4):
        tree.results(
            {BENCHMARK: row([1.0 + number] * 40, params=params, samples=samples)},
            f"{number:08x}" * 5,
        )
    tree.line(params=["1"], commit="00000001" * 5, stage_seconds={"verify": 0.5})
    ingest(engine, [tree.root])
    exclude(engine, Selection("00000002"), author="ann", reason="fan")
    return tree


def everything(engine):
    with Session(engine) as session:
        return {
            table.name: sorted(map(repr, session.execute(select(table))))
            for table in Commit.metadata.sorted_tables
        }


def opened(path):
    return open_database(f"sqlite:///{path}", must_exist=True)


def test_a_backup_opens_as_it_is_and_holds_everything(engine, tree, tmp_path):
    rows = backup(engine, tmp_path / "copy.db")

    copy = opened(tmp_path / "copy.db")
    found = everything(copy)
    copy.dispose()
    check(f"sqlite:///{tmp_path / 'copy.db'}")
    assert found == everything(engine)
    assert (rows["results"], rows["samples"], rows["windows"]) == (160, 480, 1)
    assert sorted(path.name for path in tmp_path.glob("copy.db.*")) == []


def test_a_restored_database_holds_everything_and_goes_on(engine, empty_url, tree, tmp_path):
    backup(engine, tmp_path / "copy.db")
    target = open_database(empty_url, must_exist=False)

    rows = restore(tmp_path / "copy.db", target)

    assert rows["results"] == 160
    assert everything(target) == everything(engine)
    # What comes next gets numbers of its own, and what came before is known.
    tree.results({BENCHMARK: row([1.0] * 40, params=[[str(n) for n in range(40)]])}, "f" * 40)
    report = ingest(target, [tree.root])
    target.dispose()
    assert (report.new_results, report.unchanged) == (40, 160)


def test_nothing_is_overwritten(engine, tree, tmp_path):
    (tmp_path / "copy.db").write_text("mine")

    with pytest.raises(BackupError, match="expected a new file"):
        backup(engine, tmp_path / "copy.db")
    assert (tmp_path / "copy.db").read_text() == "mine"

    backup(engine, tmp_path / "other.db")
    with pytest.raises(BackupError, match="expected an empty database"):
        restore(tmp_path / "other.db", engine)


def test_a_folder_that_is_not_there_is_named(engine, tree, tmp_path):
    with pytest.raises((BackupError, MissingDatabaseError), match="nowhere"):
        backup(engine, tmp_path / "nowhere" / "copy.db")


def test_a_file_of_another_kind_is_no_backup(engine, tmp_path):
    (tmp_path / "notes.db").write_text("no database" * 1000)

    with pytest.raises(SchemaError, match="another kind"):
        restore(tmp_path / "notes.db", engine)


def test_a_damaged_copy_never_gets_the_name(engine, tree, tmp_path, monkeypatch):
    monkeypatch.setattr("db.backup._counted", lambda _: {"results": 161})

    with pytest.raises(BackupError, match="expected a whole copy"):
        backup(engine, tmp_path / "copy.db")

    assert list(tmp_path.glob("copy.db*")) == []


def test_a_backup_during_an_ingestion_is_of_one_moment(engine, database_url, tree, tmp_path):
    params = [[str(number) for number in range(40)]]
    for number in range(10, 40):
        tree.results({BENCHMARK: row([2.0] * 40, params=params)}, f"{number:08x}" * 5)
    writer = threading.Thread(target=lambda: ingest(engine, [tree.root]))
    writer.start()
    counts = []
    for number in range(4):
        backup(engine, tmp_path / f"{number}.db")
        with sqlite3.connect(tmp_path / f"{number}.db") as copy:
            counts.append(copy.execute("SELECT count(*) FROM results").fetchone()[0])
        copy.close()
    writer.join()

    assert set(counts) <= {160, 160 + 30 * 40}
    assert counts == sorted(counts)


def test_the_commands_back_up_and_restore(tree, database_url, tmp_path):
    made = CliRunner().invoke(main, ["--db", database_url, "db", "backup", "copy.db"])
    back = CliRunner().invoke(main, ["--db", "sqlite:///new.db", "db", "restore", "copy.db"])
    twice = CliRunner().invoke(main, ["--db", database_url, "db", "backup", "copy.db"])

    assert made.output.startswith("backup: ")
    assert back.output.split(" from ")[0] == made.output.split(" in ")[0].replace(
        "backup", "restore"
    )
    assert twice.exit_code == 2
    assert "expected a new file" in twice.output
