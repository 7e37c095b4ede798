"""Pairs in turns and a search by them, on machines whose times are known."""

import math
from collections import Counter

import numpy as np
import pytest

from dashboard.asv_errors import AsvFailedError
from dashboard.asv_trials import bisect, confirm, exactly
from db.sequential import Plan

CASE, OTHER = "tree.Build.time_build(64)", "tree.Accept.time_accept(64)"


class Bench:
    """A machine that takes a known time for every commit, with noise and a drift."""

    def __init__(self, seconds, noise=0.01, drift=0.0, seed=0):
        self.seconds, self.noise, self.drift = seconds, noise, drift
        self.rng, self.calls = np.random.default_rng(seed), []

    def measure(self, commit, patterns):
        self.calls.append((commit, tuple(patterns)))
        wander = math.exp(self.drift * len(self.calls))
        return {
            case: seconds * wander * math.exp(self.noise * self.rng.standard_normal())
            for case, seconds in self.seconds(commit).items()
            if any(pattern in {".", exactly(case)} for pattern in patterns)
        }


def quiet(_line):
    pass


def test_a_decided_case_is_not_measured_again():
    bench = Bench(lambda commit: {CASE: 1.5 if commit == "b" else 1.0, OTHER: 1.0}, noise=0.02)

    found = confirm(bench, ("a", "b"), ["."], Plan(), quiet)

    assert found[CASE].verdict == "regression"
    assert found[OTHER].verdict == "no change"
    assert found[CASE].pairs < found[OTHER].pairs
    assert bench.calls[-1][1] == (exactly(OTHER),)


def test_sides_take_turns_so_that_a_drift_favours_neither():
    bench = Bench(lambda _: {CASE: 1.0}, noise=0.001, drift=0.002)

    found = confirm(bench, ("a", "b"), ["."], Plan(), quiet)

    assert [commit for commit, _ in bench.calls[:8]] == list("abbaabba")
    assert found[CASE].verdict == "no change"


def test_a_case_that_only_one_side_has_is_an_error():
    bench = Bench(lambda commit: {CASE: 1.0} if commit == "a" else {})

    with pytest.raises(AsvFailedError, match="expected a time of both commits, got none of tree"):
        confirm(bench, ("a", "b"), ["."], Plan(), quiet)


@pytest.mark.parametrize("culprit", range(1, 17))
def test_the_culprit_among_sixteen_is_named(culprit):
    commits = [f"{number:040x}" for number in range(17)]

    def seconds(commit):
        return {CASE: 1.1 if int(commit, 16) >= culprit else 1.0, OTHER: 1.0}

    bench = Bench(seconds, seed=culprit)

    found = bisect(bench, commits, ["."], Plan(), quiet)

    assert (found.case, found.bad, found.good) == (CASE, commits[culprit], commits[culprit - 1])
    assert found.is_decided
    tried = Counter(commit for commit, _ in bench.calls)
    assert len(tried) <= 6  # both ends and four trials


def test_ends_that_do_not_differ_have_no_culprit():
    assert bisect(Bench(lambda _: {CASE: 1.0}), list("abc"), ["."], Plan(), quiet) is None


def test_a_middle_that_nobody_can_tell_leaves_a_range():
    """The middle commit lies half-way, so no pair says to which end it belongs."""
    levels = {"a": 1.0, "b": 1.1, "c": 1.21}
    bench = Bench(lambda commit: {CASE: levels[commit]}, noise=0.01)

    found = bisect(bench, list("abc"), ["."], Plan(), quiet)

    assert (found.good, found.bad, found.between) == ("a", "c", 1)
    assert not found.is_decided
