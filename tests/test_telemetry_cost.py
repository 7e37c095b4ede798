"""What telemetry costs: planted costs are found, drifts are not."""

import itertools
import random
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks._suite import _Suite
from benchmarks._telemetry_cost import LEAST_PAIRS, MARGIN_REL, Trial, compare, main


class Machine:
    """Takes a second for a block, and a share more while telemetry is on or as time goes by."""

    def __init__(self, *, cost_rel=0.0, drift_rel=0.0, noise_rel=0.001):
        self.cost_rel, self.drift_rel, self.noise_rel = cost_rel, drift_rel, noise_rel
        self.random = random.Random(0)
        self.clock = itertools.count()
        self.is_on = False
        self.states = []

    @contextmanager
    def telemetry(self):
        self.is_on = True
        yield
        self.is_on = False

    def block_s(self):
        self.states.append(self.is_on)
        drift = 1.0 + self.drift_rel * next(self.clock)
        return drift * (1.0 + self.cost_rel * self.is_on) * self.random.gauss(1.0, self.noise_rel)


@pytest.mark.parametrize("cost_rel", [0.0, 0.002, 0.02])
def test_a_planted_cost_lies_in_its_interval(cost_rel):
    machine = Machine(cost_rel=cost_rel)

    found = compare(machine.block_s, machine.telemetry, num_pairs=40)

    assert found.low <= cost_rel <= found.high
    assert found.high - found.low < 0.002
    assert found.is_within_margin == (cost_rel < MARGIN_REL)


def test_a_drift_is_no_cost():
    machine = Machine(drift_rel=0.001)

    found = compare(machine.block_s, machine.telemetry, num_pairs=40)

    assert found.low <= 0.0 <= found.high
    assert found.is_within_margin


def test_each_comes_first_as_often_as_the_other():
    machine = Machine()

    compare(machine.block_s, machine.telemetry, num_pairs=4)

    assert machine.states == [False, True, True, False] * 2


def test_past_the_time_limit_no_pair_begins_but_the_fewest_that_make_an_interval():
    machine = Machine()

    found = compare(machine.block_s, machine.telemetry, num_pairs=40, limit_s=0.0)

    assert found.num_pairs == LEAST_PAIRS == len(machine.states) / 2
    assert found.low < found.relative < found.high


def test_a_block_of_a_short_case_has_more_samples_than_one_of_a_long_case(monkeypatch):
    # A clock of the test's own: on a busy machine a short case takes long as well.
    clock = SimpleNamespace(now_s=0.0)
    known = SimpleNamespace(monotonic=lambda: clock.now_s)
    monkeypatch.setattr("benchmarks._telemetry_cost.time", known)

    class Case(_Suite):
        version = "1"
        params = ([0.001, 0.01],)

        def build(self, seconds):
            self.count = 0

        def time_wait(self, seconds):
            self.count += 1
            clock.now_s += seconds

    trials = [Trial(Case(), [seconds]) for seconds in (0.001, 0.01)]
    before = [trial._suite.count for trial in trials]
    for trial in trials:
        trial.block_s(3, least_s=0.02)

    short, long = (trial._suite.count - n for trial, n in zip(trials, before, strict=True))
    assert long == 3 < short


def test_without_a_gpu_there_is_nothing_to_compare(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks._telemetry_cost.DEVICE", "cpu")

    with pytest.raises(SystemExit) as stopped:
        main([])

    assert stopped.value.code == 2
    assert re.search("expected a GPU, got none", capsys.readouterr().err)
