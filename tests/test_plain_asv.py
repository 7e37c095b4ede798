"""asv by itself gives the series of `ddtree-bench run`, in this environment and in one it makes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.ingest import ingest
from db.models import Benchmark, Machine, Metric, Series, Variant, Window
from db.session import open_database

ROOT = Path(__file__).parent.parent
LONGEST_S = 1800  # a fresh environment installs torch
BENCH = "^tree"
EXISTING = ["--environment", "existing:same", "--set-commit-hash", "HEAD"]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    if not (ROOT / ".git").exists():
        pytest.skip("needs this checkout's repository")
    folder = tmp_path_factory.mktemp("plain") / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


def call(checkout, *words, **environ):
    kept = {name: value for name, value in os.environ.items() if "DDTREE_BENCH" not in name}
    outcome = subprocess.run(
        [sys.executable, "-m", *words, "--bench", BENCH],
        cwd=checkout,
        env=kept | {"OMP_NUM_THREADS": "1"} | environ,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def stored(checkout, database):
    """Series of what lies there: the identity and its variant, each with the units of its metric."""
    engine = open_database(f"sqlite:///{database}", must_exist=False)
    report = ingest(engine, [checkout / ".asv" / "results"], repository=checkout)
    assert (report.refused, report.windows_unjoined) == ((), 0)
    query = (
        select(
            *(Benchmark.name, Benchmark.version, Series.params, Machine.name),
            *(Metric.name, Metric.unit, Metric.direction, Variant.label),
        )
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
        .join(Machine, Machine.id == Series.machine_id)
        .join(Metric, Metric.id == Series.metric_id)
        .join(Variant, Variant.id == Series.variant_id)
    )
    with Session(engine) as session:
        found = sorted(tuple(row) for row in session.execute(query))
        windows = session.scalars(select(Window)).all()
    engine.dispose()
    assert {window.n > 1 for window in windows} == {True}
    return [row[:-1] for row in found], {row[-1] for row in found}


def forget(checkout):
    shutil.rmtree(checkout / ".asv" / "results")


@pytest.mark.exhaustive
@pytest.mark.timeout(2 * LONGEST_S)
def test_asv_alone_gives_the_series_of_a_run(checkout, tmp_path):
    call(checkout, "dashboard.cli", "run", DDTREE_BENCH_DB=f"sqlite:///{tmp_path / 'run.db'}")
    by_run = stored(checkout, tmp_path / "run.db")
    assert len(by_run[0]) == 3

    forget(checkout)
    call(checkout, "asv", "run", *EXISTING, "--record-samples", ASV_PYTHONPATH=str(checkout))
    assert stored(checkout, tmp_path / "existing.db") == by_run

    forget(checkout)
    call(checkout, "asv", "run", "HEAD^!", "--record-samples")
    cases, variants = stored(checkout, tmp_path / "managed.db")
    config = json.loads((checkout / "asv.conf.json").read_text(encoding="utf-8"))
    (torch,) = config["matrix"]["req"]["torch"]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert cases == by_run[0]
    assert variants == {f"python {python}, torch {torch}"}
