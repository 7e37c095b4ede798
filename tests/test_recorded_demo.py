"""A recorded demo history is ingested in its order, and what was planted in it is found, no more."""

import itertools
import random
import shutil
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from benchmarks._demo_history import MENDED_SPLIT, MENDED_WALK, PLAN, SLOW_SPLIT, SLOW_WALK
from db.detection import detect_all
from db.ingest import ingest
from db.models import Benchmark, ChangePoint, Commit, Series
from db.session import open_database
from tests.asv_trees import START_S, AsvTree, row

RECORDED = Path(__file__).parent.parent / "benchmarks" / "recorded"
TREES = sorted(
    path.parent
    for path in RECORDED.glob("*/commits.tsv")
    if SLOW_SPLIT in path.read_text(encoding="utf-8")
)
SUBJECTS = [edit.subject for edit in PLAN]
ATTENTION, WALK = "attention.TreeAttention.time_cold", "tree.Accept.time_accept"
LARGE_REL = 0.5  # of what is planted; small real changes are anybody's
CONTEXTS = (1024, 65536)


@pytest.fixture
def database(sqlite_template, tmp_path):
    shutil.copyfile(sqlite_template, tmp_path / "demo.db")
    engine = open_database(f"sqlite:///{tmp_path / 'demo.db'}", must_exist=True)
    yield engine
    engine.dispose()


def large_changes(database, tree):
    """Subject, benchmark, parameters and sign of each large change of a tree."""
    report = ingest(database, [tree])
    assert report.refused == ()
    assert report.order_basis == "recorded"
    detect_all(database)
    query = (
        select(Commit.subject, Benchmark.name, Series.params, ChangePoint.relative_change)
        .join(Commit, Commit.id == ChangePoint.commit_id)
        .join(Series, Series.id == ChangePoint.series_id)
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
    )
    with Session(database) as session:
        rows = session.execute(query).all()
    return {
        (subject, name, params, change > 0)
        for subject, name, params, change in rows
        if change > LARGE_REL or change < 1 / (1 + LARGE_REL) - 1
    }


def check_planted(found, *, has_attention):
    """What is planted is found at its commit, in the cases it concerns and in no others."""
    walks = {(subject, is_up) for subject, name, _, is_up in found if name == WALK}
    assert walks == {(SLOW_WALK, True), (MENDED_WALK, False)}
    splits = {
        (subject, is_up): sorted(
            p for s, n, p, u in found if (s, n, u) == (subject, ATTENTION, is_up)
        )
        for subject, is_up in ((SLOW_SPLIT, True), (MENDED_SPLIT, False))
    }
    for cases in splits.values():
        assert bool(cases) == has_attention
        assert not [case for case in cases if "1024" in case or "16384" in case]
    others = {one for one in found if one[1] not in {WALK, ATTENTION}}
    assert not others
    named = {SLOW_SPLIT, MENDED_SPLIT}
    assert not {one for one in found if one[1] == ATTENTION and one[0] not in named}


def made_up(root, *, late=0):
    """A tree of the plan's commits with the changes it plants, found `late` commits after."""
    tree = AsvTree(root, machine="demo")
    tree.benchmark(ATTENTION, [[str(one) for one in CONTEXTS]], ["context_tokens"])
    tree.benchmark(WALK, [["64"]], ["node_budget"])
    noise = random.Random(0)
    order = []
    for number, subject in enumerate(SUBJECTS):
        sha, at_s = f"{number:02x}" * 20, START_S + 3600 * number
        order.append(f"{sha}\t{at_s}\t{subject}")
        splits = _between(number - late, SLOW_SPLIT, MENDED_SPLIT)
        times = [16e-6, 3.7e-3 if splits else 77e-6]
        walk = 0.02 if _between(number, SLOW_WALK, MENDED_WALK) else 0.001
        rows = {
            ATTENTION: _row(times, [[str(one) for one in CONTEXTS]], at_s, noise),
            WALK: _row([walk], [["64"]], at_s, noise),
        }
        # Committed in the opposite order of their dates: the recorded order counts.
        tree.results(rows, sha, date=(START_S - at_s % START_S) * 1000)
    (tree.root / "commits.tsv").write_text("\n".join(order) + "\n", encoding="utf-8")
    return tree.root


def _between(number, first, end):
    return SUBJECTS.index(first) <= number < SUBJECTS.index(end)


def _row(times, params, at_s, noise):
    values = [one * noise.gauss(1.0, 0.01) for one in times]
    return row(values, params=params, started_at=at_s * 1000)


def test_what_the_plan_plants_is_found_in_a_tree_that_was_made_up(database, tmp_path):
    check_planted(large_changes(database, made_up(tmp_path / "tree")), has_attention=True)


def test_a_regression_at_another_commit_is_not_taken_for_the_planted_one(database, tmp_path):
    found = large_changes(database, made_up(tmp_path / "tree", late=2))
    with pytest.raises(AssertionError):
        check_planted(found, has_attention=True)


def test_what_is_planted_is_found_in_every_recorded_tree(sqlite_template, tmp_path):
    for number, tree in enumerate(TREES):
        path = tmp_path / f"{number}.db"
        shutil.copyfile(sqlite_template, path)
        engine = open_database(f"sqlite:///{path}", must_exist=True)
        text = (tree / "commits.tsv").read_text(encoding="utf-8")
        has_attention = "cuda_events" in _sidecar(tree)
        subjects = {line.split("\t")[2] for line in text.splitlines()}
        assert {SLOW_SPLIT, MENDED_SPLIT, SLOW_WALK, MENDED_WALK} <= subjects
        assert _size(tree) < 1_500_000
        check_planted(large_changes(engine, tree), has_attention=has_attention)
        engine.dispose()


def _sidecar(tree):
    return "".join(p.read_text(encoding="utf-8") for p in (tree / "telemetry").glob("*.jsonl"))


def _size(tree):
    files = itertools.chain(tree.rglob("*.json"), tree.rglob("*.jsonl"))
    return sum(path.stat().st_size for path in files)
