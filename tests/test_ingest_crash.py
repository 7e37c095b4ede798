"""Many writers lose and duplicate nothing, and a killed one leaves a whole database behind."""

import random

import pytest
from sqlalchemy import create_engine, func, select, text

from db.ingest import ingest
from db.models import Commit, Result, Run, Sample, Series, Window
from db.session import check, open_database
from tests.asv_trees import BENCHMARK, START_S, AsvTree, row
from tests.ingest_workers import workers

CASES, FILES = 60, 2
WHOLE = (Commit, Run, Series, Result, Sample, Window)


@pytest.fixture
def run(tmp_path):
    with workers(tmp_path) as run:
        yield run


def grow_tree(root, number):
    """A tree of its own commits, with samples and a sidecar."""
    tree = AsvTree(root)
    params = [[str(case) for case in range(CASES)]]
    tree.benchmark(params=params, names=["n"])
    for file in range(FILES):
        sha = f"{number * FILES + file:08x}" * 5
        values = [1e-3 * (case + 1) + 1e-6 * number for case in range(CASES)]
        samples = [[value * 0.99, value, value * 1.01] for value in values]
        tree.results({BENCHMARK: row(values, params=params, samples=samples)}, sha)
        uid = f"{number}-{file}"
        tree.line(window_id=uid, commit=sha, params=["3"], started_at=START_S + 1.0)
    return root


@pytest.fixture
def grown(tmp_path):
    def grow(count):
        return [grow_tree(tmp_path / f"tree{number}", number) for number in range(count)]

    return grow


def contents(url):
    """Everything that matters, without ids, which depend on who came first."""
    query = (
        select(
            Commit.sha,
            Series.params,
            Result.started_at_ms,
            Result.value,
            func.count(Sample.value),
            func.sum(Sample.value),
        )
        .join(Result, Result.commit_id == Commit.id)
        .join(Series, Series.id == Result.series_id)
        .outerjoin(Sample, Sample.result_id == Result.id)
        .group_by(Commit.sha, Series.params, Result.id)
        .order_by(Commit.sha, Series.params, Result.started_at_ms)
    )
    windows = (
        select(Window.uid, Commit.sha)
        .join(Result, Result.id == Window.result_id)
        .join(Commit, Commit.id == Result.commit_id)
        .order_by(Window.uid)
    )
    engine = open_database(url, must_exist=True)
    with engine.connect() as connection:
        found = [tuple(one) for one in connection.execute(query)]
        joined = [tuple(one) for one in connection.execute(windows)]
        sizes = [connection.scalar(select(func.count()).select_from(one)) for one in WHOLE]
    engine.dispose()
    return found, joined, sizes


def undisturbed(trees, tmp_path):
    url = f"sqlite:///{tmp_path / 'undisturbed.db'}"
    engine = open_database(url, must_exist=False)
    for tree in trees:
        ingest(engine, [tree])
    engine.dispose()
    found, joined, sizes = contents(url)
    assert sizes[3] == len(found) == CASES * FILES * len(trees)
    assert len(joined) == FILES * len(trees)
    return found, joined, sizes


def assert_whole(url):
    """The file is sound, every row has what it refers to, and no run is there in part."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
            assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
        a_run = select(func.count(Result.id)).group_by(Result.run_id)
        assert set(connection.scalars(a_run)) <= {CASES}
        sampled = select(func.count(Sample.position)).group_by(Sample.result_id)
        assert set(connection.scalars(sampled)) <= {3}
        assert connection.scalar(select(func.count(Sample.value))) == 3 * connection.scalar(
            select(func.count(Result.id))
        )
    engine.dispose()


def test_16_processes_at_once_lose_and_duplicate_nothing(database_url, grown, run, tmp_path):
    trees = grown(16)
    # Each tree is in the hands of two processes, which come to it at different times.
    jobs = [
        {"url": database_url, "trees": [str(trees[(first + k) % 16]) for k in (0, 5)]}
        for first in range(16)
    ]

    answers = run(*jobs)

    assert [answer["status"] for answer in answers] == [0] * 16
    assert sum(answer["new"] for answer in answers) == CASES * FILES * 16
    assert_whole(database_url)
    assert contents(database_url) == undisturbed(trees, tmp_path)


def test_kills_at_random_moments_leave_a_whole_database_and_a_rerun_completes_it(
    database_url, grown, run, tmp_path, is_exhaustive
):
    kills = 100 if is_exhaustive else 8
    trees = grown(8)
    stopwatch = random.Random(7)
    # What is there already takes time to read before anything new is written.
    before = 0
    interrupted = 0
    for _ in range(kills):
        moment = stopwatch.uniform(0.0, 0.12 + 0.06 * before / (CASES * FILES))
        job = {"url": database_url, "trees": [str(tree) for tree in trees]}
        [answer] = run(job | {"kill_after_s": moment})

        interrupted += answer["new"] is None
        assert_whole(database_url)
        stored = contents(database_url)[2][3]
        assert stored >= before
        assert stored % (CASES * FILES) == 0
        before = stored
        if stored == CASES * FILES * len(trees):
            before = empty(database_url)

    [answer] = run({"url": database_url, "trees": [str(tree) for tree in trees]})

    check(database_url)
    assert interrupted >= kills / 2
    assert answer["new"] == CASES * FILES * len(trees) - before
    assert contents(database_url) == undisturbed(trees, tmp_path)


def empty(url):
    """Begin again: kills must find something to interrupt."""
    engine = open_database(url, must_exist=True)
    with engine.begin() as connection:
        for table in reversed(Commit.metadata.sorted_tables):
            connection.execute(table.delete())
    engine.dispose()
    return 0
