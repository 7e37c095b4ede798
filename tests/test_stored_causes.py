"""Each cause class, from what is stored: results, sidecars and what commits declare."""

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.alert_queries import alerts
from db.change_points import detect
from db.detection import detect_all
from db.ingest import ingest
from db.models import ChangePoint, Commit
from tests.asv_trees import BENCHMARK, START_S, AsvTree, row
from tests.level_series import levels_of, rippled

DAYS, STEP = 24, 12
BENCHMARKS = (BENCHMARK, "tree.Build.time_build", "attention.Cold.time_cold", "moe.Moe.time_layer")
PEER = "peers.Contexts.time_cold"


def sha(day):
    return f"{day:02x}" * 20


def start_s(day):
    return START_S + day * 86_400


def level(day, ratio):
    return 0.010 * (1 + day % 3 / 1000) * (ratio if day >= STEP else 1.0)


class History:
    """A tree of daily results whose middle is a step."""

    def __init__(self, root, benchmarks=(BENCHMARK,)):
        self.tree = AsvTree(root)
        self.benchmarks = benchmarks
        for name in benchmarks:
            self.tree.benchmark(name)

    def day(self, day, ratios, *, spread_rel=0.01, **more):
        rows = {
            name: row(
                (value := level(day, ratio)),
                started_at=start_s(day) * 1000,
                stats_q_25=[value * (1 - spread_rel / 2)],
                stats_q_75=[value * (1 + spread_rel / 2)],
            )
            for name, ratio in zip(self.benchmarks, ratios, strict=True)
        }
        self.tree.results(rows, sha(day), date=start_s(day) * 1000, **more)

    def window(self, day, **more):
        seen = {"started_at": start_s(day) + 1.0, "ended_at": start_s(day) + 2.0}
        self.tree.line(window_id=f"{day:032x}", commit=sha(day), **seen, **more)

    def causes(self, engine):
        ingest(engine, [self.tree.root])
        return detect_all(engine).causes


def owners(engine):
    """Who answers for each alert."""
    with Session(engine) as session:
        return {view.owner for view in alerts(session)}


def where(engine):
    query = select(Commit.sha).join(ChangePoint, ChangePoint.commit_id == Commit.id)
    with Session(engine) as session:
        return session.scalars(query).all()


def test_a_clock_that_fell_by_a_tenth_with_the_step_time_is_the_clock(engine, tmp_path):
    told = History(tmp_path / "results")
    for day in range(DAYS):
        told.day(day, [1 / 0.9])
        clock = 1980.0 * (0.9 if day >= STEP else 1.0)
        seen = {"median": clock, "min": clock, "max": clock, "n": 5, "unit": "MHz"}
        told.window(day, counters={"sm_clock_mhz": seen})

    assert told.causes(engine) == {"clock": 1}
    assert owners(engine) == {"runner laptop"}


def test_a_bump_of_a_declared_dependency_is_a_dependency_on_its_commit(engine, tmp_path):
    """The bump begins another series; its cost shows all the same."""
    told = History(tmp_path / "results")
    for day in range(DAYS):
        torch = "2.12.0" if day >= STEP else "2.11.0"
        told.day(day, [1.2], requirements={"torch": torch}, environment=f"venv-torch{torch}")

    assert told.causes(engine) == {"dependency": 1}
    assert where(engine) == [sha(STEP)]
    assert owners(engine) == {f"commit {sha(STEP)[:12]}"}


def test_a_bump_in_an_existing_environment_is_a_dependency_too(engine, tmp_path):
    told = History(tmp_path / "results")
    for day in range(DAYS):
        told.day(day, [1.2])
        told.window(day, device={"runtime": f"torch 2.{12 if day >= STEP else 11}.0"})

    assert told.causes(engine) == {"dependency": 1}


def test_two_dependencies_measured_side_by_side_stay_two_series(engine, tmp_path):
    told = History(tmp_path / "results")
    for day in range(DAYS):
        for torch, ratio in (("2.11.0", 1.0), ("2.12.0", 1.0)):
            told.day(day, [ratio], requirements={"torch": torch}, environment=f"venv-torch{torch}")

    assert told.causes(engine) == {}


def test_a_driver_that_changed_is_an_environment(engine, tmp_path):
    told = History(tmp_path / "results")
    for day in range(DAYS):
        told.day(day, [1.05])
        told.window(day, device={"driver": "600.1" if day >= STEP else "595.1"})

    assert told.causes(engine) == {"environment": 1}
    assert owners(engine) == {"runner laptop"}


def test_all_cases_of_a_machine_moving_together_are_its_hardware(engine, tmp_path):
    told = History(tmp_path / "results", BENCHMARKS)
    for day in range(DAYS):
        told.day(day, [1.10, 1.09, 1.11, 1.10])

    assert told.causes(engine) == {"hardware": 4}
    assert owners(engine) == {"runner laptop"}


@pytest.mark.parametrize("ratios", [[1.1, 1.1, 1.0, 1.0], [1.1, 1.4, 0.9, 1.02]])
def test_cases_that_moved_apart_are_not_the_hardware(engine, tmp_path, ratios):
    told = History(tmp_path / "results", BENCHMARKS)
    for day in range(DAYS):
        told.day(day, ratios)

    assert set(told.causes(engine)) == {"unknown"}


def test_a_level_no_wider_than_its_own_restless_samples_is_noise(engine, tmp_path):
    told = History(tmp_path / "results")
    for day in range(DAYS):
        told.day(day, [1.05], spread_rel=0.2 if day >= STEP else 0.01)

    assert told.causes(engine) == {"noise": 1}


def test_a_step_of_a_peer_is_nobodys_finding(engine, tmp_path):
    told = History(tmp_path / "results", (PEER,))
    named = {"params": [["'fa3'", "'cuda'"]], "names": ["implementation"]}
    told.tree.benchmark(PEER, **named)
    for day in range(DAYS):
        value = [level(day, 1.5), level(day, 1.2)]
        rows = {PEER: row(value, params=named["params"], started_at=start_s(day) * 1000)}
        told.tree.results(rows, sha(day), date=start_s(day) * 1000)

    assert told.causes(engine) == {"unknown": 1}


def test_what_a_dependency_did_not_do_is_the_codes():
    values = rippled(levels_of((1.0, 20), (1.05, 20)))

    (bump,) = detect(values, dependencies=["2.11"] * 20 + ["2.12"] * 20)
    (code,) = detect(values, dependencies=["2.11"] * 30 + ["2.12"] * 10, epochs=["a"] * 40)

    assert (bump.index, bump.cause) == (20, "dependency")
    assert (code.index, code.cause) == (20, "code")
