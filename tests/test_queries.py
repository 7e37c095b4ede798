"""What pages and commands are told, on both databases."""

import datetime as dt
import math

import numpy as np
import pytest
from sqlalchemy.orm import Session

from db import queries
from db.errors import UnknownCommitError, UnknownSeriesError
from db.evidence import Ceilings
from db.ingest import ingest
from db.models import Alert, ChangePoint
from tests.asv_trees import BENCHMARK, SHA, START_S, AsvTree, row

PARAMS = [["1024", "65536"]]


@pytest.fixture
def tree(tmp_path):
    return AsvTree(tmp_path / "results").benchmark()


@pytest.fixture
def session(engine):
    with Session(engine) as session:
        yield session


@pytest.fixture(autouse=True)
def away_from_any_repository(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def sha_of(number):
    return f"{number:08x}" * 5


def fill(tree, values):
    """One commit for each value, an hour apart."""
    for number, value in enumerate(values):
        start_s = START_S + 3600 * number
        tree.results(
            {BENCHMARK: row(value, started_at=start_s * 1000)}, sha_of(number), date=start_s * 1000
        )


def test_a_returning_environment_has_its_old_epoch_and_an_unknown_one_the_epoch_before(
    engine, tree, session
):
    fill(tree, [1.0] * 6)
    for number, driver in enumerate(["580", "590", None, "590", "580"], start=1):
        if driver is not None:
            started_at = START_S + 3600 * number + 1.0
            tree.line(commit=sha_of(number), started_at=started_at, device={"driver": driver})
    ingest(engine, [tree.root])

    found = queries.history(session, 1)

    assert found["epoch"].tolist() == [0, 0, 1, 1, 1, 0]
    assert found["environment"].tolist() == [
        None,
        "EPYC, driver 580",
        "EPYC, driver 590",
        None,
        "EPYC, driver 590",
        "EPYC, driver 580",
    ]


def test_results_of_one_commit_share_its_order_and_follow_their_start(engine, tree, session):
    for number in (1, 0):
        start = (START_S + 60 * number) * 1000
        tree.results({BENCHMARK: row(float(number), started_at=start)}, environment=str(number))
    ingest(engine, [tree.root])

    found = queries.history(session, 1)

    assert found["order"].tolist() == [0, 0]
    assert found["value"].tolist() == [0.0, 1.0]
    assert found["started_at"].iloc[0].timestamp() == START_S


def test_a_failed_result_stays_a_gap_in_the_history(engine, tree, session):
    fill(tree, [1.0, None, 2.0])
    ingest(engine, [tree.root])

    found = queries.history(session, 1)

    assert found["status"].tolist() == ["ok", "failed", "ok"]
    assert np.isnan(found["value"].iloc[1])


def test_a_commit_is_found_by_its_beginning(engine, tree, session):
    for sha in ("abc1" * 10, "abc2" * 10):
        tree.results({BENCHMARK: row()}, sha)
    ingest(engine, [tree.root])

    assert queries.resolve_commit(session, " ABC1 ") == "abc1" * 10
    assert queries.resolve_commit(session, "abc2" * 10) == "abc2" * 10
    for text, message in (
        ("abc", "which fits abc1"),
        ("feed", "none stored"),
        ("", "none stored"),
        ("%", "none stored"),
        ("____", "none stored"),
    ):
        with pytest.raises(UnknownCommitError, match=message):
            queries.resolve_commit(session, text)


def test_an_unknown_series_is_refused(session):
    for query in (queries.history, queries.change_points):
        with pytest.raises(UnknownSeriesError, match="got 99"):
            query(session, 99)


def test_a_case_has_the_newest_result_of_its_commit(engine, tree, session):
    for number, value in enumerate([1.0, 3.0, 2.0]):
        start = (START_S + 60 * number) * 1000
        tree.results({BENCHMARK: row(value, started_at=start)}, environment=str(number))
    ingest(engine, [tree.root])

    (case,) = queries.case_results(session, SHA)

    assert case.value == 2.0


def test_samples_are_the_recorded_ones_where_no_process_is_known(engine, tree, session):
    tree.results({BENCHMARK: row(1.0, samples=[[1.1, 0.9, 1.0, 1.0]])})
    ingest(engine, [tree.root])

    (case,) = queries.case_results(session, SHA, "laptop")

    assert case.key.name == BENCHMARK
    assert (case.key.machine, case.key.variant, case.key.metric) == (
        "laptop",
        "python 3.11",
        "time",
    )
    assert (case.samples, case.n, case.num_processes) == ((1.1, 0.9, 1.0, 1.0), 4, None)
    assert (case.unit, case.direction, case.status) == ("seconds", "lower", "ok")
    assert queries.case_results(session, SHA, "elsewhere") == []


def test_samples_are_process_medians_where_windows_tell_processes(engine, tree, session):
    tree.results({BENCHMARK: row(1.0, samples=[[1.1, 0.9, 1.0, 1.0]])})
    tree.line(pid=2, median_s=1.05, started_at=START_S + 2.0)
    tree.line(pid=1, median_s=0.95, started_at=START_S + 1.0)
    ingest(engine, [tree.root])

    (case,) = queries.case_results(session, SHA)

    assert (case.samples, case.n, case.num_processes) == ((0.95, 1.05), 4, 2)
    assert case.environment == "EPYC"


def test_windows_replace_no_samples_of_what_is_no_time(engine, tree, session):
    tree.benchmark(type="track", unit="GB/s")
    tree.results({BENCHMARK: row(1.0, samples=[[700.0]])})
    tree.line()
    ingest(engine, [tree.root])

    (case,) = queries.case_results(session, SHA)

    assert case.samples == (700.0,)
    assert case.direction == "higher"


def test_noise_is_learned_from_neighbours_and_blind_to_a_step(engine, tree, session):
    noise = np.random.default_rng(3).normal(0, 0.01, 31)
    level = np.where(np.arange(31) < 15, 1.0, 1.5)
    fill(tree, (level * (1 + noise)).tolist())
    ingest(engine, [tree.root])

    (case,) = queries.case_results(session, sha_of(30))
    (early,) = queries.case_results(session, sha_of(3))

    assert case.noise_rel == pytest.approx(0.01, rel=0.5)
    assert early.noise_rel is None


def test_an_unknown_commit_has_no_cases(session):
    with pytest.raises(UnknownCommitError, match="expected a stored hash"):
        queries.case_results(session, SHA)


GPU = {"kind": "cuda", "name": "NVIDIA H200", "gpu_uuid": "GPU-1", "num_sms": 132}


def counter(value):
    return {"median": value, "min": value, "max": value, "n": 20, "unit": "%"}


def two_processes(tree, **more):
    for pid, scale in ((1, 1.0), (2, 1.2)):
        tree.line(
            pid=pid,
            started_at=START_S + pid,
            device=GPU | {"power_limit_w": 700.0},
            **{
                "median_s": 0.01 * scale,
                "n": 5,
                "stage_seconds": {"verify": 0.006 * scale},
                "counters": {"gpm_sm_active_pct": counter(5.0 * scale)},
                "validity": [f"code_{pid}"],
                "commit_length": 4.0,
                "kv_bytes": 1000,
                "ceilings": {"read_bytes_per_s": 4e12 * scale, "dtype": "bf16"},
            }
            | more,
        )


def test_evidence_merges_the_processes_of_a_case(engine, tree, session):
    tree.benchmark(params=PARAMS, names=["context"])
    tree.results({BENCHMARK: row([0.01, 0.02], params=PARAMS)})
    two_processes(tree, params=["1024"])
    ingest(engine, [tree.root])

    (found,) = queries.evidence(session)

    (point,) = found.points
    assert (found.gpu, found.power_limit_w) == ("NVIDIA H200", 700.0)
    assert found.label == f"{SHA[:12]} on laptop"
    assert found.ceilings == Ceilings(4.8e12, None, "bf16")
    assert found.peak_source == "measured"
    assert (point.benchmark, point.params, point.n) == (BENCHMARK, "context=1024", 10)
    assert math.isclose(point.time_s, 0.011)
    assert math.isclose(point.counters["gpm_sm_active_pct"], 5.5)
    assert point.stage_seconds is not None
    assert math.isclose(point.stage_seconds["verify"], 0.0066)
    assert (point.kv_bytes, point.num_sms, point.commit_length) == (1000, 132, 4.0)
    assert point.validity == ("code_1", "code_2")
    assert point.version == "1"
    assert [len(samples) for samples in point.process_samples_s] == [2, 2]


def test_a_measured_ceiling_makes_a_datasheets_irrelevant(engine, tree, session):
    tree.results({BENCHMARK: row(0.01)})
    tree.line(ceilings={"read_bytes_per_s": 9e12, "source": "datasheet"})
    tree.line(ceilings={"read_bytes_per_s": 4e12, "source": "measured"})
    ingest(engine, [tree.root])

    (found,) = queries.evidence(session)

    assert (found.ceilings.read_bytes_per_s, found.peak_source) == (4e12, "measured")


def test_evidence_without_ceilings_names_no_source(engine, tree, session):
    tree.results({BENCHMARK: row(0.01)})
    tree.line()
    ingest(engine, [tree.root])

    (found,) = queries.evidence(session)

    assert (found.gpu, found.peak_source, found.ceilings) == (None, None, Ceilings())


def test_each_run_is_evidence_of_its_own_the_newest_first(engine, tree, session):
    fill(tree, [0.01, 0.02])
    for number in (0, 1):
        tree.line(
            commit=sha_of(number), run_id=f"run-{number}", started_at=START_S + 3600 * number + 1.0
        )
    ingest(engine, [tree.root])

    found = queries.evidence(session)

    assert [one.label[:8] for one in found] == ["00000001", "00000000"]
    assert len(queries.evidence(session, commit=sha_of(0))) == 1
    assert queries.evidence(session, machine="elsewhere") == []


def test_evidence_is_asked_for_by_a_series_number_or_part_of_a_name(engine, tree, session):
    tree.benchmark("b.Other.time_x")
    tree.results({BENCHMARK: row(0.01), "b.Other.time_x": row(0.02)})
    tree.line()
    tree.line(benchmark="b.Other.time_x")
    ingest(engine, [tree.root])

    for series, wanted in ((1, BENCHMARK), ("1", BENCHMARK), ("other", "b.Other.time_x")):
        (found,) = queries.evidence(session, series=series)
        assert [point.benchmark for point in found.points] == [wanted]
    for series in (99, "nothing", "%"):
        with pytest.raises(UnknownSeriesError):
            queries.evidence(session, series=series)


def test_windows_carry_counters_and_stages_as_columns(engine, tree, session):
    tree.results({BENCHMARK: row(0.01)})
    two_processes(tree)
    tree.line(benchmark="b.Other.time_x")
    ingest(engine, [tree.root])

    found = queries.windows(session, series_id=1)

    assert found["pid"].tolist() == [1, 2]
    assert found["gpm_sm_active_pct"].tolist() == [5.0, 6.0]
    assert found["stage_verify_s"].tolist() == pytest.approx([0.006, 0.0072])
    assert found["commit"].tolist() == [SHA, SHA]
    assert queries.windows(session, result_id=1).equals(found)
    assert queries.windows(session, result_id=99).empty


def test_series_with_results_are_listed(engine, tree, session):
    fill(tree, [1.0, 2.0, 3.0])
    ingest(engine, [tree.root])

    assert queries.series(session)["benchmark"].tolist() == [BENCHMARK]
    assert len(queries.series(session, benchmark=BENCHMARK, machine="laptop")) == 1
    assert queries.series(session, benchmark="other").empty
    assert queries.series(session, machine="other").empty


def test_machines_and_commits_are_listed_with_what_they_measured(engine, tree, session):
    fill(tree, [1.0, 2.0])
    other = AsvTree(tree.root, "desktop").benchmark()
    other.results({BENCHMARK: row(1.0)}, sha_of(7))
    ingest(engine, [tree.root])

    machines = queries.machines(session)

    assert machines[["machine", "runs", "commits"]].values.tolist() == [
        ["desktop", 1, 1],
        ["laptop", 2, 2],
    ]
    assert len(queries.commits(session)) == 3
    assert queries.commits(session, "laptop")["commit"].tolist() == [sha_of(1), sha_of(0)]
    assert queries.commits(session, "desktop")["commit"].tolist() == [sha_of(7)]


def test_the_version_of_the_data_changes_with_what_pages_show(engine, tree, session):
    empty = queries.data_version(session)
    fill(tree, [1.0])
    ingest(engine, [tree.root])
    session.rollback()
    filled = queries.data_version(session)
    ingest(engine, [tree.root])
    session.rollback()
    again = queries.data_version(session)
    tree.line(commit=sha_of(0))
    ingest(engine, [tree.root])
    session.rollback()

    assert empty != filled
    assert filled == again
    assert queries.data_version(session) != again


def test_the_overview_counts_and_names_the_newest_findings(engine, tree, session):
    fill(tree, [1.0, 1.0, 1.2])
    ingest(engine, [tree.root])
    commit_id = 3
    session.add(
        ChangePoint(
            id=1,
            series_id=1,
            commit_id=commit_id,
            before=1.0,
            after=1.2,
            relative_change=0.2,
            p_value=1e-4,
            cause="code",
            detected_at=dt.datetime.now(dt.UTC),
        )
    )
    session.flush()
    session.add(Alert(change_point_id=1, state="open", opened_at=dt.datetime.now(dt.UTC)))
    session.flush()

    found = queries.overview(session)

    assert (found.runs, found.commits, found.machines) == (3, 3, 1)
    assert (found.series, found.results) == (1, 3)
    assert found.last_ingestion is not None
    (finding,) = found.findings
    assert (finding.commit, finding.is_regression, finding.unit) == (sha_of(2), True, "seconds")
    assert (finding.cause, finding.alert_state) == ("code", "open")
    points = queries.change_points(session, 1)
    assert points[["commit", "after", "alert_state"]].values.tolist() == [[sha_of(2), 1.2, "open"]]


def test_queries_answer_on_an_empty_database(session):
    assert queries.overview(session).results == 0
    assert queries.series(session).empty
    assert queries.commits(session).empty
    assert queries.machines(session).empty
    assert queries.evidence(session) == []
    assert queries.data_version(session) == "0"
