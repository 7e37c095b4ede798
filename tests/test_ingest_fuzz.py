"""Damaged files are read or refused in one line: no traceback, no partial write, no hang."""

import json
import random
import time

import pytest
from sqlalchemy import func, select

from db.errors import IngestError
from db.foreign import Given
from db.ingest import ingest
from db.models import (
    Benchmark,
    Ceiling,
    Commit,
    Machine,
    Metric,
    Result,
    Revision,
    Run,
    Runner,
    Sample,
    Series,
    Variant,
    Window,
    WindowCounter,
)
from tests.asv_trees import BENCHMARK, COLUMNS, SHA, START_S, AsvTree, row, sidecar_line
from tests.damaged_files import damaged
from tests.foreign_files import GOOGLE_BENCHMARK, NVBENCH, PYTEST_BENCHMARK

TABLES = (
    *(Commit, Machine, Variant, Run, Benchmark, Metric, Series, Result, Sample, Revision),
    *(Runner, Ceiling, Window, WindowCounter),
)
PARAMS = [["1", "2"], ["'a'", "'b'"]]
GIVEN = Given(commit=SHA, machine="laptop")
MOST_SECONDS = 10.0  # of one file, on a busy machine
SHORT, LONG = 160, 10_400  # files, over all kinds; 10 000 and more where asked for


def format_1():
    return {
        "commit_hash": SHA,
        "date": START_S * 1000,
        "params": {"machine": "laptop"},
        "python": "3.11",
        "version": 1,
        "results": {
            BENCHMARK: {
                "params": PARAMS,
                "result": [1.0, None, 2.0, float("nan")],
                "stats": [{"q_25": 1.0, "q_75": 2.0, "ci_99": [0.5, 2.5], "number": 1, "repeat": 3}]
                * 4,
                "samples": [[1.0, 2.0], None, [2.0], [3.0]],
            }
        },
        "benchmark_version": {BENCHMARK: "1"},
        "started_at": {BENCHMARK: START_S * 1000},
        "duration": {BENCHMARK: 1.0},
    }


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = AsvTree(tmp_path / "results")
    tree.benchmark(params=PARAMS, names=["n", "mode"])
    values = [1.0, 2.0, None, float("nan")]
    one = row([1.0, 2.0, 3.0, 4.0], params=PARAMS, samples=[[1.0, 2.0], [2.0], None, [4.0]])
    tree.results({BENCHMARK: one | {"result": values}, "gone.track_x": [[280], [], "1"]})
    tree.line(params=["1", "'a'"], counters={"sm_active": counter()}, stage_seconds={"verify": 0.5})
    return tree


def counter():
    return {"unit": "%", "median": 1.0, "min": 0.5, "max": 2.0, "n": 5}


def files_of(tree):
    """What can be damaged: where it lies, its content, and which path is ingested."""
    asv = {
        "laptop/aaaaaaaa-virtualenv-py3.11.json": None,
        "laptop/machine.json": None,
        "benchmarks.json": None,
    }
    found = [(name, json.loads((tree.root / name).read_text()), tree.root) for name in asv]
    found.append(("laptop/old.json", format_1(), tree.root))
    line = sidecar_line(counters={"sm_active": counter()}, stage_seconds={"verify": 0.5})
    found.append(("telemetry/run.jsonl", line, tree.root))
    foreign = (PYTEST_BENCHMARK, GOOGLE_BENCHMARK, NVBENCH)
    path = tree.root / "../foreign.json"
    return [*found, *(("../foreign.json", content, path) for content in foreign)]


def sizes(engine):
    with engine.connect() as connection:
        return [connection.scalar(select(func.count()).select_from(table)) for table in TABLES]


def ingest_or_refuse(engine, path):
    """Ingest a damaged file; give whether it was taken. Anything but IngestError is a finding."""
    before = sizes(engine)
    started = time.monotonic()
    refusal = None
    try:
        ingest(engine, [path], given=GIVEN)
    except IngestError as error:
        refusal = str(error)
    assert time.monotonic() - started < MOST_SECONDS
    if refusal is None:
        return True
    assert "\n" not in refusal
    assert len(refusal) < 2000
    assert sizes(engine) == before
    return False


@pytest.mark.timeout(3600)  # of all of them
def test_damaged_files_are_read_or_refused_in_one_line(engine, tree, is_exhaustive):
    rng = random.Random(20)
    kinds = files_of(tree)
    taken = refused = 0
    for number in range(LONG if is_exhaustive else SHORT):
        name, content, path = kinds[number % len(kinds)]
        file = tree.root / name
        kept = file.read_bytes() if file.exists() else None
        file.write_bytes(damaged(content, rng))
        if ingest_or_refuse(engine, path):
            taken += 1
        else:
            refused += 1
        if kept is None:
            file.unlink()
        else:
            file.write_bytes(kept)

    assert taken > refused / 20
    assert refused > taken / 5
    # Whatever was taken, the database still answers and takes what is whole.
    assert ingest(engine, [tree.root]).values == 5


def test_a_damaged_recorded_order_is_read_or_refused_in_one_line(engine, tree):
    rng = random.Random(21)
    whole = f"{SHA}\t{START_S}\tsubject\n".encode() * 3
    hostile = (b"--5", b"9" * 30, b"-9" + b"9" * 12, b"\xff", b"\x00", b"\xc2\xb2", b"\t\t", b"")
    for _ in range(40):
        place = rng.randrange(len(whole))
        content = whole[:place] + rng.choice(hostile) + whole[place + rng.randrange(12) :]
        (tree.root / "commits.tsv").write_bytes(content)
        ingest_or_refuse(engine, tree.root)


def test_a_short_file_that_names_billions_of_cases_is_refused_at_once(engine, tree):
    many = [[str(n) for n in range(1000)]] * 4
    tree.results({BENCHMARK: [None, many, "1"]})

    with pytest.raises(IngestError, match="at most 100000 cases a benchmark"):
        ingest(engine, [tree.root])


def test_deep_nesting_is_no_json(engine, tree):
    (tree.root / "laptop" / "deep.json").write_text("[" * 100_000)

    with pytest.raises(IngestError, match=r"deep\.json: expected JSON"):
        ingest(engine, [tree.root])


def test_a_file_too_large_is_not_even_read(engine, tree):
    path = tree.root / "laptop" / "large.json"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)  # a hole: it takes no room

    with pytest.raises(IngestError, match=r"large\.json: expected at most 268435456 bytes"):
        ingest(engine, [tree.root])


@pytest.mark.parametrize(
    ("column", "value"),
    [("stats_number", 2**31), ("stats_repeat", -1)],
)
def test_counts_that_no_column_holds_are_refused(engine, tree, column, value):
    tree.results({BENCHMARK: row([1.0] * 4, params=PARAMS, **{column: [value] * 4})})

    with pytest.raises(IngestError, match=f"{column}: expected"):
        ingest(engine, [tree.root])


@pytest.mark.parametrize("text", ["a\x00b", "\ud800", "x" * 600, "é" * 1900])
@pytest.mark.parametrize("place", ["params", "machine", "benchmark", "commit", "counter"])
def test_texts_that_one_of_the_databases_cannot_store_are_refused(engine, tree, place, text):
    before = sizes(engine)
    if place == "params":
        many = text * 4 if len(text) == 600 else text
        tree.results({BENCHMARK: row(1.0, params=[[many]])})
    elif place == "machine":
        tree.write("laptop/machine.json", {"machine": text})
    elif place == "benchmark":
        tree.results({text: row(1.0)})
    elif place == "commit":
        tree.results({BENCHMARK: row(1.0)}, commit_hash=text)
    else:
        tree.line(counters={text: counter()})

    with pytest.raises(IngestError) as refusal:
        ingest(engine, [tree.root])

    assert "\n" not in str(refusal.value)
    assert sizes(engine) == before


def test_rows_of_this_test_have_the_columns_of_the_tool():
    assert {"result", "params", "samples"} <= set(COLUMNS)
