"""Ranks and proposals against their naive twins."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from db.partition import (
    ENDS_AT_ONCE,
    FEW,
    MIN_SEGMENT,
    PENALTY,
    Tamed,
    noise_of,
    propose,
    propose_many,
    pull_in_outliers,
    rolling_median,
)
from db.rank_test import rank_p_value, shift_interval
from db.segmentation import Seen, Strictness, judge, segment, segment_many
from tests.level_series import levels_of, noisy


def naive_cost(scaled, edges):
    parts = [scaled[a:b] for a, b in itertools.pairwise(edges)]
    squares = sum(((part - part.mean()) ** 2).sum() for part in parts)
    return squares + PENALTY * math.log(len(scaled)) * len(parts)


def naive_proposal(logs, min_segment=MIN_SEGMENT):
    """Try every segmentation there is."""
    weights = np.ones(len(logs))
    noise = noise_of(logs, weights)
    scaled = pull_in_outliers(logs, noise * weights) / noise
    size = len(logs)
    every = (
        [0, *cut, size]
        for count in range(size // min_segment)
        for cut in itertools.combinations(range(1, size), count)
    )
    legal = (e for e in every if all(b - a >= min_segment for a, b in itertools.pairwise(e)))
    return min(legal, key=lambda edges: naive_cost(scaled, edges))[1:-1]


@pytest.mark.parametrize("seed", range(25))
def test_proposals_are_those_of_trying_every_segmentation(seed):
    rng = np.random.default_rng(seed)
    levels = np.repeat(rng.normal(0.0, 0.03, 4), rng.integers(2, 6, 4))
    logs = levels + 0.005 * rng.standard_normal(len(levels))

    assert propose(logs) == naive_proposal(logs)


def naive_p_value(a, b):
    """Count arrangements by listing them all."""
    pooled = np.concatenate([a, b])

    def u_of(chosen):
        rest = [i for i in range(len(pooled)) if i not in chosen]
        wins = sum(
            (pooled[i] < pooled[j]) + 0.5 * (pooled[i] == pooled[j]) for i in chosen for j in rest
        )
        return min(wins, len(a) * len(b) - wins)

    observed = u_of(range(len(a)))
    every = [u_of(c) for c in itertools.combinations(range(len(pooled)), len(a))]
    return (sum(u <= observed for u in every) + 1) / (len(every) + 1)


@pytest.mark.parametrize("sizes", [(3, 3), (3, 6), (5, 4), (6, 3)])
def test_rank_p_value_is_that_of_listing_every_arrangement(sizes):
    rng = np.random.default_rng(sum(sizes))
    for shift in (0.0, 0.7, 5.0):
        a, b = rng.standard_normal(sizes[0]), rng.standard_normal(sizes[1]) + shift

        assert rank_p_value(a, b) == pytest.approx(min(1.0, naive_p_value(a, b)), abs=1e-12)
        assert rank_p_value(a, b) == rank_p_value(b, a)


@pytest.mark.parametrize(("m", "n"), [(8, 9), (20, 30), (60, 60), (4, 700)])
def test_rank_p_value_agrees_with_scipy(m, n):
    rng = np.random.default_rng(m)
    for shift in (0.0, 0.3, 0.8):
        a, b = rng.standard_normal(m), rng.standard_normal(n) + shift
        method = "exact" if m * n <= 2500 else "asymptotic"

        theirs = mannwhitneyu(a, b, method=method).pvalue

        assert rank_p_value(a, b) == pytest.approx(theirs, rel=2e-3, abs=1e-4)


def test_shift_interval_covers_the_shift_as_often_as_it_says():
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(2000):
        a, b = rng.standard_cauchy(7), rng.standard_cauchy(9) + 2.0
        _, low, high = shift_interval(a, b, 0.9)
        covered += low <= 2.0 <= high

    assert 0.90 - 0.013 <= covered / 2000 <= 0.925


@pytest.mark.parametrize(("confidence", "dropped"), [(0.95, 0), (0.90, 1), (0.79, 3)])
def test_shift_interval_drops_only_differences_its_tails_allow(confidence, dropped):
    """Of the 70 arrangements of 4 and 4, U is at most 0, 1, 2, 3 in 1, 2, 4, 7."""
    a, b = np.array([0.0, 1.0, 10.0, 100.0]), np.array([0.2, 2.4, 31.0, 205.0])
    differences = np.sort(np.subtract.outer(b, a).ravel())

    _, low, high = shift_interval(a, b, confidence)

    assert (low, high) == (differences[dropped], differences[-1 - dropped])


def test_rolling_median_leaves_gaps_out_and_knows_the_ends():
    nan = math.nan

    found = rolling_median(np.array([1.0, 9.0, nan, 3.0, 5.0]), 3)

    assert found.tolist() == [5.0, 5.0, 6.0, 4.0, 4.0]


def test_a_stricter_judge_keeps_fewer_boundaries():
    logs = np.log(noisy(2, 90, 0.004) * levels_of((1.0, 30), (1.03, 30), (1.1, 30)))

    assert [b.index for b in segment(logs, Strictness())] == [30, 60]
    assert [b.index for b in segment(logs, Strictness(relevance_rel=0.05, least_rel=0.05))] == [60]
    assert segment(logs, Strictness(max_p_value=1e-30, max_tamed_p_value=1e-30)) == []


def test_many_series_are_cut_as_each_alone():
    rng = np.random.default_rng(3)
    series = [np.log(noisy(seed, size)) for seed, size in enumerate((3, 40, 1, 90, 5, 41, 40))]
    series[3][50:] += 0.04
    spreads = [
        None if index % 2 else rng.uniform(0.01, 0.1, len(s)) for index, s in enumerate(series)
    ]

    copies = FEW // len(series) + 1  # enough to be cut together
    parts = [Tamed.of(*one) for one in zip(series, spreads, strict=True)]
    together = propose_many(copies * parts)[-len(series) :]

    assert together == [propose(s, spreads=apart) for s, apart in zip(series, spreads, strict=True)]
    assert together[3] == [50]


def test_levels_shorter_than_what_is_looked_at_together_are_cut_as_one_by_one():
    rng = np.random.default_rng(4)
    series = []
    for _ in range(FEW + 1):
        lengths = rng.integers(1, ENDS_AT_ONCE, 30)
        levels = np.repeat(rng.integers(0, 4, len(lengths)), lengths)
        series.append(0.02 * levels + 0.01 * rng.integers(0, 2, len(levels)))  # many ties
    spreads = [
        None if index % 2 else rng.uniform(0.01, 0.1, len(s)) for index, s in enumerate(series)
    ]

    together = propose_many([Tamed.of(*one) for one in zip(series, spreads, strict=True)])

    assert together == [propose(s, spreads=apart) for s, apart in zip(series, spreads, strict=True)]
    assert min(min(np.diff(found)) for found in together) == MIN_SEGMENT


def test_a_few_odd_results_before_a_step_do_not_hide_it():
    """Three results of a level of their own are too few to tell the step that follows them."""
    logs = np.log(noisy(1, 62, 0.01))
    logs[53:56] += (0.07, 0.04, 0.04)
    logs[56:] -= 0.10

    assert [found.index for found in segment(logs, Strictness())] == [56]


def test_a_small_step_in_a_calm_series_is_found_at_its_third_result():
    logs = np.log(noisy(4, 63, 0.003))
    logs[60:] += 0.02

    assert segment(logs[:62], Strictness()) == []
    assert [found.index for found in segment(logs, Strictness())] == [60]


def test_what_scattered_makes_no_step_less_certain():
    """Left out, restless results would leave 6 of 8, and 6 against 8 rank no step of two."""
    levels = np.log([54e-3] * 8 + [27e-3] * 8)
    logs = levels + np.random.default_rng(0).normal(0.0, 0.05, 16)
    spreads = np.full(16, 0.02)
    spreads[[9, 13]] = 0.3

    (found,) = segment_many([logs], [spreads], Strictness())

    assert [boundary.index for boundary in found] == [8]


@pytest.mark.parametrize(("factor", "is_found"), [(30.0, True), (1.7, False)])
def test_few_results_tell_a_step_that_no_mood_of_a_machine_makes(factor, is_found):
    """Six against eight rank at 7e-4 at best: enough for thirty times, not for another mode."""
    logs = np.random.default_rng(0).normal(0.0, 0.05, 14)
    logs[8:] += np.log(factor)

    found = [boundary.index for boundary in segment(logs, Strictness())]

    assert found == ([8] if is_found else [])


def test_a_step_out_of_a_noisy_stretch_is_told_by_the_calm_results():
    rng = np.random.default_rng(6)
    sigmas = np.repeat([0.003, 0.02, 0.003], (30, 20, 6))
    series = [sigmas * rng.standard_normal(len(sigmas)) for _ in range(40)]
    for logs in series:
        logs[50:] += 0.03

    def num_found(spreads):
        every = segment_many(series, spreads, Strictness())
        return sum(len(found) == 1 and abs(found[0].index - 50) <= 3 for found in every)

    assert num_found([sigmas] * 40) >= 38
    assert num_found([None] * 40) <= 32


def test_a_burst_of_outliers_is_no_level():
    calm = np.log(noisy(5, 40, 0.003))
    burst, level = np.array([0.01, 0.06, 0.12, 0.04]), np.array([0.051, 0.049, 0.053, 0.05])

    assert segment(np.concatenate([calm, burst]), Strictness()) == []
    assert [b.index for b in segment(np.concatenate([calm, level]), Strictness())] == [40]


def test_a_boundary_that_is_kept_was_weighed_between_its_last_neighbours():
    rng = np.random.default_rng(9)
    num_seen = 0
    for _ in range(150):
        sizes = rng.integers(3, 12, 8)
        levels = np.repeat(rng.normal(0.0, 0.02, 8), sizes)
        logs = levels + rng.normal(0.0, 0.005, len(levels))
        found = segment(logs, Strictness())

        seen = Seen(logs, Tamed.of(logs, None).logs)
        edges = [0, *(boundary.index for boundary in found), len(logs)]
        spans = zip(edges, edges[1:], edges[2:], strict=False)
        assert found == [judge(seen, span, Strictness()) for span in spans]
        num_seen += len(found)
    assert num_seen > 100
