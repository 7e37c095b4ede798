"""A run that is killed loses the benchmark in flight and nothing else, on a real asv."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dashboard.cli_exit import ExitCode
from tests.asv_trees import START_S, GitRepository

ROOT = Path(__file__).parent.parent
LONGEST_S = 60
# Each process that measures a case says so in a file, before and after.
SUITE = '''
import os, time
from pathlib import Path

LOG = Path(os.environ["BENCH_LOG"])
GATE = Path(os.environ["BENCH_GATE"])


def tell(words):
    with LOG.open("a") as file:
        file.write(words + "\\n")


class _Case:
    number, repeat, rounds, warmup_time, version = 1, 1, 1, 0, "1"


class First(_Case):
    def time_it(self):
        tell("first")


class Second(_Case):
    """Never ends before the gate is open."""

    def time_it(self):
        tell("second begins")
        while not GATE.exists():
            time.sleep(0.01)
        tell("second ends")


class _Cached(_Case):
    def setup_cache(self):
        tell("cache")
        return 1


class Alpha(_Cached):
    def time_it(self, cache):
        tell("alpha")


class Beta(_Cached):
    def time_it(self, cache):
        tell("beta")


class Third(_Case):
    params, param_names = list(range(13)), ["size"]

    def time_it(self, size):
        tell(f"third {size}")
'''
NAMES = ("Alpha", "Beta", "First", "Second", "Third")


class Bench:
    """A checkout with a suite that says what it measures, and the command called on it."""

    def __init__(self, root):
        self.repository = GitRepository(root / "checkout")
        self.root = self.repository.root
        self.log, self.gate = root / "log", root / "gate"
        self.locks = root / "locks"
        self.locks.mkdir()
        self.log.touch()
        suites = self.repository.configure_asv(ROOT)
        (suites / "suite.py").write_text(SUITE, encoding="utf-8")

    def start(self, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "dashboard.cli", "run", "--machine", "bench-1", *arguments],
            cwd=self.root,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "HOME": "/nonexistent",
                "TMPDIR": str(self.locks),
                "BENCH_LOG": str(self.log),
                "BENCH_GATE": str(self.gate),
                "DDTREE_BENCH_STARTS_AHEAD": "0",  # the suite needs no torch
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments):
        process = self.start(*arguments)
        out, err = process.communicate(timeout=LONGEST_S)
        return process.returncode, out, err

    def said(self):
        return self.log.read_text(encoding="utf-8").splitlines()

    def wait_for(self, words):
        end_s = time.monotonic() + LONGEST_S
        while words not in self.said():
            assert time.monotonic() < end_s, self.said()
            time.sleep(0.02)

    def measured(self):
        """The values of each benchmark in asv's file."""
        (path,) = (self.root / ".asv" / "results" / "bench-1").glob("*-existing-*.json")
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name.split(".")[1]: row[0] for name, row in content["results"].items()}

    def processes(self):
        """Those that still have the suite's log in their environment."""
        mark = f"BENCH_LOG={self.log}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    made.repository.commit("first", date=START_S)
    made.repository.commit("second", date=START_S + 60)
    return made


def killed_in_second(bench, *arguments):
    """Kill a run while the benchmark that does not end is measured."""
    process = bench.start(*arguments)
    bench.wait_for("second begins")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LONGEST_S)
    end_s = time.monotonic() + LONGEST_S
    while bench.processes():
        assert time.monotonic() < end_s, "a killed run's benchmark measures on"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_measures_nothing_twice(bench):
    killed_in_second(bench, "--commits", "HEAD")
    before = bench.said()
    worktrees = bench.root / ".asv" / "worktrees"
    num_stale = len(list(worktrees.iterdir()))
    kept = bench.measured()
    bench.gate.touch()

    status, out, err = bench.run("--commits", "HEAD")

    assert before == ["cache", "alpha", "beta", "first", "second begins"]
    assert set(kept) == {"Alpha", "Beta", "First"}
    assert num_stale == 1
    assert status == ExitCode.OK, err
    after = bench.said()[len(before) :]
    assert after == ["second begins", "second ends", *(f"third {size}" for size in range(13))]
    results = bench.measured()
    assert {name: results[name] for name in kept} == kept
    assert set(results) == set(NAMES)
    assert len(results["Third"]) == 13
    assert all(isinstance(value, float) for value in results["Third"])
    assert "going on with the run of" in err
    assert "removed 1 worktree of a run that was killed" in err
    assert "17 new of 17 cases" in out
    assert "17 values: 14 results new, 3 known, 0 failed, 0 skipped" in out
    assert err.count("Discovering benchmarks") == 1
    assert list(worktrees.iterdir()) == []
    assert len(bench.repository.git("worktree", "list").splitlines()) == 1
    assert not list((bench.root / ".asv" / "runs").glob("*[0-9a-f].json"))


@pytest.mark.slow
def test_a_run_waits_for_another_and_takes_what_its_time_limit_left(bench):
    chosen = ("--bench", r"Second|Third.*\(7\)")
    first = bench.start(*chosen, "--time-limit", "0.0001")
    bench.wait_for("second begins")
    second = bench.start(*chosen)
    waiting = next(line for line in second.stderr if line.startswith("waiting for"))
    while_waiting = bench.said()
    bench.gate.touch()
    _, limited = first.communicate(timeout=LONGEST_S)
    _, waited = second.communicate(timeout=LONGEST_S)

    assert f"process {first.pid} in {bench.root}" in waiting
    assert while_waiting == ["second begins"]
    assert first.returncode == ExitCode.FAILED
    assert limited.splitlines()[-1].startswith("ddtree-bench: time limit: 1 benchmark of ")
    assert second.returncode == ExitCode.OK, waited
    assert bench.said() == ["second begins", "second ends", "third 7"]
    assert waited.index("is free") < waited.index("going on with the run of")
    assert "[2/2] suite.Third.time_it (1 case); about" in waited
