"""Files of pytest-benchmark, google-benchmark and nvbench become the same rows as asv's."""

import copy
import json

import pytest
from click.testing import CliRunner
from sqlalchemy import select
from sqlalchemy.orm import Session

from dashboard.cli import main
from db.columns import Direction, Status
from db.errors import IngestError
from db.foreign import Given
from db.ingest import ingest
from db.ingest_settings import Meaning, Settings
from db.models import Benchmark, Commit, Machine, Metric, Result, Sample, Series, Variant
from db.queries import history
from tests.asv_trees import BENCHMARK, SHA, START_S, AsvTree, GitRepository, row
from tests.foreign_files import GOOGLE_BENCHMARK, NVBENCH, PYTEST_BENCHMARK

RATES = Settings(metrics=(Meaning("*", "gflops", "GFLOP/s", Direction.HIGHER),))


@pytest.fixture(autouse=True)
def away_from_any_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path):
    def write(content, name="results.json"):
        path = tmp_path / "files" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    return write


@pytest.fixture
def of_commit(tmp_path):
    """What must be told of a file that names neither commit nor machine."""
    repository = GitRepository(tmp_path / "code")
    given = Given(commit=repository.commit("first"), machine="h200-01")
    return {"given": given, "repository": repository.root}


def stored(engine, *columns):
    query = (
        select(*columns)
        .join(Series, Series.id == Result.series_id)
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
        .join(Metric, Metric.id == Series.metric_id)
        .join(Commit, Commit.id == Result.commit_id)
        .join(Machine, Machine.id == Series.machine_id)
        .join(Variant, Variant.id == Series.variant_id)
        .order_by(Benchmark.name, Metric.name, Series.params)
    )
    with Session(engine) as session:
        return [tuple(found) for found in session.execute(query.select_from(Result))]


def test_pytest_benchmark_gives_medians_quartiles_and_samples(engine, write):
    report = ingest(engine, [write(PYTEST_BENCHMARK)])

    assert (report.files, report.new_results, report.unexplained) == (1, 2, ("gflops",))
    assert stored(
        engine, Benchmark.name, Series.params, Result.value, Result.q25, Result.n, Result.number
    ) == [
        ("test_b.py::test_plain", "", 3e-6, 2e-6, 5, 1),
        ("test_b.py::test_sum", "n=10, mode=a", 2e-6, 1.5e-6, 3, 17),
    ]
    assert set(stored(engine, Metric.name, Metric.unit, Metric.direction)) == {
        ("time", "seconds", Direction.LOWER)
    }
    with Session(engine) as session:
        assert session.scalars(select(Sample.value).order_by(Sample.position)).all() == [
            *(1e-6, 2e-6, 4e-6)
        ]


def test_pytest_benchmark_says_commit_machine_and_interpreter(engine, write):
    ingest(engine, [write(PYTEST_BENCHMARK)])

    [first, _] = stored(
        engine, Commit.sha, Commit.committed_at, Machine.name, Machine.cpu, Variant.python
    )
    assert (first[0], first[2:]) == ("b" * 40, ("bench-01", "EPYC", "3.11"))
    assert first[1].isoformat() == "2026-05-01T08:00:00+00:00"


def test_a_number_that_only_its_author_understands_is_stored_once_it_is_explained(engine, write):
    path = write(PYTEST_BENCHMARK)
    ingest(engine, [path])

    report = ingest(engine, [path], settings=RATES)

    assert (report.new_results, report.unchanged, report.unexplained) == (1, 2, ())
    explained = [
        found
        for found in stored(engine, Metric.name, Metric.unit, Metric.direction, Result.value)
        if found[0] == "gflops"
    ]
    assert explained == [("gflops", "GFLOP/s", Direction.HIGHER, 1.5)]


def test_a_second_reading_adds_nothing(engine, write):
    paths = [write(PYTEST_BENCHMARK, "p.json"), write(GOOGLE_BENCHMARK, "g.json")]
    first = ingest(engine, paths, given=Given("b" * 40, "m"), settings=RATES)

    second = ingest(engine, paths, given=Given("b" * 40, "m"), settings=RATES)

    assert first.new_results == 3 + 8
    assert (second.new_results, second.unchanged) == (0, first.new_results)


def test_what_was_measured_on_an_edited_checkout_is_dirty_and_out_of_the_history(engine, write):
    content = copy.deepcopy(PYTEST_BENCHMARK)
    content["commit_info"]["dirty"] = True

    ingest(engine, [write(content)])

    assert set(stored(engine, Result.dirty)) == {(True,)}
    with Session(engine) as session:
        assert history(session, 1).empty


def test_google_benchmark_gives_the_median_of_repetitions_in_seconds(engine, write):
    report = ingest(engine, [write(GOOGLE_BENCHMARK)], given=Given(commit=SHA))

    found = stored(
        engine, Benchmark.name, Metric.name, Series.params, Result.value, Result.n, Result.status
    )
    walk = ("BM_walk", "arg0=64, page=16")
    assert report.unexplained == ("gflops",)
    assert [one[:5] for one in found] == [
        ("BM_later", "real_time", "", None, None),
        ("BM_only", "cpu_time", "arg0=8", pytest.approx(3.5e-6), 3),
        ("BM_only", "real_time", "arg0=8", pytest.approx(7e-6), 3),
        (walk[0], "cpu_time", walk[1], pytest.approx(2e-6), 3),
        (walk[0], "items_per_second", walk[1], 1e6, 3),
        (walk[0], "real_time", walk[1], pytest.approx(4e-6), 3),
        ("Fixture/BM_broken", "real_time", "", None, None),
    ]
    assert [one[5] for one in found] == [
        Status.SKIPPED,
        *[Status.OK] * 5,
        Status.FAILED,
    ]
    higher = {
        name for name, way in stored(engine, Metric.name, Metric.direction) if way == "higher"
    }
    assert higher == {"items_per_second"}


def test_nvbench_gives_the_median_by_its_tag_and_names_the_device(engine, write, of_commit):
    report = ingest(engine, [write(NVBENCH)], **of_commit)

    found = stored(
        engine, Metric.name, Series.params, Result.value, Result.q75, Result.n, Result.status
    )
    one, other = "Elements=1024, device=NVIDIA H200", "Elements=2048, device=NVIDIA H200"
    assert report.unexplained == ("accuracy",)
    assert found == [
        ("nv/cold/bw/global/bytes_per_second", one, 2e12, None, None, Status.OK),
        ("nv/cold/time/cpu/mean", one, 1.1e-3, None, None, Status.OK),
        ("nv/cold/time/gpu/median", one, 0.9e-3, 1.2e-3, 499, Status.OK),
        ("nv/cold/time/gpu/median", other, None, None, None, Status.SKIPPED),
    ]


def test_an_older_nvbench_has_means_only(engine, write, of_commit):
    content = copy.deepcopy(NVBENCH)
    state = content["benchmarks"][0]["states"][0]
    state["summaries"] = [one for one in state["summaries"] if "median" not in one["tag"]]

    ingest(engine, [write(content)], **of_commit)

    assert ("nv/cold/time/gpu/mean", 1e-3) in stored(engine, Metric.name, Result.value)


@pytest.mark.parametrize(
    ("content", "given", "message"),
    [
        (GOOGLE_BENCHMARK, Given(), "expected --commit"),
        (NVBENCH, Given(commit=SHA), "expected --repository"),
        (PYTEST_BENCHMARK, Given(commit="c" * 40), "expected results of commit cccc"),
        (GOOGLE_BENCHMARK, Given(commit="main"), "expected a full hash"),
        ({"results": {}}, Given(), "expected a file of pytest-benchmark, nvbench"),
    ],
)
def test_a_file_whose_origin_nobody_knows_is_refused(engine, write, content, given, message):
    with pytest.raises(IngestError, match=message):
        ingest(engine, [write(content)], given=given)

    assert stored(engine, Result.id) == []


def test_nvbench_names_no_machine(engine, write, of_commit):
    of_commit["given"] = Given(commit=of_commit["given"].commit)

    with pytest.raises(IngestError, match="expected --machine"):
        ingest(engine, [write(NVBENCH)], **of_commit)


def test_a_commit_may_go_by_any_name_its_repository_knows(engine, write, tmp_path):
    repository = GitRepository(tmp_path / "code")
    sha = repository.commit("first", date=START_S)

    given = Given(commit="main", machine="h200-01")
    ingest(engine, [write(NVBENCH)], given=given, repository=repository.root)

    [found, *_] = stored(engine, Commit.sha, Commit.committed_at)
    assert (found[0], found[1].timestamp()) == (sha, START_S)


def test_a_folder_of_such_files_is_read_and_an_asv_tree_beside_it_too(engine, write, tmp_path):
    write(PYTEST_BENCHMARK, "0001.json")
    write(PYTEST_BENCHMARK | {"datetime": "2026-05-02T12:00:00+00:00"}, "0002.json")
    tree = AsvTree(tmp_path / "results")
    tree.benchmark().results({BENCHMARK: row()})

    report = ingest(engine, [tmp_path / "files", tree.root], settings=RATES)

    assert report.files == 3
    # Equal measurements are one; a number without statistics, taken again, is another.
    assert report.new_results == 1 + 3 + 1


def test_the_command_takes_commit_machine_and_configuration(
    engine, database_url, write, tmp_path, of_commit
):
    config = tmp_path / "bench.toml"
    config.write_text('[[metrics]]\nmetric = "accuracy"\nunit = "ratio"\ndirection = "higher"\n')
    told = ["--commit", of_commit["given"].commit, "--machine", "h200-01"]
    told += ["--repository", str(of_commit["repository"])]
    command = ["--db", database_url, "ingest", str(write(NVBENCH)), *told]

    dry = CliRunner().invoke(main, [*command, "--dry-run", "--config", str(config)])
    plain = CliRunner().invoke(main, command)
    configured = CliRunner().invoke(main, command, env={"DDTREE_BENCH_CONFIG": str(config)})

    assert "5 results new" in dry.output
    assert "4 results new" in plain.output
    assert "nobody says which way is better: accuracy" in plain.output
    assert "1 results new" in configured.output
    assert "left out" not in configured.output
    assert ("accuracy", "ratio", Direction.HIGHER) in stored(
        engine, Metric.name, Metric.unit, Metric.direction
    )


def test_the_command_refuses_a_file_of_unknown_origin_in_one_line(database_url, write):
    outcome = CliRunner().invoke(main, ["--db", database_url, "ingest", str(write(NVBENCH))])

    assert outcome.exit_code == 2
    assert "expected --commit" in outcome.output
    assert outcome.output.count("\n") == 1
