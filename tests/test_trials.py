"""Pairs in turns and a search by them, on machines whose times are known."""

import math
from collections import Counter

import numpy as np
import pytest

from dashboard.asv_errors import AsvFailedError
from dashboard.asv_trials import bisect, confirm, exactly
from db.sequential import Plan

CASE, OTHER = "tree.Build.time_build(64)", "tree.Accept.time_accept(64)"

COMMITS = [f"{number:040x}" for number in range(17)]


class Bench:
    """A machine that takes a known time for every commit, with noise and a drift."""

    def __init__(self, seconds, noise=0.01, drift=0.0, seed=0):
        self.seconds, self.noise, self.drift = seconds, noise, drift
        self.rng, self.calls = np.random.default_rng(seed), []

    def ratios(self, commits, patterns, *, is_swapped):
        times = {}
        for commit in commits[::-1] if is_swapped else commits:
            self.calls.append((commit, tuple(patterns)))
            wander = math.exp(self.drift * len(self.calls))
            for case, seconds in self.seconds(commit).items():
                if any(pattern in {".", exactly(case)} for pattern in patterns):
                    noisy = seconds * wander * math.exp(self.noise * self.rng.standard_normal())
                    times.setdefault(case, {})[commit] = noisy
        base, head = commits
        return {case: found[head] / found[base] for case, found in times.items()}


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


def test_pairs_without_any_case_are_an_error():
    with pytest.raises(AsvFailedError, match="expected a time of both commits, got no case"):
        confirm(Bench(lambda _: {}), ("a", "b"), ["."], Plan(), quiet)


@pytest.mark.parametrize("culprit", range(1, 17))
def test_the_culprit_among_sixteen_is_named(culprit):
    def seconds(commit):
        return {CASE: 1.1 if int(commit, 16) >= culprit else 1.0, OTHER: 1.0}

    bench = Bench(seconds, seed=culprit)

    found = bisect(bench, COMMITS, ["."], Plan(), quiet)

    assert (found.case, found.bad, found.good) == (CASE, COMMITS[culprit], COMMITS[culprit - 1])
    assert found.is_decided
    tried = Counter(commit for commit, _ in bench.calls)
    assert len(tried) <= 6  # both ends and four trials
    assert len(bench.calls) <= 2 * 24  # of a change ten times the noise


@pytest.mark.parametrize("tail", [math.inf, 3.0])
def test_a_search_at_the_noise_names_another_commit_in_less_than_a_percent(tail):
    """Two thousand searches in all, the change twice what two times of a commit differ by."""
    rng, change = np.random.default_rng(1), 1.06
    spread = math.log(change) / 2.0
    ends = []
    for number in range(1000):
        culprit = 1 + number % 16
        bench = Noisy(culprit, change, spread, tail, rng)
        found = bisect(bench, COMMITS, ["."], Plan(), quiet)
        ends.append(
            "none"
            if found is None
            else found.bad == COMMITS[culprit]
            if found.is_decided
            else "open"
        )

    assert ends.count(False) <= 0.01 * len(ends)
    assert ends.count(True) >= 0.9 * len(ends)


class Noisy:
    """A machine that knows ratios only: log-normal ones, or with the tails of Student's t."""

    def __init__(self, culprit, change, spread, tail, rng):
        self.culprit, self.change, self.rng = culprit, change, rng
        self.tail, self.spread = tail, spread / (math.sqrt(3.0) if tail == 3.0 else 1.0)

    def ratios(self, commits, patterns, *, is_swapped):
        del patterns, is_swapped
        drawn = (
            self.rng.standard_normal() if self.tail == math.inf else self.rng.standard_t(self.tail)
        )
        level = self.change if COMMITS.index(commits[1]) >= self.culprit else 1.0
        return {CASE: level * math.exp(self.spread * drawn)}


def test_ends_that_do_not_differ_have_no_culprit():
    assert bisect(Bench(lambda _: {CASE: 1.0}), list("abc"), ["."], Plan(), quiet) is None


def test_a_middle_that_nobody_can_tell_leaves_a_range():
    """The middle commit lies half-way, so no pair says to which end it belongs."""
    levels = {"a": 1.0, "b": 1.1, "c": 1.21}
    bench = Bench(lambda commit: {CASE: levels[commit]}, noise=0.01)

    found = bisect(bench, list("abc"), ["."], Plan(), quiet)

    assert (found.good, found.bad, found.between) == ("a", "c", 1)
    assert not found.is_decided
