"""Change points of whole databases: what is stored, kept, withdrawn and explained."""

import datetime as dt

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from db.columns import OrderBasis
from db.detection import detect_all
from db.ingest import ingest
from db.models import Alert, ChangePoint, Commit, Revision
from tests.asv_trees import START_S, AsvTree, row

DAYS = 24
CLOCK_MHZ = 1980.0


def sha(day):
    return f"{day:02x}" * 20


def level(day, ratio=1.2):
    """A flat series with a little noise that steps up in its middle."""
    return 0.010 * (1 + day % 3 / 1000) * (ratio if day >= DAYS // 2 else 1.0)


@pytest.fixture
def tree(tmp_path):
    made = AsvTree(tmp_path / "results").benchmark()
    for day in range(DAYS):
        add(made, day, level(day))
    return made


def add(tree, day, value):
    start_s = START_S + day * 86_400
    rows = {"step.Step.time_step": row(value, started_at=start_s * 1000)}
    tree.results(rows, sha(day), date=start_s * 1000)


def stored(engine):
    query = select(Commit.sha, ChangePoint).join(Commit, Commit.id == ChangePoint.commit_id)
    with Session(engine) as session:
        return {row[0]: row[1] for row in session.execute(query)}


def num_revisions(engine):
    with Session(engine) as session:
        return session.scalar(select(func.count()).where(Revision.kind == "detect"))


def test_new_level_is_stored_with_the_commit_that_began_it(engine, tree):
    ingest(engine, [tree.root])

    report = detect_all(engine)

    assert (report.series, report.change_points, report.new, report.gone) == (1, 1, 1, 0)
    (point,) = stored(engine).values()
    assert list(stored(engine)) == [sha(DAYS // 2)]
    assert point.before == pytest.approx(0.010, rel=0.01)
    assert point.relative_change == pytest.approx(0.2, abs=0.01)
    assert point.cause == "unknown"


def test_commits_that_a_repository_knows_to_be_off_main_are_not_judged(engine, tree):
    ingest(engine, [tree.root])
    with Session(engine) as session, session.begin():
        for commit in session.scalars(select(Commit)):
            on_main = commit.sha < sha(DAYS // 2)
            commit.order_basis, commit.branch = OrderBasis.REPOSITORY, "main" if on_main else None

    report = detect_all(engine)

    assert (report.series, report.change_points) == (1, 0)


def test_second_pass_keeps_the_row_and_tells_pages_nothing(engine, tree):
    ingest(engine, [tree.root])
    detect_all(engine)
    (first,) = stored(engine).values()

    report = detect_all(engine)

    (second,) = stored(engine).values()
    assert (report.change_points, report.new, report.gone) == (1, 0, 0)
    assert (second.id, second.detected_at) == (first.id, first.detected_at)
    assert num_revisions(engine) == 1


def test_point_that_is_not_found_any_more_goes(engine, tree):
    ingest(engine, [tree.root])
    withdraw_at(engine, day=3)

    report = detect_all(engine)

    assert (report.change_points, report.new, report.gone) == (1, 1, 1)
    assert list(stored(engine)) == [sha(DAYS // 2)]


def test_point_that_somebody_was_alerted_to_stays(engine, tree):
    ingest(engine, [tree.root])
    withdraw_at(engine, day=3, alerted=True)

    report = detect_all(engine)

    assert report.gone == 0
    assert set(stored(engine)) == {sha(3), sha(DAYS // 2)}


def withdraw_at(engine, *, day, alerted=False):
    """Store a change point that no pass would find."""
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    with Session(engine) as session, session.begin():
        commit_id = session.scalar(select(Commit.id).where(Commit.sha == sha(day)))
        point = ChangePoint(
            series_id=1,
            commit_id=commit_id,
            before=1.0,
            after=2.0,
            relative_change=1.0,
            p_value=0.5,
            cause="unknown",
            detected_at=now,
        )
        session.add(point)
        session.flush()
        if alerted:
            session.add(Alert(change_point_id=point.id, state="open", opened_at=now))


def test_level_that_follows_the_clock_is_the_clocks(engine, tree):
    for day in range(DAYS):
        clock = CLOCK_MHZ / (1.2 if day >= DAYS // 2 else 1.0)
        tree.line(
            window_id=f"{day:032x}",
            commit=sha(day),
            started_at=START_S + day * 86_400 + 1.0,
            ended_at=START_S + day * 86_400 + 2.0,
            counters={
                "sm_clock_mhz": {"median": clock, "min": clock, "max": clock, "n": 5, "unit": "MHz"}
            },
        )
    report = ingest(engine, [tree.root])
    assert report.windows_joined == DAYS

    assert detect_all(engine).causes == {"clock": 1}


def test_level_with_everything_recorded_and_still_is_the_codes(engine, tree):
    for day in range(DAYS):
        tree.line(
            window_id=f"{day:032x}",
            commit=sha(day),
            started_at=START_S + day * 86_400 + 1.0,
            ended_at=START_S + day * 86_400 + 2.0,
            device={"driver": "595.1"},
        )
    ingest(engine, [tree.root])

    assert detect_all(engine).causes == {"code": 1}


def test_level_that_follows_the_driver_is_the_environments(engine, tree):
    for day in range(DAYS):
        tree.line(
            window_id=f"{day:032x}",
            commit=sha(day),
            started_at=START_S + day * 86_400 + 1.0,
            ended_at=START_S + day * 86_400 + 2.0,
            device={"driver": "595.1" if day < DAYS // 2 else "600.1"},
        )
    ingest(engine, [tree.root])

    assert detect_all(engine).causes == {"environment": 1}


def test_failed_pass_stores_nothing(engine, tree, monkeypatch):
    ingest(engine, [tree.root])
    monkeypatch.setattr("db.found_points.FIELDS", ("before", "no_such_field"))

    with pytest.raises(AttributeError):
        detect_all(engine)

    assert stored(engine) == {}
    assert num_revisions(engine) == 0
