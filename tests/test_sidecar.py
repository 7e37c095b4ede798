"""Windows find their results, and code that is not the commit's is not stored as if it were."""

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.errors import IngestError
from db.ingest import ingest
from db.models import (
    Ceiling,
    Commit,
    Result,
    Run,
    Runner,
    RunnerEnvironment,
    Window,
    WindowCounter,
    WindowStage,
)
from db.queries import case_results, history
from db.sidecar import read_sidecar
from tests.asv_trees import BENCHMARK, SHA, START_S, AsvTree, GitRepository, append_line, row

PARAMS = [["1024", "65536"]]


@pytest.fixture
def tree(tmp_path):
    return AsvTree(tmp_path / "results").benchmark()


@pytest.fixture
def repository(tmp_path):
    return GitRepository(tmp_path / "code")


@pytest.fixture(autouse=True)
def away_from_any_repository(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def rows(engine, *columns):
    with Session(engine) as session:
        return [tuple(found) for found in session.execute(select(*columns).order_by(columns[0]))]


def joins(engine):
    """Results' values by windows' invocations."""
    with Session(engine) as session:
        query = select(Window.invocation, Result.value).outerjoin(
            Result, Result.id == Window.result_id
        )
        return sorted(tuple(found) for found in session.execute(query))


def values(engine):
    return [value for (value,) in rows(engine, Result.value)]


def test_a_window_joins_by_commit_machine_case_and_time(engine, tree):
    tree.benchmark(params=PARAMS, names=["context"])
    tree.results({BENCHMARK: row([1.0, 2.0], params=PARAMS)})
    tree.line(params=["65536"], device={"name": "H200", "driver": "580"})

    report = ingest(engine, [tree.root])

    assert (report.windows_joined, report.windows_unjoined) == (1, 0)
    assert joins(engine) == [("run-1", 2.0)]
    assert rows(engine, Result.value, Result.runner_environment_id) == [(1.0, None), (2.0, 1)]
    assert rows(engine, Run.invocation) == [("run-1",)]


@pytest.mark.parametrize(
    "told",
    [
        {"commit": "b" * 40},
        {"machine": "other"},
        {"benchmark": "step.Step.time_other"},
        {"version": "2"},
        {"params": ["1"]},
        {"started_at": START_S + 3600.0},
        {"started_at": START_S - 3600.0},
    ],
)
def test_a_window_of_anything_else_stays_unjoined(engine, tree, told):
    tree.results({BENCHMARK: row()})
    tree.line(**told)

    report = ingest(engine, [tree.root])

    assert (report.windows_joined, report.windows_unjoined) == (0, 1)
    assert rows(engine, Window.result_id) == [(None,)]


def test_windows_of_earlier_rounds_belong_to_the_result_whose_start_is_the_last_rounds(
    engine, tree
):
    tree.results({BENCHMARK: row(1.0)})
    tree.line(started_at=START_S - 300.0)
    tree.line(started_at=START_S + 1.0)

    assert ingest(engine, [tree.root]).windows_joined == 2


def test_windows_of_an_overwritten_result_do_not_move_to_its_successor(engine, tree):
    tree.results({BENCHMARK: row(2.0, started_at=(START_S + 600) * 1000)})
    tree.line(run_id="run-1", started_at=START_S + 1.0)
    tree.line(run_id="run-2", started_at=START_S + 601.0)

    ingest(engine, [tree.root])

    assert joins(engine) == [("run-1", None), ("run-2", 2.0)]


def test_two_environments_of_one_commit_keep_their_own_windows(engine, tree):
    tree.results({BENCHMARK: row(1.0)}, environment="a", requirements={"torch": "1"})
    tree.results(
        {BENCHMARK: row(2.0, started_at=(START_S + 100) * 1000)},
        environment="b",
        requirements={"torch": "2"},
    )
    first = tree.line(started_at=START_S + 1.0)
    second = tree.line(started_at=START_S + 101.0)

    ingest(engine, [tree.root])

    with Session(engine) as session:
        query = select(Window.uid, Result.value).join(Result, Result.id == Window.result_id)
        found = dict(tuple(one) for one in session.execute(query))
    assert found == {first["window_id"]: 1.0, second["window_id"]: 2.0}


def test_a_window_that_was_told_no_machine_is_of_the_only_one_in_its_tree(engine, tree):
    tree.results({BENCHMARK: row(1.0)})
    tree.line(machine=None)

    assert ingest(engine, [tree.root]).windows_joined == 1


def test_a_window_that_was_told_no_machine_joins_none_of_two(engine, tree):
    other = AsvTree(tree.root, "desktop").benchmark()
    for one in (tree, other):
        one.results({BENCHMARK: row(1.0)})
    tree.line(machine=None)

    assert ingest(engine, [tree.root]).windows_unjoined == 1


def test_a_window_that_was_told_no_commit_joins_by_engine_and_samples(engine, tree, repository):
    shas = [repository.commit("first"), repository.commit("second")]
    for number, sha in enumerate(shas):
        samples = [[0.1, 0.2, 0.2 + number / 10]]
        tree.results({BENCHMARK: row(float(number), samples=samples)}, sha)
    told = {"commit": None, "run_id": None, "samples_s": [0.3, 0.1 + 1e-9]}
    engine_tree = {"engine_tree": repository.engine_tree(shas[1]), "dirty": False}
    tree.line("asv-1.jsonl", **told, provenance=engine_tree)
    tree.line("asv-2.jsonl", **told | {"samples_s": [0.4]}, provenance=engine_tree)

    assert ingest(engine, [tree.root]).windows_joined == 0
    ingest(engine, [tree.root], repository=repository.root)

    assert joins(engine) == [("asv-1", 1.0), ("asv-2", None)]


def test_a_window_that_was_told_nothing_joins_none_of_two_alike(engine, tree, repository):
    sha = repository.commit("first")
    for one in (tree, AsvTree(tree.root, "desktop").benchmark()):
        one.results({BENCHMARK: row(1.0, samples=[[0.1, 0.2]])}, sha)
    tree.line(
        commit=None,
        machine=None,
        samples_s=[0.1],
        provenance={"engine_tree": repository.engine_tree(sha)},
    )

    report = ingest(engine, [tree.root], repository=repository.root)

    assert report.windows_unjoined == 1


def test_a_sidecar_may_come_after_its_results_and_results_after_their_sidecar(
    engine, tree, tmp_path
):
    line = append_line(tmp_path / "telemetry" / "run.jsonl")
    early = ingest(engine, [tmp_path / "telemetry"])
    tree.results({BENCHMARK: row(1.0)})
    ingest(engine, [tree.root])
    append_line(tmp_path / "late.jsonl", pid=2)

    late = ingest(engine, [tmp_path / "late.jsonl"])

    assert (early.windows_joined, early.windows_unjoined) == (0, 1)
    assert (late.windows_joined, late.windows_unjoined) == (1, 0)
    assert joins(engine) == [("run-1", 1.0), ("run-1", 1.0)]
    assert (line["window_id"],) in rows(engine, Window.uid)


def test_a_second_reading_adds_no_window(engine, tree):
    tree.results({BENCHMARK: row(1.0)})
    tree.line(counters={"power_w": counter(130.0, "W")}, stage_seconds={"draft": 0.1})
    first = ingest(engine, [tree.root])

    second = ingest(engine, [tree.root])

    assert first.windows_joined == second.windows_joined == 1
    for table in (Window.id, WindowCounter.window_id, WindowStage.window_id, Ceiling.id):
        assert len(rows(engine, table)) == 1


def counter(value, unit):
    return {"median": value, "min": value - 1, "max": value + 1, "n": 20, "unit": unit}


def test_what_a_window_saw_is_stored_with_its_units(engine, tree):
    tree.results({BENCHMARK: row(1.0)})
    tree.line(
        stage_seconds={"draft": 0.25, "verify": 0.5},
        counters={"power_w": counter(131.0, "W")},
        ceilings={"read_bytes_per_s": 4.55e12, "matmul_flops_per_s": 7.9e14, "dtype": "bf16"},
        device={
            "kind": "cuda",
            "name": "NVIDIA H200",
            "gpu_uuid": "GPU-1",
            "driver": "580",
            "power_limit_w": 700.0,
            "num_sms": 132,
        },
        validity=["gpm_unsupported"],
        kv_bytes=4_605_345_792,
    )

    ingest(engine, [tree.root])

    assert rows(engine, WindowStage.name, WindowStage.seconds) == [("draft", 0.25), ("verify", 0.5)]
    counters = (WindowCounter.name, WindowCounter.unit, WindowCounter.low, WindowCounter.high)
    assert rows(engine, *counters) == [("power_w", "W", 130.0, 132.0)]
    assert rows(engine, Runner.uid, Runner.num_sms) == [("GPU-1", 132)]
    environment = (RunnerEnvironment.driver, RunnerEnvironment.power_limit_w)
    assert rows(engine, *environment) == [("580", 700.0)]
    assert rows(engine, Ceiling.read_bytes_per_s, Ceiling.dtype) == [(4.55e12, "bf16")]
    assert rows(engine, Window.kv_bytes, Window.validity) == [(4_605_345_792, ["gpm_unsupported"])]


def test_one_commit_cannot_pass_off_anothers_code_as_its_own(engine, tree, repository):
    """Two worktrees, one environment: both runs import the engine of the second commit."""
    own, other = repository.commit("base"), repository.commit("head")
    foreign = {"engine_tree": repository.engine_tree(other), "dirty": False}
    for sha, value in ((own, 1.0), (other, 2.0)):
        tree.results({BENCHMARK: row(value)}, sha)
        tree.line(commit=sha, provenance=foreign)

    report = ingest(engine, [tree.root], repository=repository.root)

    assert values(engine) == [2.0]
    assert joins(engine) == [("run-1", 2.0)]
    (refusal,) = report.refused
    assert (refusal.benchmark, refusal.commit, refusal.machine) == (BENCHMARK, own, "laptop")
    assert repository.engine_tree(own)[:12] in refusal.reason
    assert repository.engine_tree(other)[:12] in refusal.reason
    assert (report.values, report.new_results) == (2, 1)


@pytest.mark.parametrize("samples", [None, [[0.1, 0.2]]])
@pytest.mark.parametrize("machine", ["laptop", None])
def test_plain_asv_cannot_pass_off_anothers_code_either(engine, tree, repository, samples, machine):
    """An existing environment tells no commit: asv alone believes --set-commit-hash."""
    own, other = repository.commit("base"), repository.commit("head")
    foreign = {"engine_tree": repository.engine_tree(other), "dirty": False}
    tree.results({BENCHMARK: row(1.0, samples=samples)}, own)
    told = {"commit": None, "run_id": None, "machine": machine, "samples_s": [0.1, 0.2]}
    tree.line("asv-1.jsonl", **told, provenance=foreign)

    (refusal,) = ingest(engine, [tree.root], repository=repository.root).refused

    assert (refusal.benchmark, refusal.commit, refusal.machine) == (BENCHMARK, own, "laptop")
    assert (values(engine), joins(engine)) == ([], [])


def test_plain_asv_in_an_edited_checkout_is_dirty(engine, tree, repository):
    sha = repository.commit("base")
    told = {"commit": None, "run_id": None, "samples_s": [0.1, 0.2]}
    tree.line("asv-1.jsonl", **told, provenance={"engine_tree": "f" * 40, "dirty": True})
    tree.results({BENCHMARK: row(1.0, samples=[[0.1, 0.2]])}, sha)

    assert ingest(engine, [tree.root], repository=repository.root).refused == ()
    assert rows(engine, Result.value, Result.dirty) == [(1.0, True)]


def test_plain_asv_in_an_edited_checkout_is_refused_without_samples(engine, tree, repository):
    sha = repository.commit("base")
    told = {"commit": None, "run_id": None, "samples_s": [0.1, 0.2]}
    tree.line("asv-1.jsonl", **told, provenance={"engine_tree": "f" * 40, "dirty": True})
    tree.results({BENCHMARK: row(1.0)}, sha)

    assert len(ingest(engine, [tree.root], repository=repository.root).refused) == 1
    assert values(engine) == []


def test_code_outside_a_checkout_is_held_to_its_hash_as_well(engine, tree, repository):
    sha = repository.commit("base")
    tree.results({BENCHMARK: row(1.0)}, sha)
    tree.line(commit=sha, provenance={"engine_tree": "f" * 40, "dirty": None})

    assert len(ingest(engine, [tree.root], repository=repository.root).refused) == 1
    assert values(engine) == []


def test_a_commit_without_an_engine_owns_no_measurement_of_one(engine, tree, repository):
    (repository.root / "README").write_text("before the engine", encoding="utf-8")
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "-m", "before")
    sha = repository.git("rev-parse", "HEAD")
    tree.results({BENCHMARK: row(1.0)}, sha)
    tree.line(commit=sha, provenance={"engine_tree": "f" * 40, "dirty": False})

    (refusal,) = ingest(engine, [tree.root], repository=repository.root).refused

    assert "expected engine tree none" in refusal.reason


def test_a_result_under_another_commits_name_is_refused(engine, tree, repository):
    measured, claimed = repository.commit("measured"), repository.commit("claimed")
    samples = [0.0101, 0.0102, 0.0103]
    own = {"engine_tree": repository.engine_tree(measured), "dirty": False}
    tree.line(commit=measured, samples_s=samples, provenance=own)
    tree.results({BENCHMARK: row(0.0102, samples=[samples])}, claimed)

    (refusal,) = ingest(engine, [tree.root], repository=repository.root).refused

    assert (refusal.commit, measured[:12] in refusal.reason) == (claimed, True)
    assert values(engine) == []


def test_only_the_foreign_cases_of_a_file_are_refused(engine, tree, repository):
    sha = repository.commit("base")
    tree.benchmark(params=PARAMS, names=["context"])
    tree.results({BENCHMARK: row([1.0, 2.0], params=PARAMS)}, sha)
    own = {"engine_tree": repository.engine_tree(sha), "dirty": False}
    tree.line(commit=sha, params=["1024"], provenance=own)
    tree.line(commit=sha, params=["65536"], provenance={"engine_tree": "f" * 40, "dirty": False})

    (refusal,) = ingest(engine, [tree.root], repository=repository.root).refused

    assert refusal.params == "context=65536"
    assert values(engine) == [1.0]


def test_a_result_stored_before_its_sidecar_told_is_withdrawn(engine, tree, repository):
    sha = repository.commit("base")
    tree.results({BENCHMARK: row(1.0, samples=[[1.0, 1.1]])}, sha)
    ingest(engine, [tree.root], repository=repository.root)
    tree.line(commit=sha, provenance={"engine_tree": "f" * 40, "dirty": False})

    report = ingest(engine, [tree.root], repository=repository.root)

    assert len(report.refused) == 1
    assert values(engine) == []


def test_the_windows_of_an_earlier_foreign_run_do_not_refuse_a_later_own_one(
    engine, tree, repository
):
    sha = repository.commit("base")
    tree.results({BENCHMARK: row(1.0)}, sha)
    tree.line(
        commit=sha,
        run_id="run-0",
        started_at=START_S - 600.0,
        provenance={"engine_tree": "f" * 40, "dirty": False},
    )
    tree.line(commit=sha, provenance={"engine_tree": repository.engine_tree(sha), "dirty": False})

    ingest(engine, [tree.root], repository=repository.root)

    assert values(engine) == [1.0]


def test_an_edited_checkout_is_dirty_and_never_in_the_history(engine, tree, repository):
    sha = repository.commit("base")
    tree.results({BENCHMARK: row(1.0)}, sha)
    tree.line(commit=sha, provenance={"engine_tree": "f" * 40, "dirty": True})

    report = ingest(engine, [tree.root], repository=repository.root)

    assert report.refused == ()
    with Session(engine) as session:
        assert history(session, 1).empty
        assert case_results(session, sha) == []
        assert history(session, 1, include_dirty=True)["dirty"].tolist() == [True]
        assert len(case_results(session, sha, include_dirty=True)) == 1


def test_an_edited_checkout_whose_engine_is_the_commits_is_clean(engine, tree, repository):
    sha = repository.commit("base")
    tree.results({BENCHMARK: row(1.0)}, sha)
    own = {"engine_tree": repository.engine_tree(sha), "dirty": True}
    tree.line(commit=sha, provenance=own)

    ingest(engine, [tree.root], repository=repository.root)

    with Session(engine) as session:
        assert history(session, 1)["dirty"].tolist() == [False]


def test_code_of_a_commit_the_repository_does_not_know_is_taken_at_its_word(
    engine, tree, repository
):
    repository.commit("base")
    tree.results({BENCHMARK: row(1.0)})
    tree.line(provenance={"engine_tree": "f" * 40, "dirty": False})

    report = ingest(engine, [tree.root], repository=repository.root)

    assert report.refused == ()
    assert report.windows_joined == 1


def test_what_was_measured_elsewhere_marks_its_commit_and_needs_no_clock(engine, tree):
    tree.results({BENCHMARK: row(0.327, stats_repeat=[1])})
    tree.line(started_at=0.0, ended_at=0.0, timer="external", provenance={"external": True})

    report = ingest(engine, [tree.root])

    assert report.windows_joined == 1
    assert rows(engine, Commit.sha, Commit.external) == [(SHA, True)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": None}, "schema: expected int, got null"),
        ({"benchmark": 4}, "benchmark: expected str, got int"),
        ({"params": [1024]}, "params: expected texts"),
        ({"median_s": "fast"}, "median_s: expected float, got str"),
        ({"median_s": float("nan")}, "median_s: expected a finite number"),
        ({"samples_s": [None]}, "samples_s: expected numbers"),
        ({"pid": True}, "pid: expected int, got bool"),
        ({"pid": 2**63}, "pid: expected a number of 64 bits"),
        ({"stage_seconds": {"draft": "x"}}, "draft: expected float, got str"),
        ({"counters": {"power_w": 131.0}}, "power_w: expected a JSON object, got float"),
        ({"device": None}, "device: expected dict, got null"),
        ({"provenance": {"dirty": "no"}}, "dirty: expected bool, got str"),
    ],
)
def test_a_wrong_line_is_refused_by_file_and_number(tmp_path, change, message):
    path = tmp_path / "run.jsonl"
    append_line(path)
    append_line(path, **change)

    with pytest.raises(IngestError) as refusal:
        read_sidecar(path, None)

    assert "run.jsonl:2" in str(refusal.value)
    assert message in str(refusal.value)
