"""`ddtree-bench run` with a real asv on a repository of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from dashboard.asv_runs import AsvRun
from dashboard.cli_exit import ExitCode
from dashboard.cli_run import _store_findings
from db.ingest import ingest
from db.models import Run
from tests.asv_trees import BENCHMARK, START_S, AsvTree, GitRepository, row

ROOT = Path(__file__).parent.parent
SUITE = """
class Case:
    params, param_names = [1, 2], ["size"]
    number, repeat, rounds, warmup_time, version = 1, 5, 1, 0, "1"

    def time_case(self, size):
        {body}
"""

SECOND = """
class Second(Case):
    params = [1]
"""


@pytest.fixture
def repository(tmp_path):
    """A checkout with the project's asv plugin and a suite of two cases."""
    made = GitRepository(tmp_path / "checkout")
    made.configure_asv(ROOT)
    return made


def write_suite(repository, body):
    suite = repository.root / "benchmarks" / "suite.py"
    suite.write_text(SUITE.format(body=body), encoding="utf-8")


def run(repository, *arguments):
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": "/nonexistent",
        "DDTREE_BENCH_STARTS_AHEAD": "0",  # the suite needs no torch
    }
    return subprocess.run(
        [sys.executable, "-m", "dashboard.cli", "run", "--machine", "bench-1", *arguments],
        cwd=repository.root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_run_stores_and_compares_with_the_newest_earlier_commit(repository):
    write_suite(repository, "sum(range(1000 * size))")
    first = repository.commit("first", date=START_S)
    one = run(repository)

    write_suite(repository, "sum(range(1000 * size)) if size == 1 else 1 / 0")
    second = repository.commit("second", date=START_S + 60)
    two = run(repository)

    assert one.returncode == ExitCode.OK, one.stderr
    assert "2 results new" in one.stdout
    assert "nothing earlier was measured on this machine" in one.stdout
    assert f"2 new of 2 cases ({first[:10]})" in one.stdout
    assert two.returncode == ExitCode.FAILED, two.stderr
    assert f"({first[:10]} → {second[:10]})" in two.stdout
    assert two.stderr.splitlines()[-1] == (
        f"ddtree-bench: failed: {second[:8]} suite.Case.time_case(2)"
    )
    assert "failed on the contender" in two.stdout


@pytest.mark.slow
def test_two_commits_take_turns_and_which_goes_first_alternates(repository):
    write_suite(repository, "sum(range(1000 * size))")
    suite = repository.root / "benchmarks" / "suite.py"
    suite.write_text(suite.read_text() + SECOND, encoding="utf-8")
    old = repository.commit("old", date=START_S)
    repository.commit("between", date=START_S + 60)
    new = repository.commit("new", date=START_S + 120)

    done = run(repository, "--commits", f"{old}^! HEAD~1..HEAD", "--in-turns")

    assert done.returncode == ExitCode.OK, done.stderr
    began = re.findall(r"^\[commit \d/2 (\w{8}), \d/2\] suite\.(\w+)", done.stderr, re.MULTILINE)
    assert began == [
        (old[:8], "Case"),
        (new[:8], "Case"),
        (new[:8], "Second"),
        (old[:8], "Second"),
    ]
    assert f"3 new of 3 cases ({old[:10]})" in done.stdout
    assert f"({old[:10]} → {new[:10]})" in done.stdout


def test_findings_are_kept_with_the_results_of_their_run(engine, tmp_path):
    tree = AsvTree(tmp_path).benchmark()
    tree.results({BENCHMARK: row(0.01, started_at=START_S * 1000)})
    tree.line(run_id="run-1")
    ingest(engine, [tmp_path])
    measured = AsvRun(
        results_dir=tmp_path,
        sidecar_dir=tmp_path,
        run_id="run-1",
        commits=(),
        failed=(),
        num_measured=1,
        num_kept=0,
        left=None,
        findings=("noisy: load: expected an idle machine",),
    )

    with Session(engine) as session:
        _store_findings(session, measured)

    with Session(engine) as session:
        assert session.scalars(select(Run.findings)).all() == [list(measured.findings)]


def test_run_of_commits_that_do_not_exist_is_one_line(repository):
    repository.commit("first")

    done = run(repository, "--commits", "nowhere..HEAD")

    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert not list(repository.root.glob("*.db"))
