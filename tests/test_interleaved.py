"""Contestants measured in turns in one process; the processes of their cases hand samples on."""

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks._ceilings import Ceilings
from benchmarks._identity import SuiteError
from benchmarks._interleaved import (
    Absent,
    Contestant,
    Instruments,
    Stored,
    _InterleavedSuite,
    measure,
    visiting_order,
)
from benchmarks._sidecar import CaseFacts
from benchmarks._suite import WallClock
from benchmarks._timing import DeviceClock
from dashboard.asv_runs import RunRequest, run_asv
from db.ingest import ingest
from db.session import opened, upgrade

ROOT = Path(__file__).parent.parent


class Diary:
    """Instruments and bodies that write down who was there."""

    def __init__(self, names):
        self.events = []
        self.contestants = [Contestant(name, lambda name=name: self.note(name)) for name in names]
        clocks = {name: WallClock() for name in names}
        self.instruments = Instruments(lambda: self.note("flush"), clocks)

    def note(self, event):
        self.events.append(event)

    def measure(self, num_rounds):
        self.events.clear()
        return measure(
            self.contestants, device="cpu", num_rounds=num_rounds, instruments=self.instruments
        )

    def visits(self, num_rounds):
        """The names visited in the rounds, in order; warm-up left out."""
        names = [event for event in self.events if event != "flush"]
        return names[-num_rounds * len(self.contestants) :]


class Race(_InterleavedSuite):
    """Two groups; in one a contestant is missing, one is wrong and one nobody mentions."""

    version = "1"
    params = ([8, 9], ["fast", "slow", "missing", "wrong", "unknown"])
    param_names = ("width", "name")
    num_rounds = 3

    def setup_cache(self):
        return self.measured()

    def contestants(self, group):
        (width,) = group
        if width == 9:
            raise NotImplementedError("no 9 here")
        return [
            Contestant("fast", lambda: None, CaseFacts(context_tokens=width, bytes=77)),
            Contestant("slow", lambda: sum(range(200_000))),
            Absent("missing", "not installed"),
            Absent("wrong", "error 0.5 against the reference", is_failure=True),
        ]


@pytest.fixture(scope="module")
def stored():
    patch = pytest.MonkeyPatch()
    for module in ("_device", "_ceilings"):
        patch.setattr(f"benchmarks.{module}.DEVICE", "cpu")  # also where there is a GPU
    yield Race().setup_cache()
    patch.undo()


@pytest.fixture
def sidecars(tmp_path, monkeypatch):
    for name in ("RUN_ID", "COMMIT", "MACHINE"):
        monkeypatch.delenv(f"DDTREE_BENCH_{name}", raising=False)
    monkeypatch.setenv("DDTREE_BENCH_SIDECAR_DIR", str(tmp_path / "telemetry"))
    return tmp_path / "telemetry"


@pytest.fixture
def at_exit(monkeypatch):
    calls = []
    monkeypatch.setattr("benchmarks._case_end.atexit.register", calls.append)

    def leave():
        for call in calls:
            call()

    return leave


def hand_over(stored, *params, most=100):
    """Run a case the way asv does; return what asv reads."""
    suite, samples = Race(), []
    suite.setup(stored, *params)
    for _ in range(min(suite.repeat, most)):
        suite.setup(stored, *params)
        started = suite.timer()
        suite.time_cold(stored, *params)
        samples.append(suite.timer() - started)
    return samples


def lines(folder):
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 14])
def test_everybody_stands_in_every_place_equally_often(n):
    rounds = [visiting_order(n, number) for number in range(2 * n)]

    assert all(sorted(order) == list(range(n)) for order in rounds)
    places = Counter((place, who) for order in rounds for place, who in enumerate(order))
    assert set(places.values()) == {2}
    assert len(places) == n * n


@pytest.mark.parametrize("n", [2, 3, 4, 5, 14])
def test_everybody_follows_everybody_else_equally_often(n):
    pairs = Counter(
        pair for number in range(2 * n) for pair in itertools.pairwise(visiting_order(n, number))
    )

    assert set(pairs.values()) == {2}
    assert len(pairs) == n * (n - 1)


def test_a_round_visits_everybody_once_and_starts_elsewhere_than_the_last():
    diary = Diary("abcd")
    samples = diary.measure(4)

    visits = diary.visits(4)
    rounds = [visits[first : first + 4] for first in range(0, 16, 4)]
    assert {name: len(values) for name, values in samples.items()} == dict.fromkeys("abcd", 4)
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert {one[0] for one in rounds} == set("abcd")


def test_caches_are_flushed_before_every_sample_and_nothing_runs_in_between():
    diary = Diary("abc")
    diary.measure(5)

    assert diary.events[0::2] == ["flush"] * (len(diary.events) // 2)
    assert "flush" not in diary.events[1::2]


def test_nobody_is_timed_before_everybody_is_warm():
    diary = Diary("ab")
    diary.measure(1)

    assert [event for event in diary.events if event != "flush"][:4] == ["a", "b", "a", "b"]


def test_samples_are_the_seconds_of_the_body():
    slow = Contestant("slow", lambda: sum(range(300_000)))
    samples = measure([Contestant("fast", lambda: None), slow], device="cpu", num_rounds=3)

    assert min(samples["slow"]) > 100 * max(samples["fast"]) > 0.0


def test_two_contestants_of_one_name_are_refused():
    with pytest.raises(SuiteError, match="expected different names"):
        Diary("aa").measure(1)


class SlowQueue:
    """A device that is done with whatever it is given at once: the host is never fast enough."""

    def __init__(self):
        self.spins_s = []

    def spin(self, seconds):
        self.spins_s.append(seconds)

    def mark(self):
        return self

    def reached(self):
        return True

    def wait(self):
        pass

    def seconds_until(self, later):
        return 1e-6


def test_a_sample_in_which_the_device_waited_for_the_host_is_detected():
    queue, diary = SlowQueue(), Diary("ab")
    clocks = {"a": DeviceClock(queue), "b": WallClock()}
    measure(
        diary.contestants,
        device="cuda",
        num_rounds=3,
        instruments=Instruments(diary.instruments.flush, clocks),
    )

    assert clocks["a"].validity() == ("exposed_enqueue",)
    assert queue.spins_s == sorted(queue.spins_s)
    assert len(set(queue.spins_s)) == 3


def test_what_was_wrong_with_the_samples_stands_in_the_line():
    clock = DeviceClock(SlowQueue())
    clock.start()
    seconds = clock.stop()
    ceilings = Ceilings(None, None, "measured", None)

    line = Race()._line(Contestant("slow", lambda: None), clock, [seconds], ceilings, "cpu")

    assert line["validity"] == ["no_nvml", "interleaved", "exposed_enqueue", "single_sample"]
    assert (line["timer"], line["samples_s"]) == ("cuda_events", [1e-6])


def test_a_case_hands_asv_what_was_measured(stored, sidecars, at_exit):
    samples = hand_over(stored, 8, "slow")
    at_exit()

    (line,) = lines(sidecars)
    assert samples == line["samples_s"] == stored[8, "slow"].line["samples_s"]
    assert (line["n"], line["params"]) == (3, ["8", "'slow'"])
    assert line["benchmark"].endswith("Race.time_cold")
    assert "interleaved" in line["validity"]
    assert line["ceilings"]["read_bytes_per_s"] > 1e8
    assert (line["process_number"], line["pid"]) == (0, os.getpid())


def test_the_facts_of_a_contestant_are_those_of_its_line(stored, sidecars, at_exit):
    hand_over(stored, 8, "fast")
    at_exit()

    (line,) = lines(sidecars)
    assert (line["context_tokens"], line["bytes"], line["flops"]) == (8, 77, None)


def test_a_line_begins_when_the_case_does(stored, sidecars, at_exit):
    hand_over(stored, 8, "fast")
    at_exit()

    (line,) = lines(sidecars)
    assert stored[8, "fast"].line["ended_at"] < line["started_at"] <= line["ended_at"]


def test_a_line_holds_only_the_samples_that_asv_took(stored, sidecars, at_exit):
    hand_over(stored, 8, "slow", most=1)
    at_exit()

    (line,) = lines(sidecars)
    assert line["samples_s"] == stored[8, "slow"].line["samples_s"][:1]
    assert "single_sample" in line["validity"]


def test_a_sample_that_asv_did_not_finish_leaves_no_line(stored, sidecars, at_exit):
    suite = Race()
    suite.setup(stored, 8, "slow")
    suite.timer()
    at_exit()

    assert lines(sidecars) == []


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ((8, "missing"), "not installed"),
        ((8, "unknown"), "no such contestant"),
        ((9, "fast"), "no 9 here"),
    ],
)
def test_what_cannot_be_measured_is_skipped_with_its_reason(stored, params, reason):
    with pytest.raises(NotImplementedError, match=reason):
        Race().setup(stored, *params)


def test_a_contestant_that_is_wrong_has_failed(stored):
    with pytest.raises(SuiteError, match=r"wrong: error 0\.5 against"):
        Race().setup(stored, 8, "wrong")


def test_a_suite_may_place_its_cases_as_it_likes():
    class Crossed(Race):
        version = "1"
        setup_cache = Race.setup_cache

        def place(self, width, name):
            return "all", f"{name}-{width}"

    assert Crossed().groups() == ["all"]
    assert Race().groups() == [(8,), (9,)]


def test_a_suite_needs_a_store_of_its_own():
    with pytest.raises(SuiteError, match="setup_cache: expected one of its own"):
        type("Shared", (Race,), {"version": "1"})


def test_what_is_stored_can_be_read_without_torch(stored):
    code = (
        "import sys, pickle, benchmarks._interleaved as module\n"
        "print(pickle.load(sys.stdin.buffer).line is not None, 'torch' in sys.modules)"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(stored[8, "fast"]),
        capture_output=True,
        check=True,
        cwd=ROOT,
    )

    assert outcome.stdout.split() == [b"True", b"False"]
    assert isinstance(stored[8, "fast"], Stored)


VARIANTS = ["none", "read_once+split", "read_once+split+packed+page_64+in_order"]
TINY = f"""
from benchmarks.ladder import Ladder as _Ladder


class Tiny(_Ladder):
    version = "1"
    params = ([130], {VARIANTS})
    value_dim = rope_dim = 16
    num_rounds = 2

    def setup_cache(self):
        return self.measured()
"""


@pytest.fixture
def project(tmp_path):
    """Our engine and suites in a new repository, with a ladder for Triton's interpreter."""
    root = tmp_path / "project"
    for name in ("engine", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "recorded", "checkpoints")
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("asv.conf.json", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    (root / "benchmarks" / "tiny.py").write_text(TINY, encoding="utf-8")
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "--quiet", "."], check=True)
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "all"], check=True)
    return root


@pytest.mark.slow
def test_a_ladder_runs_under_asv_and_its_lines_join_its_results(project, tmp_path, monkeypatch):
    for name, value in {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    run = run_asv(RunRequest(project, profile="full", bench="tiny", machine="bench-1"))

    url = f"sqlite:///{tmp_path / 'scratch.db'}"
    upgrade(url)
    with opened(url, must_exist=True) as database:
        report = ingest(database, [run.results_dir], repository=project)

    assert run.failed == ()
    assert (report.values, report.skipped, report.failed) == (3, 0, 0)
    assert (report.windows_joined, report.windows_unjoined, report.refused) == (3, 0, ())
    found = lines(run.sidecar_dir)
    (path,) = (run.results_dir / "bench-1").glob("*-*.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    columns, values = content["result_columns"], content["results"]["tiny.Tiny.time_cold"]
    cell = dict(zip(columns, values, strict=False))
    assert cell["samples"] == [line["samples_s"] for line in found]
    assert [line["params"][1] for line in found] == [repr(name) for name in VARIANTS]
    assert [line["programs"] for line in found] == [8, 8 * 2, 5 * 2]
