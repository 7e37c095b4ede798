"""Any asv tree becomes rows, once; a bad file is named and leaves nothing."""

import json
import math
import os
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.columns import Status
from db.errors import IngestError
from db.ingest import ingest
from db.models import (
    Benchmark,
    Commit,
    Machine,
    Metric,
    Result,
    Revision,
    Run,
    Sample,
    Series,
    Variant,
)
from db.queries import history, series
from db.session import open_database
from tests.asv_trees import BENCHMARK, COLUMNS, INF, NAN, SHA, START_S, AsvTree, GitRepository, row

TABLES = (Commit, Machine, Variant, Run, Benchmark, Metric, Series, Result, Sample, Revision)
SUNPY_FILES, SUNPY_BENCHMARKS = 1396, 10


@pytest.fixture
def tree(tmp_path):
    return AsvTree(tmp_path / "results")


@pytest.fixture(autouse=True)
def away_from_any_repository(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def rows(engine, *columns, order=Result.id):
    with Session(engine) as session:
        return [tuple(found) for found in session.execute(select(*columns).order_by(order))]


def sizes(engine):
    with Session(engine) as session:
        return [session.scalar(select(func.count()).select_from(table)) for table in TABLES]


def test_params_are_named_in_the_order_of_their_product(engine, tree):
    params = [["1024", "65536"], ["'a'", "'b'"]]
    tree.benchmark(params=params, names=["context", "mode"])
    tree.results({BENCHMARK: row([1.0, 2.0, 3.0, 4.0], params=params)})

    report = ingest(engine, [tree.root])

    assert (report.files, report.values, report.new_results) == (1, 4, 4)
    assert rows(engine, Series.params, order=Series.id) == [
        ("context=1024, mode='a'",),
        ("context=1024, mode='b'",),
        ("context=65536, mode='a'",),
        ("context=65536, mode='b'",),
    ]
    assert [value for (value,) in rows(engine, Result.value)] == [1.0, 2.0, 3.0, 4.0]


def test_failed_and_skipped_stay_apart(engine, tree):
    params = [["1", "2", "3"]]
    tree.benchmark(params=params, names=["n"])
    tree.results({BENCHMARK: row([None, NAN, 0.5], params=params)})

    report = ingest(engine, [tree.root])

    assert (report.failed, report.skipped) == (1, 1)
    assert rows(engine, Result.status, Result.value) == [
        (Status.FAILED, None),
        (Status.SKIPPED, None),
        (Status.OK, 0.5),
    ]


def test_a_null_result_fails_every_case(engine, tree):
    params = [["1", "2"]]
    tree.benchmark(params=params, names=["n"])
    tree.results({BENCHMARK: [None, params, "1", START_S * 1000, 0.5]})

    assert ingest(engine, [tree.root]).failed == 2


def test_an_infinite_value_is_no_measurement_and_an_infinite_bound_is_none(engine, tree):
    tree.benchmark().benchmark("b.track_x", type="track", unit="unit")
    one = {"stats_repeat": [1], "stats_ci_99_a": [-INF], "stats_ci_99_b": [INF]}
    tree.results({BENCHMARK: row(0.5, **one), "b.track_x": [[INF], [], "1"]})

    ingest(engine, [tree.root])

    assert rows(engine, Result.status, Result.value, Result.ci_low, Result.ci_high) == [
        (Status.SINGLE_SAMPLE, 0.5, None, None),
        (Status.FAILED, None, None, None),
    ]


def test_one_sample_is_marked_whoever_counts_it(engine, tree):
    tree.benchmark().benchmark("b.time_counted").benchmark("b.mem_x", type="memory", unit="bytes")
    tree.results(
        {
            BENCHMARK: row(0.5, stats_repeat=[None], samples=[[0.5]]),
            "b.time_counted": row(0.5, stats_repeat=[1]),
            "b.mem_x": [[280], [], "1", START_S * 1000, 0.1],
        }
    )

    ingest(engine, [tree.root])

    assert rows(engine, Result.status, Result.n, order=Result.series_id) == [
        (Status.SINGLE_SAMPLE, 1),
        (Status.SINGLE_SAMPLE, 1),
        (Status.OK, None),
    ]


def test_samples_are_kept_in_their_order(engine, tree):
    tree.benchmark()
    tree.results({BENCHMARK: row(0.5, samples=[[0.6, 0.4, 0.5, 0.5]])})

    ingest(engine, [tree.root])

    assert rows(engine, Sample.position, Sample.value, order=Sample.position) == [
        (0, 0.6),
        (1, 0.4),
        (2, 0.5),
        (3, 0.5),
    ]


def test_rows_may_be_shorter_than_their_columns_and_columns_in_another_order(engine, tree):
    tree.benchmark()
    columns = ["params", "version", "result", *COLUMNS[3:]]
    tree.results({BENCHMARK: [[], "1", [0.25]]}, result_columns=columns)

    ingest(engine, [tree.root])

    assert rows(engine, Result.value, Result.started_at_ms, Result.n) == [(0.25, None, None)]


def test_a_second_reading_adds_nothing(engine, tree):
    tree.benchmark().results({BENCHMARK: row(0.5, samples=[[0.4, 0.6]])})
    first = ingest(engine, [tree.root])
    before = sizes(engine)

    second = ingest(engine, [tree.root])

    assert (first.new_results, first.unchanged) == (1, 0)
    assert (second.new_results, second.unchanged) == (0, 1)
    assert (second.files, second.values) == (first.files, first.values)
    assert sizes(engine) == before


def test_a_rewritten_file_adds_only_what_was_measured_anew(engine, tree):
    """asv gives all cases of a benchmark the new start, though it measured one of them."""
    params = [["1", "2"]]
    tree.benchmark(params=params, names=["n"])
    tree.results({BENCHMARK: row([1.0, 2.0], params=params)})
    ingest(engine, [tree.root])
    tree.results({BENCHMARK: row([1.0, 2.5], params=params, started_at=START_S * 1000 + 60_000)})

    report = ingest(engine, [tree.root])

    assert (report.new_results, report.unchanged) == (1, 1)
    assert [value for (value,) in rows(engine, Result.value)] == [1.0, 2.0, 2.5]


def test_two_copies_of_a_tree_of_different_age_in_one_call_add_each_measurement_once(
    engine, tmp_path
):
    params = [["1", "2"]]
    for number, values in enumerate([[1.0, 2.0], [1.0, 2.5]]):
        copy = AsvTree(tmp_path / "copies" / str(number))
        copy.benchmark(params=params, names=["n"])
        start = START_S * 1000 + 60_000 * number
        copy.results({BENCHMARK: row(values, params=params, started_at=start)})

    report = ingest(engine, [tmp_path / "copies"])

    assert (report.new_results, report.unchanged) == (3, 1)


def test_copies_too_large_to_be_written_at_once_add_each_measurement_once(
    engine, tmp_path, monkeypatch
):
    most = 200
    monkeypatch.setattr("db.result_store.CELLS_AT_ONCE", most)
    cases = [[str(case) for case in range(most)]]
    for number in range(2):
        copy = AsvTree(tmp_path / "copies" / str(number))
        copy.benchmark(params=cases, names=["n"])
        start = START_S * 1000 + 60_000 * number
        copy.results({BENCHMARK: row([0.5] * most, params=cases, started_at=start)})

    report = ingest(engine, [tmp_path / "copies"])

    assert (report.new_results, report.unchanged) == (most, most)


def test_a_number_without_statistics_measured_again_is_another_result(engine, tree):
    name = "b.peakmem_x"
    tree.benchmark(name, type="peakmemory", unit="bytes")
    tree.results({name: [[1024], [], "1", START_S * 1000, 0.1]})
    ingest(engine, [tree.root])
    tree.results({name: [[1024], [], "1", START_S * 1000 + 60_000, 0.1]})

    assert ingest(engine, [tree.root]).new_results == 1


def test_interpreter_paths_make_no_new_series(engine, tree):
    tree.benchmark()
    for number, python in enumerate(["/opt/a/bin/python3.11", "3.11", "C:\\venv\\python3.11"]):
        tree.results(
            {BENCHMARK: row(1.0 + number)},
            environment=f"existing-py_{number}_bin_python3.11",
            python=python,
            env_vars={"CACHE": f"/home/{number}/cache"},
        )

    report = ingest(engine, [tree.root])

    assert report.files == 3
    assert rows(engine, Variant.label, order=Variant.id) == [("python 3.11, CACHE=cache",)]
    assert sizes(engine)[TABLES.index(Series)] == 1


def test_an_existing_environment_declares_no_python_however_it_is_called(engine, tree):
    tree.benchmark()
    names = ["same", "", "python", "/opt/a/bin/python", "/opt/b/bin/python3", "C:\\b\\python.exe"]
    for number, python in enumerate(names):
        tree.results({BENCHMARK: row(1.0 + number)}, environment=str(number), python=python)

    ingest(engine, [tree.root])

    assert rows(engine, Variant.label, order=Variant.id) == [("existing environment",)]


def test_declared_requirements_separate_series(engine, tree):
    tree.benchmark()
    for torch in ("2.12.0", "2.13.0"):
        tree.results(
            {BENCHMARK: row()},
            environment=f"virtualenv-torch{torch}",
            requirements={"torch": torch},
        )

    ingest(engine, [tree.root])

    assert rows(engine, Variant.label, order=Variant.id) == [
        ("python 3.11, torch 2.12.0",),
        ("python 3.11, torch 2.13.0",),
    ]
    assert sizes(engine)[TABLES.index(Series)] == 2


def test_a_new_version_of_a_benchmark_starts_a_new_series(engine, tree):
    tree.benchmark()
    tree.results({BENCHMARK: row(1.0, version="old")}, "a" * 40)
    tree.results({BENCHMARK: row(2.0, version="new")}, "b" * 40)

    ingest(engine, [tree.root])

    with Session(engine) as session:
        found = series(session)
        assert found["version"].tolist() == ["old", "new"]
        assert [len(history(session, one)) for one in found["series_id"]] == [1, 1]


def test_results_of_a_benchmark_that_is_gone_are_kept(engine, tree):
    params = [["1", "2"]]
    tree.results(
        {"old.peakmem_x": {"result": [1, 2], "params": params}, "old.track_y": {"result": [3]}}
    )

    ingest(engine, [tree.root])

    with Session(engine) as session:
        found = series(session)[["benchmark", "params", "metric", "unit"]].values.tolist()
    assert found == [
        ["old.peakmem_x", "param1=1", "peakmemory", "bytes"],
        ["old.peakmem_x", "param1=2", "peakmemory", "bytes"],
        ["old.track_y", "", "track", "unit"],
    ]


@pytest.mark.parametrize(
    ("facts", "direction"),
    [
        ({"type": "time", "unit": "seconds"}, "lower"),
        ({"type": "track", "unit": "GB/s"}, "higher"),
        ({"type": "track", "unit": "tokens"}, "higher"),
        ({"type": "track", "unit": "J"}, "lower"),
        ({"type": "track", "unit": "J", "direction": "higher"}, "higher"),
    ],
)
def test_the_better_direction_comes_from_the_benchmark_else_from_the_unit(
    engine, tree, facts, direction
):
    tree.benchmark(**facts).results({BENCHMARK: [[1.0], [], "1"]})

    ingest(engine, [tree.root])

    with Session(engine) as session:
        assert series(session)["direction"].tolist() == [direction]


def test_format_1_is_read_as_asv_updates_it(engine, tree):
    params = [["1", "2"]]
    tree.benchmark(params=params, names=["n"])
    stats = {"ci_99": [0.9, 1.1], "q_25": 0.95, "q_75": 1.05, "number": 3, "repeat": 5}
    old = {
        "commit_hash": SHA,
        "date": START_S * 1000,
        "params": {},
        "python": "2.7",
        "requirements": {},
        "results": {
            BENCHMARK: {"result": [1.0, None], "params": params, "stats": [stats, None]},
            "old.time_plain": 2.0,
        },
        "started_at": {BENCHMARK: START_S * 1000},
        "version": 1,
    }
    tree.write("laptop/aaaaaaaa-py2.7.json", old)

    ingest(engine, [tree.root])

    columns = (Result.value, Result.ci_low, Result.q75, Result.n, Result.started_at_ms)
    assert rows(engine, *columns) == [
        (1.0, 0.9, 1.05, 5, START_S * 1000),
        (None, None, None, None, START_S * 1000),
        (2.0, None, None, None, None),
    ]


def test_a_machine_folder_and_a_folder_above_several_trees_give_the_same_results(engine, tmp_path):
    trees = [AsvTree(tmp_path / "recorded" / name, f"machine-{name}") for name in ("a", "b")]
    for tree in trees:
        tree.benchmark().results({BENCHMARK: row()})
    one = ingest(engine, [trees[0].root / "machine-a"])

    all_of_them = ingest(engine, [tmp_path / "recorded", trees[1].root])

    assert (one.files, one.new_results) == (1, 1)
    assert (all_of_them.files, all_of_them.new_results, all_of_them.unchanged) == (2, 1, 1)


def test_a_dry_run_reports_and_writes_nothing(engine, tree):
    tree.benchmark().results({BENCHMARK: row()})
    before = sizes(engine)

    report = ingest(engine, [tree.root], dry_run=True)

    assert report.new_results == 1
    assert sizes(engine) == before
    assert ingest(engine, [tree.root]).new_results == 1


def broken(tree, name, content):
    path = tree.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def result_of(tree, **more):
    """The text of a good result file with some keys changed."""
    path = tree.results({BENCHMARK: row()}, "c" * 40)
    found = json.loads(path.read_text(encoding="utf-8")) | more
    path.unlink()
    return found


def results_of(*values):
    return {"results": {BENCHMARK: list(values)}}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("laptop/bad.json", lambda tree: "{ not json", "expected JSON"),
        ("laptop/bad.json", lambda tree: json.dumps(result_of(tree))[:-40], "expected JSON"),
        ("laptop/bad.json", lambda tree: "", "expected JSON"),
        ("laptop/bad.json", lambda tree: "[1, 2]", "expected a JSON object, got list"),
        ("laptop/bad.json", lambda tree: {"version": 2}, "results: expected dict, got nothing"),
        ("laptop/bad.json", lambda tree: result_of(tree, version=3), "expected 1 or 2, got 3"),
        (
            "laptop/bad.json",
            lambda tree: result_of(tree, commit_hash=7),
            "commit_hash: expected str",
        ),
        (
            "laptop/bad.json",
            lambda tree: result_of(tree, date="x"),
            "date: expected float, got str",
        ),
        ("laptop/bad.json", lambda tree: result_of(tree, date=math.inf), "since 1970, got inf"),
        ("laptop/bad.json", lambda tree: result_of(tree, date=9e30), "since 1970, got 9e+30"),
        ("laptop/bad.json", lambda tree: result_of(tree, date=10**400), "number of 64 bits"),
        (
            "laptop/bad.json",
            lambda tree: result_of(tree, **results_of("fast")),
            "result: expected num",
        ),
        ("laptop/bad.json", lambda tree: result_of(tree, **results_of([True])), "got bool"),
        (
            "laptop/bad.json",
            lambda tree: result_of(tree, **results_of([1.0, 2.0], [])),
            "expected 1 val",
        ),
        (
            "laptop/bad.json",
            lambda tree: result_of(tree, **results_of([1.0], "x")),
            "list of lists",
        ),
        (
            "laptop/bad.json",
            lambda tree: result_of(tree, results={BENCHMARK: 4}),
            "expected a list",
        ),
        (
            "laptop/bad.json",
            lambda tree: result_of(tree, **results_of(*range(14))),
            "at most 13 col",
        ),
        ("laptop/machine.json", lambda tree: "{", "machine.json: expected JSON"),
        ("benchmarks.json", lambda tree: {BENCHMARK: {"type": "time"}}, "unit: expected str"),
        ("benchmarks.json", lambda tree: {BENCHMARK: 4}, "expected a JSON object, got int"),
        (
            "telemetry/run.jsonl",
            lambda tree: '{"schema": 1}\n',
            "run.jsonl:1: window_id: expected str",
        ),
        ("telemetry/run.jsonl", lambda tree: '{"schema": 2}', "schema: expected 1, got 2"),
        ("telemetry/run.jsonl", lambda tree: '{"schema": 1, "bench', "run.jsonl:1: expected JSON"),
        ("commits.tsv", lambda tree: "abc subject\n", "between tabs"),
    ],
)
def test_a_bad_file_is_named_in_one_line_and_nothing_is_written(
    engine, tree, name, change, message
):
    tree.benchmark().results({BENCHMARK: row()})
    content = change(tree)
    before = sizes(engine)
    broken(tree, name, content)

    with pytest.raises(IngestError) as refusal:
        ingest(engine, [tree.root])

    assert Path(name).name in str(refusal.value)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert sizes(engine) == before


def test_a_folder_without_results_and_a_missing_one_are_refused(engine, tmp_path):
    with pytest.raises(IngestError, match="found none"):
        ingest(engine, [tmp_path])
    with pytest.raises(IngestError, match="no such path"):
        ingest(engine, [tmp_path / "nowhere"])


def test_results_without_the_files_that_give_them_meaning_are_refused(engine, tree):
    tree.benchmark().results({BENCHMARK: row()})
    (tree.root / "benchmarks.json").unlink()
    with pytest.raises(IngestError, match=r"benchmarks\.json: expected this file"):
        ingest(engine, [tree.root])

    tree.benchmark()
    (tree.root / "laptop" / "machine.json").unlink()
    with pytest.raises(IngestError, match=r"machine\.json: expected this file"):
        ingest(engine, [tree.root])


def test_results_that_read_like_code_are_only_text(engine, tree, tmp_path):
    trap = f"__import__('pathlib').Path({str(tmp_path / 'trap')!r}).touch()"
    tree.benchmark(params=[[trap]], names=["n"])
    tree.results({BENCHMARK: row(1.0, params=[[trap]])})

    ingest(engine, [tree.root])

    assert not (tmp_path / "trap").exists()
    assert rows(engine, Series.params, order=Series.id) == [(f"n={trap}",)]


def test_without_its_repository_commits_are_ordered_by_date(engine, tree):
    tree.benchmark()
    for number, sha in enumerate(["c" * 40, "a" * 40, "b" * 40]):
        tree.results({BENCHMARK: row(number + 1.0)}, sha, date=(START_S + number) * 1000)

    report = ingest(engine, [tree.root])

    with Session(engine) as session:
        found = history(session, 1)
    assert report.order_basis == found.attrs["order_basis"] == "date"
    assert found["value"].tolist() == [1.0, 2.0, 3.0]


def commits_against_their_dates(tmp_path):
    """A repository whose second commit is dated before its first, with a branch beside it."""
    repository = GitRepository(tmp_path / "code")
    first = repository.commit("first", date=START_S + 300)
    second = repository.commit("second: a\ttab", date=START_S + 100)
    repository.git("checkout", "--quiet", "-b", "side")
    side = repository.commit("side", date=START_S + 200)
    repository.git("checkout", "--quiet", "main")
    third = repository.commit("third", date=START_S + 50)
    return repository, first, second, third, side


def test_a_repository_gives_order_subjects_authors_dates_and_its_main_branch(
    engine, tree, tmp_path
):
    repository, first, second, third, side = commits_against_their_dates(tmp_path)
    tree.benchmark()
    for sha, date in ((third, 50), (side, 200), (first, 300), (second, 100)):
        tree.results({BENCHMARK: row(float(date))}, sha, date=(START_S + date) * 1000)

    report = ingest(engine, [tree.root], repository=repository.root)

    with Session(engine) as session:
        found = history(session, 1)
    main = found[found["branch"] == "main"]
    assert report.order_basis == found.attrs["order_basis"] == "repository"
    assert main["commit"].tolist() == [first, second, third]
    assert main["subject"].tolist() == ["first", "second: a\ttab", "third"]
    assert found[found["branch"].isna()]["commit"].tolist() == [side]
    with Session(engine) as session:
        assert history(session, 1, main_only=True)["commit"].tolist() == [first, second, third]


def test_a_second_look_at_the_same_repository_writes_nothing(engine, tree, tmp_path):
    repository, first, *_ = commits_against_their_dates(tmp_path)
    tree.benchmark().results({BENCHMARK: row()}, first)
    ingest(engine, [tree.root], repository=repository.root)
    before = sizes(engine)

    ingest(engine, [tree.root], repository=repository.root)

    assert sizes(engine) == before


def test_the_current_folders_repository_is_used_where_it_has_the_commits(
    engine, tree, tmp_path, monkeypatch
):
    repository, first, *_ = commits_against_their_dates(tmp_path)
    tree.benchmark().results({BENCHMARK: row()}, first)
    monkeypatch.chdir(repository.root)

    assert ingest(engine, [tree.root]).order_basis == "repository"


def test_a_later_look_at_the_repository_orders_what_is_stored(engine, tree, tmp_path):
    repository, first, second, third, _ = commits_against_their_dates(tmp_path)
    tree.benchmark()
    for sha, date in ((third, 50), (first, 300), (second, 100)):
        tree.results({BENCHMARK: row(float(date))}, sha, date=(START_S + date) * 1000)
    ingest(engine, [tree.root])

    report = ingest(engine, [tree.root], repository=repository.root)

    with Session(engine) as session:
        found = history(session, 1)
    assert (report.new_results, report.order_basis) == (0, "repository")
    assert found["value"].tolist() == [300.0, 100.0, 50.0]


def test_a_shallow_clone_tells_subjects_but_no_order(engine, tree, tmp_path):
    repository, _, second, third, _ = commits_against_their_dates(tmp_path)
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=2", f"file://{repository.root}", str(shallow))
    tree.benchmark()
    for sha, date in ((third, 50), (second, 100)):
        tree.results({BENCHMARK: row(float(date))}, sha, date=(START_S + date) * 1000)

    report = ingest(engine, [tree.root], repository=shallow)

    assert report.order_basis == "date"
    assert rows(engine, Commit.subject, order=Commit.committed_at) == [
        ("third",),
        ("second: a\ttab",),
    ]


def test_a_shallow_look_does_not_undo_a_full_one(engine, tree, tmp_path):
    repository, first, second, third, _ = commits_against_their_dates(tmp_path)
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.root}", str(shallow))
    tree.benchmark()
    for sha, date in ((third, 50), (first, 300), (second, 100)):
        tree.results({BENCHMARK: row(float(date))}, sha, date=(START_S + date) * 1000)
    ingest(engine, [tree.root], repository=repository.root)

    report = ingest(engine, [tree.root], repository=shallow)

    assert report.order_basis == "repository"
    with Session(engine) as session:
        assert history(session, 1)["commit"].tolist() == [first, second, third]


def test_an_order_recorded_with_the_tree_is_used_where_no_repository_knows(engine, tree):
    tree.benchmark()
    shas = ["b" * 40, "a" * 40]
    for number, sha in enumerate(shas):
        tree.results({BENCHMARK: row(number + 1.0)}, sha, date=(START_S - number) * 1000)
    listing = "".join(f"{sha}\t{START_S}\tsubject of {sha[0]}\n" for sha in shas)
    (tree.root / "commits.tsv").write_text(listing, encoding="utf-8")

    report = ingest(engine, [tree.root])

    with Session(engine) as session:
        found = history(session, 1)
    assert report.order_basis == found.attrs["order_basis"] == "recorded"
    assert found["subject"].tolist() == ["subject of b", "subject of a"]


def test_a_folder_that_is_no_repository_is_refused_where_one_was_named(engine, tree, tmp_path):
    tree.benchmark().results({BENCHMARK: row()})

    with pytest.raises(IngestError, match="expected a git repository"):
        ingest(engine, [tree.root], repository=tmp_path)


def test_a_pipe_among_the_results_is_refused_and_not_waited_for(engine, tree):
    tree.benchmark().results({BENCHMARK: row()})
    os.mkfifo(tree.root / "laptop" / "zzz.json")

    with pytest.raises(IngestError, match=r"zzz\.json: expected a plain file"):
        ingest(engine, [tree.root])


def test_two_ingests_at_once_store_each_result_once(engine, tree):
    params = [[str(number) for number in range(50)]]
    tree.benchmark(params=params, names=["n"])
    for number in range(20):
        tree.results({BENCHMARK: row([1.0] * 50, params=params)}, f"{number:08x}" * 5)

    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda _: ingest(engine, [tree.root]), range(2)))

    assert sorted(report.new_results for report in reports) == [0, 1000]
    assert sizes(engine)[TABLES.index(Result)] == 1000


def sunpy_tree(tmp_path):
    """The real tree where a path to it is given, else one of its shape."""
    archive = os.environ.get("DDTREE_BENCH_SUNPY")
    root = tmp_path / "sunpy"
    if archive:
        with tarfile.open(archive) as tar:
            tar.extractall(root, filter="data")
        return root
    tree = AsvTree(root, "GH-Actions")
    names = [f"b.Suite{number}.{kind}" for number in range(5) for kind in ("time_x", "mem_x")]
    for name in names:
        kind = {"type": "memory", "unit": "bytes"} if "mem" in name else {}
        tree.benchmark(name, **kind)
    for number in range(SUNPY_FILES):
        found = {
            name: row(1e-3 + 1e-7 * number)
            if "time" in name
            else [[280 + number], [], "1", START_S * 1000 + number, 0.2]
            for name in names
        }
        tree.results(found, f"{number:08x}" * 5, date=(START_S + 3600 * number) * 1000)
    return root


def test_a_tree_of_1396_files_is_read_in_seconds_and_twice_alike(tmp_path):
    root = sunpy_tree(tmp_path)
    engine = open_database(f"sqlite:///{tmp_path / 'sunpy.db'}", must_exist=False)
    started = time.monotonic()

    first = ingest(engine, [root])
    seconds = time.monotonic() - started
    second = ingest(engine, [root])

    values = SUNPY_FILES * SUNPY_BENCHMARKS
    with Session(engine) as session:
        basis = history(session, 1).attrs["order_basis"]
    engine.dispose()
    assert (first.files, first.values, first.new_results) == (SUNPY_FILES, values, values)
    assert (second.files, second.values, second.unchanged) == (SUNPY_FILES, values, values)
    assert basis == "date"
    assert seconds < 60
