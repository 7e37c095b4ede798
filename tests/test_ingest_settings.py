"""What was renamed keeps its history, and a configured meaning wins."""

import datetime as dt

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.columns import AlertState, Direction
from db.errors import IngestError
from db.ingest import ingest
from db.ingest_settings import Meaning, Renamed, Settings, read_settings
from db.models import (
    Alert,
    Benchmark,
    ChangePoint,
    Commit,
    Machine,
    Metric,
    Result,
    Run,
    Runner,
    RunnerEnvironment,
    Series,
    Window,
)
from db.queries import history, series
from tests.asv_trees import NAN, START_S, AsvTree, row

OLD, NEW = "attention.Verify.time_walk", "attention.TreeAttention.time_verify"
RENAMED = Settings(renamed=(Renamed(OLD, NEW, params={"ctx": "context"}),))
MOVED = Settings(machines={"gpu-old": "h200-01"})


@pytest.fixture(autouse=True)
def away_from_any_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def tree_of(tmp_path):
    def tree_of(name, param, shas, machine="laptop"):
        tree = AsvTree(tmp_path / f"{name}-{machine}-{shas[0][:8]}", machine)
        params = [["1024", "65536"]]
        tree.benchmark(name, params=params, names=[param])
        for number, sha in enumerate(shas):
            values = [1.0 + number, 2.0 + number]
            date = (START_S + 60 * int(sha[:8], 16)) * 1000
            tree.results({name: row(values, params=params)}, sha, date=date)
        tree.line(commit=shas[0], benchmark=name, params=["1024"], machine=machine)
        return tree.root

    return tree_of


def sha(number):
    return f"{number:08x}" * 5


def count(engine, model):
    with Session(engine) as session:
        return session.scalar(select(func.count()).select_from(model))


def lists(engine):
    with Session(engine) as session:
        found = series(session)
        results = [len(history(session, one)) for one in found["series_id"]]
        return sorted(zip(found["benchmark"], found["params"], results, strict=True))


def test_a_renamed_benchmark_goes_on_under_its_new_name(engine, tree_of):
    old = tree_of(OLD, "ctx", [sha(1), sha(2)])
    new = tree_of(NEW, "context", [sha(3)])

    ingest(engine, [old, new], settings=RENAMED)

    assert lists(engine) == [(NEW, "context=1024", 3), (NEW, "context=65536", 3)]
    with Session(engine) as session:
        assert history(session, 1)["value"].tolist() == [1.0, 2.0, 1.0]
        joined = session.scalars(select(Window.result_id)).all()
        assert None not in joined


@pytest.mark.parametrize("new_is_there", [False, True])
def test_what_was_stored_under_the_old_name_follows(engine, tree_of, new_is_there):
    old = tree_of(OLD, "ctx", [sha(1), sha(2)])
    new = tree_of(NEW, "context", [sha(3)])
    ingest(engine, [old])
    if new_is_there:
        ingest(engine, [new])

    report = ingest(engine, [new], settings=RENAMED)

    assert report.new_results == (0 if new_is_there else 2)
    assert lists(engine) == [(NEW, "context=1024", 3), (NEW, "context=65536", 3)]
    assert count(engine, Benchmark) == 1
    with Session(engine) as session:
        assert session.scalars(select(Window.benchmark).distinct()).all() == [NEW]
        assert session.scalars(select(Window.id).where(Window.result_id.is_(None))).all() == []


def test_a_measurement_that_both_names_have_is_one(engine, tree_of):
    ingest(engine, [tree_of(OLD, "ctx", [sha(1)]), tree_of(NEW, "context", [sha(1)])])
    assert count(engine, Result) == 4

    ingest(engine, [tree_of(NEW, "context", [sha(2)])], settings=RENAMED)

    assert lists(engine) == [(NEW, "context=1024", 2), (NEW, "context=65536", 2)]


def test_a_rename_that_was_made_changes_nothing_a_second_time(engine, tree_of):
    paths = [tree_of(OLD, "ctx", [sha(1)]), tree_of(NEW, "context", [sha(2)])]
    ingest(engine, paths, settings=RENAMED)
    before = lists(engine)

    report = ingest(engine, paths, settings=RENAMED)

    assert (report.new_results, lists(engine)) == (0, before)


def test_only_the_named_version_is_renamed(engine, tree_of):
    one = Settings(renamed=(Renamed(OLD, NEW, version="2", to_version="1"),))

    ingest(engine, [tree_of(OLD, "context", [sha(1)])], settings=one)

    assert {name for name, *_ in lists(engine)} == {OLD}


def test_alerts_and_change_points_go_with_their_series(engine, tree_of):
    ingest(engine, [tree_of(OLD, "ctx", [sha(1), sha(2)]), tree_of(NEW, "context", [sha(3)])])
    with Session(engine) as session:
        commits = dict(session.execute(select(Commit.sha, Commit.id)).all())
        ids = {
            name: session.scalars(
                select(Series.id).join(Benchmark).where(Benchmark.name == name).order_by(Series.id)
            ).first()
            for name in (OLD, NEW)
        }
        for name, where in ((OLD, 2), (OLD, 3), (NEW, 3)):
            point = point_at(ids[name], commits[sha(where)])
            session.add(point)
            session.flush()
            alert = Alert(
                change_point_id=point.id, state=AlertState.OPEN, opened_at=point.detected_at
            )
            session.add(alert)
        session.commit()

    ingest(engine, [tree_of(NEW, "context", [sha(4)])], settings=RENAMED)

    with Session(engine) as session:
        points = session.execute(
            select(ChangePoint.series_id, Commit.sha).join(Commit).order_by(Commit.sha)
        ).all()
    assert [tuple(one) for one in points] == [(ids[NEW], sha(2)), (ids[NEW], sha(3))]
    assert count(engine, Alert) == 2


def point_at(series_id, commit_id):
    levels = {"before": 1.0, "after": 2.0, "relative_change": 1.0, "p_value": 0.01}
    when = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
    return ChangePoint(
        series_id=series_id, commit_id=commit_id, cause="code", detected_at=when, **levels
    )


@pytest.mark.parametrize("new_is_there", [False, True])
def test_a_renamed_machine_keeps_its_series_runs_and_devices(engine, tree_of, new_is_there):
    ingest(engine, [tree_of(NEW, "context", [sha(1), sha(2)], "gpu-old")])
    newer = tree_of(NEW, "context", [sha(2), sha(3)], "h200-01")
    if new_is_there:
        ingest(engine, [newer])

    ingest(engine, [newer], settings=MOVED)

    # Of the commit that both measured, one file was a copy of the other's.
    assert count(engine, Machine) == 1
    assert len(lists(engine)) == count(engine, Series) == 2
    for model in (Runner, RunnerEnvironment):
        assert count(engine, model) == 1
    assert count(engine, Run) == 4
    with Session(engine) as session:
        assert session.scalars(select(Window.id).where(Window.result_id.is_(None))).all() == []
        assert session.scalars(select(Machine.name)).all() == ["h200-01"]


def test_a_configured_meaning_wins_over_the_units(engine, tmp_path):
    tree = AsvTree(tmp_path / "results")
    tree.benchmark("b.track_x", type="track", unit="unit")
    tree.results({"b.track_x": [[1.0], [], "1"], "gone.track_y": [[NAN], [], "1"]})
    meant = Settings(metrics=(Meaning("b.*", "track", "GB/s", Direction.HIGHER),))

    ingest(engine, [tree.root], settings=meant)

    with Session(engine) as session:
        found = session.execute(select(Metric.unit, Metric.direction).order_by(Metric.id)).all()
    assert [tuple(one) for one in found] == [
        ("GB/s", Direction.HIGHER),
        ("unit", Direction.LOWER),
    ]


def test_a_configuration_is_read_as_it_is_written(tmp_path):
    path = tmp_path / "bench.toml"
    path.write_text(
        """
        [machines]
        "gpu-old" = "h200-01"

        [[renamed]]
        benchmark = "a"
        to = "b"
        version = "1"
        params = { ctx = "context" }

        [[metrics]]
        metric = "gflops"
        unit = "GFLOP/s"
        direction = "higher"
        """
    )

    assert read_settings(path) == Settings(
        machines={"gpu-old": "h200-01"},
        renamed=(Renamed("a", "b", "1", None, {"ctx": "context"}),),
        metrics=(Meaning("*", "gflops", "GFLOP/s", Direction.HIGHER),),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[machines", "expected TOML"),
        ("[machine]", "expected machines, metrics, renamed, got 'machine'"),
        ("machines = 3", "machines: expected dict"),
        ("metrics = [3]", "metrics: entry 1: expected a table, got int"),
        ("[[metrics]]\nmetric = 'x'\nunit = 's'", "direction: expected str"),
        ("[[metrics]]\nmetric = 'x'\nunit = 's'\ndirection = 'up'", "lower or higher, got 'up'"),
        ("[[metrics]]\nmetrics = 'x'", "expected benchmark, direction, metric, unit, got"),
        ("[[renamed]]\nbenchmark = 'a'", "to: expected str"),
        ("[[renamed]]\nbenchmark = 'a'\nto = 'b'\nparams = 1", "params: expected a table"),
        ("[machines]\na = ''", "a: expected a text, got an empty one"),
    ],
)
def test_a_wrong_configuration_is_named_in_one_line(tmp_path, text, message):
    path = tmp_path / "bench.toml"
    path.write_text(text)

    with pytest.raises(IngestError) as refusal:
        read_settings(path)

    assert message in str(refusal.value)
    assert "bench.toml" in str(refusal.value)
    assert "\n" not in str(refusal.value)
