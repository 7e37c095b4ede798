"""Processes that import ahead measure alone, one case each, and end with asv; on a real asv."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks._asv_ahead import (
    COUNT_VARIABLE,
    MOST,
    SHARES_VARIABLE,
    AheadError,
    num_ahead,
    shares_process,
)
from tests.asv_trees import START_S, GitRepository

ROOT = Path(__file__).parent.parent
LONGEST_S = 60
IMPORT_S = 0.3
SHARED = {"DDTREE_BENCH_PROFILE": "history"}
# Stands in for torch, as a library that takes a while and is on nobody else's path.
LIBRARY = f"""
import time
end_s = time.process_time() + {IMPORT_S}
while time.process_time() < end_s:
    pass
"""
SUITE = '''
import json, os, signal, subprocess, sys, time
from pathlib import Path

WAS_AHEAD = "slow_library" in sys.modules
LOG = Path(os.environ["BENCH_LOG"])


def others():
    """State and CPU ticks of the processes that asv has beside this one."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getppid() and int(folder.name) != os.getpid():
            found[folder.name] = fields[0], int(fields[11]) + int(fields[12])
    return found


def said_to_it():
    return None if os.environ.get("DDTREE_BENCH_SERVES") else sys.stdin.read()


def tell(**words):
    with LOG.open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "ahead": WAS_AHEAD, **words}) + "\\n")


class _Case:
    number, repeat, rounds, warmup_time, version = 1, 1, 2, 0, "1"


class Cached(_Case):
    def setup_cache(self):
        return 1

    def time_it(self, cache):
        tell(case="cached")


class Plain(_Case):
    params, param_names = [1, 2, 3], ["size"]

    def time_it(self, size):
        before = others()
        time.sleep(0.15)
        tell(case=f"plain {size}", stdin=said_to_it(), before=before, after=others())


class Raises(_Case):
    def time_it(self):
        print("said before it failed")
        raise ValueError("this one fails")


class Leaves(_Case):
    def time_it(self):
        sys.exit(3)


class Slow(_Case):
    timeout = 3

    def time_it(self):
        child = subprocess.Popen(["sleep", "600"])
        tell(case="slow", child=child.pid)
        time.sleep(600)


class Lacking(_Case):
    def time_it(self):
        from engine.newer import name


class Broken(_Case):
    def time_it(self):
        import engine.broken


class Mutters(_Case):
    rounds, params, param_names = 1, [1, 2], ["size"]

    def time_it(self, size):
        if size == 2:
            print("mut" + "tered")
        tell(case=f"mutters {size}")


class Then(_Case):
    rounds, params, param_names = 1, [1, 2], ["size"]

    def time_it(self, size):
        tell(case=f"then {size}")


class Hangs(_Case):
    def time_it(self):
        tell(case="hangs", others=others())
        time.sleep(600)
'''


class Checkout:
    """A checkout with a suite that says who measures it, and asv called on it."""

    def __init__(self, root):
        self.repository = GitRepository(root / "checkout")
        self.log = root / "log"
        suites = self.repository.configure_asv(ROOT)
        script = suites / "_asv_waiting.py"
        text = script.read_text(encoding="utf-8")
        assert '"torch")' in text
        script.write_text(text.replace('"torch")', '"slow_library")'), encoding="utf-8")
        (suites / "suite.py").write_text(SUITE, encoding="utf-8")
        (root / "path").mkdir()
        (root / "path" / "slow_library.py").write_text(LIBRARY, encoding="utf-8")
        self.environ = {
            "PATH": os.environ["PATH"],
            "ASV_PYTHONPATH": str(root / "path"),
            "HOME": "/nonexistent",
            "BENCH_LOG": str(self.log),
            "DDTREE_BENCH_PROFILE": "full",
        }
        self.repository.commit("first", date=START_S)

    def start(self, bench, count, **environ):
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "asv", "run", "--set-commit-hash", "HEAD"),
                *("--environment", f"existing:{sys.executable}", "--show-stderr", "--bench", bench),
            ],
            cwd=self.repository.root,
            env=self.environ | {COUNT_VARIABLE: str(count)} | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, bench, count=2, **environ):
        process = self.start(bench, count, **environ)
        printed, _ = process.communicate(timeout=LONGEST_S)
        return process.returncode, printed

    def said(self):
        text = self.log.read_text(encoding="utf-8") if self.log.is_file() else ""
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition):
    end_s = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.slow
def test_each_case_and_round_has_a_process_that_measures_while_the_others_sleep(checkout):
    status, printed = checkout.run("Plain|Cached", count=3)

    said = checkout.said()
    plain = [one for one in said if one["case"] != "cached"]
    assert status == 0, printed
    assert sorted(one["case"] for one in plain) == sorted(2 * ["plain 1", "plain 2", "plain 3"])
    assert len({one["pid"] for one in said}) == len(said) == 8
    assert all(one["ahead"] for one in plain)
    assert not any(one["ahead"] for one in said if one not in plain)
    assert [len(one["before"]) for one in plain] == [2, 1, 0, 2, 1, 0]
    assert all(one["before"] == one["after"] for one in plain), plain
    assert {state for one in plain for state, _ in one["before"].values()} == {"S"}
    assert {one["stdin"] for one in plain} == {""}


@pytest.mark.slow
def test_a_case_that_fails_or_takes_too_long_is_told_from_the_others(checkout):
    status, printed = checkout.run("Raises|Leaves|Slow|Plain.*1")

    assert status == 2
    assert "said before it failed" in printed
    assert "ValueError: this one fails" in printed
    assert "asv: benchmark failed (exit status 3)" in printed
    assert "asv: benchmark timed out (timeout 3s)" in printed
    assert [one["case"] for one in checkout.said()].count("plain 1") == 2
    (child,) = [one["child"] for one in checkout.said() if one["case"] == "slow"]
    assert not is_running(child)


@pytest.mark.slow
def test_where_a_profile_shares_a_process_it_serves_case_after_case_until_one_fails(checkout):
    status, printed = checkout.run("Mutters|Raises|Slow|Then", **SHARED)

    said = checkout.said()
    by_case = {one["case"]: one["pid"] for one in said}
    assert status == 2
    assert "said before it failed" in printed
    assert "ValueError: this one fails" in printed
    assert "asv: benchmark timed out (timeout 3s)" in printed
    assert printed.count("muttered") == 1
    assert all(one["ahead"] for one in said)
    served = {by_case[name] for name in ("mutters 1", "mutters 2", "then 1", "then 2")}
    assert len(served) == 1  # those that fail have two rounds, and the first of them is before
    assert by_case["slow"] not in served
    (child,) = [one["child"] for one in said if one["case"] == "slow"]
    assert not is_running(child)


@pytest.mark.slow
def test_what_an_older_engine_does_not_have_yet_is_skipped_and_what_it_breaks_fails(checkout):
    package = checkout.repository.root.parent / "path" / "engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "broken.py").write_text("from engine import gone\n", encoding="utf-8")
    status, printed = checkout.run("Lacking|Broken|Then", **SHARED)

    results = list((checkout.repository.root / ".asv" / "results").glob("*/*-*.json"))
    (content,) = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    values = {name: row[0] for name, row in content["results"].items()}
    assert status == 2
    assert "asv: skipped: the engine of this commit has no engine.newer" in printed
    assert "cannot import name 'gone' from 'engine'" in printed
    assert values["suite.Broken.time_it"] is None
    assert [math.isnan(one) for one in values["suite.Lacking.time_it"]] == [True]
    assert all(one > 0 for one in values["suite.Then.time_it"])


@pytest.mark.slow
def test_each_round_of_those_that_share_has_a_process_of_its_own(checkout):
    status, printed = checkout.run("Plain", DDTREE_BENCH_PROFILE="quick")

    said = checkout.said()
    rounds = [[one["pid"] for one in said[at : at + 3]] for at in (0, 3)]
    assert status == 0, printed
    assert [len(set(pids)) for pids in rounds] == [1, 1]
    assert rounds[0] != rounds[1]
    assert all(one["ahead"] for one in said)
    assert [len(one["before"]) for one in said] == [1, 1, 1, 0, 0, 0]  # the next round's sleeps
    assert all(one["before"] == one["after"] for one in said), said


def test_who_shares_a_process_is_the_profiles_choice_unless_told():
    assert shares_process({})  # of `quick`
    assert not shares_process({SHARES_VARIABLE: "0"})
    assert not shares_process({SHARES_VARIABLE: "1", COUNT_VARIABLE: "0"})


@pytest.mark.slow
def test_those_that_wait_end_with_an_asv_that_is_killed(checkout):
    process = checkout.start("Hangs", 3)
    wait_until(checkout.said)
    (told,) = checkout.said()
    waiting = [int(pid) for pid in told["others"]]
    are_running = [is_running(pid) for pid in waiting]

    process.send_signal(signal.SIGKILL)
    process.wait()

    try:
        assert are_running == [True, True]
        wait_until(lambda: not any(is_running(pid) for pid in waiting))
    finally:
        os.kill(told["pid"], signal.SIGKILL)  # asv leaves the one in flight
        process.stdout.close()


@pytest.mark.slow
def test_one_at_a_time_is_left_to_asv(checkout):
    status, printed = checkout.run("Plain.*1", count=1)

    assert status == 0, printed
    assert [(one["ahead"], one["before"]) for one in checkout.said()] == 2 * [(False, {})]


def test_the_number_of_processes_is_that_of_cores_or_as_told():
    assert num_ahead({}) == min(len(os.sched_getaffinity(0)), MOST)
    assert num_ahead({COUNT_VARIABLE: "0"}) == 0
    with pytest.raises(AheadError, match="expected a number of processes, got 'many'"):
        num_ahead({COUNT_VARIABLE: "many"})
