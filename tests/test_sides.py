"""The process that measures one side of a pair: suites of its folder, the engine of its path."""

import os
import select
import shutil
from dataclasses import replace

import pytest

from benchmarks import _side
from dashboard.asv_errors import AsvFailedError
from dashboard.asv_pairs import ON_CPU, ON_GPU, PairedCase, take_turns
from dashboard.sides import SCRIPT, Side
from tests.engine_repository import ROOT

SUITES = '''
"""Suites that need no torch."""
import os
import time

import engine
from benchmarks._case_end import at_case_end


class Wait:
    version, params, timeout = "1", ([1, 2], ["a"]), 7.0

    def setup(self, milliseconds, name):
        if str(milliseconds) in os.environ.get("LACKS", "2"):
            raise NotImplementedError("no machine is that slow")
        self.setups = getattr(self, "setups", 0) + 1
        if self.setups == 1:
            at_case_end(lambda: print("ended", engine.NAME, flush=True))

    timer = staticmethod(time.perf_counter)

    def time_wait(self, milliseconds, name):
        time.sleep(milliseconds / 1e3)


class Stored:
    version, params, timeout, repeat = "1", [3], 900.0, 2
    times = 0

    def setup_cache(self):
        Stored.times += 1
        return {3: [0.25, 0.75]}

    def setup(self, stored, number):
        self.left = getattr(self, "left", None) or [0.0, stored[number][0], 0.0, stored[number][1]]

    def timer(self):
        return self.left.pop(0)

    def time_stored(self, stored, number):
        assert Stored.times == 1


class Fails(Wait):
    version = "1"

    def time_wait(self, milliseconds, name):
        os._exit(3)
'''

NO_GPU = """
class cuda:
    is_initialized = staticmethod(lambda: False)
"""


@pytest.fixture
def start(tmp_path):
    """Starts processes beside suites and an engine of the test's own, and a library named torch."""
    folder, code = tmp_path / "checkout" / "benchmarks", tmp_path / "commit"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "_side.py", "_identity.py", "_case_end.py"):
        shutil.copy(ROOT / "benchmarks" / name, folder / name)
    (folder / "plain.py").write_text(SUITES, encoding="utf-8")
    for name, text in (("engine", "NAME = 'other'"), ("benchmarks", "1 / 0"), ("torch", NO_GPU)):
        (code / name).mkdir(parents=True)
        (code / name / "__init__.py").write_text(text, encoding="utf-8")
    started = []

    def one(**told):
        environ = {**os.environ, "PYTHONPATH": str(code), **told}
        started.append(Side.start(folder, environ, (), tmp_path / "complaints.txt"))
        started[-1].hear()
        return started[-1]

    yield one
    for side in started:
        side.end()


@pytest.fixture
def side(start):
    return start()


def test_its_end_is_the_end_of_all_that_it_started(tmp_path):
    (tmp_path / SCRIPT).write_text(
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(json.dumps({'pid': child.pid}), flush=True)\n"
        "child.wait()\n",
        encoding="utf-8",
    )
    side = Side.start(tmp_path, dict(os.environ), (), tmp_path / "complaints.txt")
    child = os.pidfd_open(side.hear()["pid"])

    side.end()

    assert select.select([child], [], [], 30.0)[0] == [child]  # it has ended
    os.close(child)


def test_cases_are_named_as_asv_names_them(side):
    wait = {"params": [["1", "2"], ["'a'"]], "timeout": 7.0}

    assert side.ask("list")["cases"] == {
        "plain.Wait.time_wait": wait,
        "plain.Fails.time_wait": wait,
        "plain.Stored.time_stored": {"params": [["3"]], "timeout": 900.0},
    }


def test_a_case_is_built_once_and_takes_samples_until_it_is_closed(side, tmp_path):
    opened = side.ask("open", benchmark="plain.Wait.time_wait", params=["1", "'a'"])
    few = side.ask("take", seconds=0.0, least=3)["samples_s"]
    many = side.ask("take", seconds=0.05, least=1)["samples_s"]
    side.ask("close")

    assert opened == {}
    assert len(few) == 3 < len(many) <= 50
    assert min(few + many) >= 0.001
    assert (tmp_path / "complaints.txt").read_text(encoding="utf-8") == "ended other\n"


def test_what_a_suite_measured_at_once_is_handed_over(side):
    assert side.ask("open", benchmark="plain.Stored.time_stored", params=["3"]) == {}
    for _ in range(2):
        assert side.ask("take", seconds=0.0, least=1) == {"samples_s": [0.25, 0.75]}


def test_a_case_that_a_machine_lacks_is_absent(side):
    found = side.ask("open", benchmark="plain.Wait.time_wait", params=["2", "'a'"])

    assert found == {"absent": "no machine is that slow"}


def test_a_process_that_ends_is_told_with_its_last_words(side):
    side.ask("open", benchmark="plain.Fails.time_wait", params=["1", "'a'"])
    with pytest.raises(AsvFailedError, match="expected an answer, got its end"):
        side.ask("take", seconds=0.0, least=1)


def test_a_process_that_takes_too_long_is_ended(side):
    side.ask("open", benchmark="plain.Wait.time_wait", params=["1", "'a'"])
    with pytest.raises(AsvFailedError, match="within 0 s, got none"):
        side.ask("take", timeout_s=0.0, seconds=60.0, least=1)

    assert side.process.returncode is not None


def test_a_suite_of_this_repository_is_found():
    (suite,) = _side.suites_of("benchmarks.ladder").items()

    assert suite[0] == "ladder.Ladder.time_cold"
    assert "read_once+split+packed" in _side.axes_of(suite[1])[1]


@pytest.mark.parametrize("turns", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_two_processes_take_turns_at_a_case(start, turns, is_swapped):
    turns = replace(turns, turn_s=0.01, rounds=min(turns.rounds, (3, 5)), enough_s=0.01)
    case = PairedCase("plain.Wait.time_wait", ("1", "'a'"), 60.0)
    sides = start(), start()

    base, head = take_turns(sides, case, turns, is_swapped=is_swapped)

    assert len(base) == len(head) == (1 if turns.is_single else 3)
    assert min(base + head) >= 0.001
    assert all(side.ask("list")["cases"] for side in sides)


@pytest.mark.parametrize("turns", [ON_CPU, ON_GPU])
def test_a_side_that_lacks_a_case_has_no_turn(start, turns):
    case = PairedCase("plain.Wait.time_wait", ("1", "'a'"), 60.0)
    base, head = take_turns((start(), start(LACKS="1")), case, turns, is_swapped=False)

    assert (len(base), len(head)) == (1, 0)
