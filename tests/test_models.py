"""What the tables refuse by themselves, on both databases."""

import datetime as dt

import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.orm import Session

from db.models import (
    Annotation,
    Benchmark,
    Commit,
    Machine,
    Metric,
    Result,
    Run,
    Sample,
    Series,
    User,
    Variant,
)

NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)


@pytest.fixture
def session(engine):
    with Session(engine) as session:
        yield session


@pytest.fixture
def place(session):
    """One of everything a result needs."""
    parents = [
        Commit(id=1, sha="a" * 40, committed_at=NOON, order_basis="date", external=False),
        Machine(id=1, name="laptop"),
        Variant(id=1, label="", python="3.11", requirements={}, env_vars={}, digest=1),
        Benchmark(id=1, name="b", version="1", kind="time", param_names=[]),
        Metric(id=1, name="time", unit="seconds", direction="lower"),
    ]
    session.add_all(parents)
    session.flush()
    series = Series(id=1, benchmark_id=1, params="", metric_id=1, machine_id=1, variant_id=1)
    run = Run(id=1, commit_id=1, machine_id=1, variant_id=1, source_digest=1, ingested_at=NOON)
    session.add_all([series, run])
    session.commit()


def result(**more):
    values = {
        "series_id": 1,
        "commit_id": 1,
        "run_id": 1,
        "started_at_ms": 5,
        "digest": 1,
        "status": "ok",
        "value": 1.0,
        "dirty": False,
    }
    return Result(**(values | more))


@pytest.mark.parametrize(
    ("status", "value"), [("failed", 1.0), ("skipped", 1.0), ("ok", None), ("single-sample", None)]
)
def test_a_value_is_there_exactly_where_something_was_measured(session, place, status, value):
    session.add(result(status=status, value=value))

    with pytest.raises(IntegrityError, match="value_iff_measured"):
        session.commit()


def test_the_same_measurement_is_stored_once(session, place):
    session.add_all([result(), result()])

    with pytest.raises(IntegrityError):
        session.commit()


def test_an_unknown_status_is_refused_before_it_is_sent(session, place):
    session.add(result(status="fine"))

    with pytest.raises(StatementError, match="fine"):
        session.commit()


def test_a_result_without_its_series_is_refused(session, place):
    session.add(result(series_id=99))

    with pytest.raises(IntegrityError):
        session.commit()


def test_samples_go_with_their_result(session, place):
    session.add(result(id=7))
    session.flush()
    session.add_all([Sample(result_id=7, position=place, value=1.0) for place in range(3)])
    session.commit()

    session.execute(delete(Result).where(Result.id == 7))

    assert session.scalar(select(func.count()).select_from(Sample)) == 0


def test_an_annotation_is_about_something(session):
    session.add(User(id=1, email="a@example.org", name="A", role="triager"))
    session.flush()
    session.add(Annotation(user_id=1, text="noise", created_at=NOON))

    with pytest.raises(IntegrityError, match="has_subject"):
        session.commit()


def test_instants_come_back_in_utc_whatever_zone_they_went_in_with(session):
    zone = dt.timezone(dt.timedelta(hours=9))
    session.add(
        Commit(
            sha="b" * 40,
            committed_at=NOON.astimezone(zone),
            order_basis="date",
            external=False,
        )
    )
    session.commit()
    session.expire_all()

    stored = session.scalars(select(Commit.committed_at)).one()

    assert stored == NOON
    assert stored.utcoffset() == dt.timedelta(0)


def test_declared_requirements_come_back_as_they_went_in(session):
    needs = {"torch": "2.13.0", "triton": ""}
    session.add(
        Variant(label="x", python="3.11", requirements=needs, env_vars={"A": "1"}, digest=-(2**63))
    )
    session.commit()
    session.expire_all()

    stored = session.scalars(select(Variant)).one()

    assert (stored.requirements, stored.env_vars, stored.digest) == (needs, {"A": "1"}, -(2**63))
