"""The incident beside the H200 that repeated it, word for word, and that no word outlives its number."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import Session

from dashboard.cli import main
from db.ingest import ingest
from db.numbers import MISSING
from db.queries import evidence
from db.reproduction import LADDER, ORIGINAL, REPEATED, side_by_side
from db.session import open_database

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "benchmarks" / "recorded"
TREES = ("original-incident", "h200", "h200-attention")  # what the kept report is of
GOLDEN = Path(__file__).parent / "golden" / "incident.txt"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('recorded') / 'recorded.db'}"
    engine = open_database(url, must_exist=False)
    ingest(engine, [RECORDED / name for name in TREES])
    engine.dispose()
    return url


@pytest.fixture(scope="module")
def stored(recorded):
    engine = open_database(recorded, must_exist=True)
    with Session(engine) as session:
        yield tuple(evidence(session, series=name) for name in (ORIGINAL, REPEATED, LADDER))
    engine.dispose()


def call(url, *arguments):
    return CliRunner().invoke(main, ["--db", url, "diagnose", "--incident", *arguments])


def beside(stored, *, repeated=None, ladders=None):
    (original, *_), runs, climbed = stored
    return side_by_side(
        original, runs if repeated is None else repeated, climbed if ladders is None else ladders
    )


def known(found):
    return {one.what: one for one in found.known}


def counter(found, name):
    return next(one for one in found.counters if one.what == name)


def changed(stored, **counters):
    """The newest reproduction with other counters in its walk."""
    first = stored[1][0]
    points = [
        replace(point, counters={**point.counters, **counters})
        if "triton_serial" in point.params
        else point
        for point in first.points
    ]
    return [replace(first, points=tuple(points))]


def test_the_recorded_runs_give_the_report_that_is_kept(recorded, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # as wide as a log is
    found = call(recorded)

    assert found.exit_code == 0, found.output
    assert [line.rstrip() for line in found.stdout.splitlines()] == GOLDEN.read_text(
        encoding="utf-8"
    ).splitlines()


def test_what_was_tested_on_one_card_is_not_supported_on_the_other(stored):
    told = known(beside(stored))

    assert (told["missing parallelism"].original, told["missing parallelism"].repeated) == (
        "consistent",
        "supported",
    )
    assert {told[name].original for name in ("V re-read", "page size 1")} == {"untested"}
    assert told["missing parallelism"].worth == pytest.approx(23.76, abs=0.01)
    assert [one.is_cause for one in beside(stored).known if one.factor] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert told["page size 1"].alone == pytest.approx(1.413, abs=0.001)


def test_the_counter_that_looked_alike_is_told_from_those_that_did_not(stored):
    found = beside(stored)

    resident, active = counter(found, "utilization_gpu"), counter(found, "gpm_sm_active")
    assert (resident.original, resident.repeated, resident.fast) == ("99.8 %", "99 %", "98 %")
    assert resident.worth.startswith("misleads")
    assert (active.original, active.repeated, active.fast) == (MISSING, "5.6 %", "85.3 %")
    assert "94.4 %" in active.worth


def test_a_reproduction_that_was_busy_says_nothing_misled(stored):
    busy = {"gpm_sm_active_pct": 93.0, "utilization_memory_pct": 71.0, "power_w": 610.0}

    found = beside(stored, repeated=changed(stored, **busy))

    for name in ("utilization_gpu", "utilization_memory", "power", "gpm_sm_active", "gpm_tensor"):
        assert counter(found, name).worth == "", name
    assert known(found)["too few programs for the SMs"].repeated == "untested"
    assert "5.6" not in json.dumps(found.to_dict())


def test_without_a_ladder_no_cause_is_told(stored):
    found = beside(stored, ladders=[])

    assert {one.is_cause for one in found.known} == {None}
    assert known(found)["V re-read"].repeated == "untested"
    assert not any("Tested" in line for line in found.summary)


def test_without_a_walk_over_as_many_rows_there_is_nothing_beside_it(stored):
    short = [
        replace(run, points=tuple(one for one in run.points if one.context_tokens != 65536))
        for run in stored[1]
    ]

    assert beside(stored, repeated=short) is None


def test_the_report_is_strict_json_too(recorded):
    found = json.loads(call(recorded, "--json").stdout)

    assert len(found["known"]) == 11
    assert found["sources"][0][1].startswith("NVIDIA RTX PRO 6000 Blackwell")


def test_what_is_not_stored_is_named_with_the_command_that_stores_it(recorded, tmp_path):
    url = f"sqlite:///{tmp_path / 'alone.db'}"
    engine = open_database(url, must_exist=False)
    ingest(engine, [RECORDED / "original-incident"])
    engine.dispose()

    alone, elsewhere = call(url), call(recorded, "--machine", "nobody")

    assert (alone.exit_code, elsewhere.exit_code) == (4, 4)
    assert "found none (`ddtree-bench ingest benchmarks/recorded` stores both)" in alone.stderr
    assert call(recorded, "--commit", "85d3d67e").exit_code == 2
