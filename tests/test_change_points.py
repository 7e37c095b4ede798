"""Change points: the detector against a naive twin, its laws, its causes and its replay."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from db.change_points import ChangePoint, SeriesInputError, detect
from db.errors import DbError
from db.rank_test import rank_p_value, shift_interval
from db.segmentation import (
    MIN_SEGMENT,
    PENALTY,
    Strictness,
    noise_of,
    propose,
    pull_in_outliers,
    rolling_median,
    segment,
)

RIPPLE = np.array([0.0, 0.004, -0.003, 0.001, -0.004, 0.003, -0.001, 0.002])  # calm, repeats


def rippled(levels):
    """A series at the given levels, with a small ripple that never repeats a value exactly."""
    steps = np.arange(len(levels))
    return np.asarray(levels) * np.exp(RIPPLE[steps % len(RIPPLE)] + 1e-5 * steps)


def levels_of(*parts):
    return np.concatenate([np.full(count, level, dtype=float) for level, count in parts])


def noisy(seed, size, noise=0.005):
    return np.exp(noise * np.random.default_rng(seed).standard_normal(size))


def indices(points):
    return [point.index for point in points]


# --- the naive twins -------------------------------------------------------------------------


def naive_cost(scaled, edges):
    parts = [scaled[a:b] for a, b in itertools.pairwise(edges)]
    squares = sum(((part - part.mean()) ** 2).sum() for part in parts)
    return squares + PENALTY * math.log(len(scaled)) * len(parts)


def naive_proposal(logs, min_segment=MIN_SEGMENT):
    """Try every segmentation there is."""
    noise = noise_of(logs)
    scaled = pull_in_outliers(logs, noise) / noise
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


# --- golden numbers and laws -----------------------------------------------------------------


def test_a_clean_step_is_reported_with_its_numbers():
    points = detect(rippled(levels_of((100.0, 12), (110.0, 12))))

    assert indices(points) == [12]
    assert points[0].before == pytest.approx(100.0, rel=2e-3)
    assert points[0].after == pytest.approx(110.0, rel=2e-3)
    assert points[0].relative_change == pytest.approx(0.10, abs=3e-3)
    # Full separation of 12 and 12: two of the C(24, 12) arrangements, one added to each count.
    assert points[0].p_value == pytest.approx(3 / (math.comb(24, 12) + 1))
    assert points[0].cause == "unknown"
    assert points[0].to_dict()["index"] == 12


def test_each_of_several_steps_is_found_at_its_first_result():
    values = rippled(levels_of((10.0, 15), (11.0, 14), (10.4, 20), (9.0, 12), (9.5, 15)))

    assert indices(detect(values)) == [15, 29, 49, 61]


@pytest.mark.parametrize("size", range(8))
def test_too_few_results_have_no_change_point(size):
    assert detect(levels_of((1.0, size // 2), (2.0, size - size // 2))) == []


@pytest.mark.parametrize("new", [1, 2, 3])
def test_a_level_of_few_results_waits_for_more(new):
    assert detect(rippled(levels_of((1.0, 30), (1.5, new)))) == []


def test_four_results_after_thirty_are_enough():
    assert indices(detect(rippled(levels_of((1.0, 30), (1.03, 4))))) == [30]


@pytest.mark.parametrize(("step", "expected"), [(1.03, [30]), (1.015, []), (1 / 1.03, [30])])
def test_only_a_relevant_step_is_reported(step, expected):
    assert indices(detect(rippled(levels_of((1.0, 30), (step, 30))))) == expected


def test_a_step_inside_the_noise_is_not_reported():
    assert detect(noisy(3, 120, noise=0.02) * levels_of((1.0, 60), (1.03, 60))) == []


def test_an_outlier_beside_a_step_does_not_move_it():
    values = rippled(levels_of((1.0, 30), (1.04, 30)))
    values[31] *= 3.0

    assert indices(detect(values)) == [30]


def test_single_and_double_outliers_are_no_level():
    values = rippled(np.ones(60))
    values[[10, 30, 31, 50]] *= [1.4, 0.7, 0.7, 2.0]

    assert detect(values) == []


def test_a_step_is_found_among_outliers():
    values = rippled(levels_of((1.0, 30), (1.04, 30)))
    values[[5, 14, 22, 37, 44, 52]] *= 1.5

    assert indices(detect(values)) == [30]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-9, 1e9))
def test_unit_and_direction_do_not_matter(seed, scale):
    values = noisy(seed, 60) * levels_of((1.0, 25), (1.06, 35))

    plain, scaled, inverse = detect(values), detect(values * scale), detect(1.0 / values)

    assert indices(plain) == indices(scaled) == indices(inverse)
    for one, other in zip(plain, inverse, strict=True):
        assert (1 + one.relative_change) * (1 + other.relative_change) == pytest.approx(1.0)
        assert one.p_value == other.p_value


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.floats(), st.none(), st.sampled_from([1.0, 2.0, 0.0, -1.0])), max_size=40)
)
def test_any_numbers_give_finite_change_points_in_order(values):
    points = detect(values)

    assert detect(values) == points
    assert indices(points) == sorted(set(indices(points)))
    for point in points:
        assert 0.0 < point.p_value <= 5e-4
        assert 0 < point.index < len(values)
        assert point.relative_change == pytest.approx(point.after / point.before - 1.0, rel=1e-6)


def test_gaps_move_the_index_and_nothing_else():
    values = rippled(levels_of((1.0, 20), (1.1, 20)))
    gappy = np.insert(
        values, [3, 3, 10, 20, 20, 33], [math.nan, math.inf, 0.0, math.nan, -1, math.nan]
    )

    (plain,), (shifted,) = detect(values), detect(gappy)

    assert gappy[shifted.index] == values[plain.index]
    assert shifted.index == 25
    assert (shifted.before, shifted.after) == (plain.before, plain.after)


def test_a_result_that_scattered_in_its_own_run_is_left_out():
    values = rippled(levels_of((1.0, 30), (1.03, 3)))
    spread = np.full(33, 0.01)

    with_reliable = detect(np.append(values, 1.03), spread=np.append(spread, 0.01))
    with_scattered = detect(np.append(values, 1.03), spread=np.append(spread, 0.2))

    assert indices(with_reliable) == [30]
    assert with_scattered == []


@pytest.mark.parametrize(
    "extra",
    [
        {"spread": [1.0] * 7},
        {"covariates": {"sm_clock_mhz": [1.0] * 9}},
        {"epochs": ["a"] * 9},
        {"runners": ["a"] * 7},
        {"spread": [[1.0]] * 8},
    ],
)
def test_arrays_that_do_not_fit_are_refused(extra):
    with pytest.raises(SeriesInputError, match="expected one"):
        detect([1.0] * 8, **extra)


def test_a_table_of_values_is_refused():
    with pytest.raises(DbError, match="values: expected"):
        detect([[1.0, 2.0]])


# --- causes ----------------------------------------------------------------------------------


def test_a_change_that_meets_an_environment_is_the_environments():
    values = rippled(levels_of((1.0, 20), (1.05, 20)))

    (point,) = detect(values, epochs=["driver 1"] * 20 + ["driver 2"] * 20)

    assert (point.index, point.cause) == (20, "environment")
    assert point.before == pytest.approx(1.0, rel=5e-3)
    assert point.relative_change == pytest.approx(0.05, abs=3e-3)


def test_a_change_away_from_an_environment_is_the_codes():
    values = rippled(levels_of((1.0, 20), (1.05, 20)))

    (point,) = detect(values, epochs=["a"] * 30 + ["b"] * 10)

    assert (point.index, point.cause) == (20, "code")


def test_a_returning_environment_resumes_its_level():
    levels = levels_of((1.0, 20), (1.06, 20), (1.0, 20))
    epochs = ["a"] * 20 + ["b"] * 20 + ["a"] * 20

    points = detect(rippled(levels), epochs=epochs)

    assert [(p.index, p.cause) for p in points] == [(20, "environment"), (40, "environment")]


def test_what_the_code_did_under_another_environment_shows_at_its_place():
    levels = levels_of((1.0, 20), (1.06, 12), (1.06 * 1.04, 12), (1.04, 20))
    epochs = ["a"] * 20 + ["b"] * 24 + ["a"] * 20

    points = detect(rippled(levels), epochs=epochs)

    assert [(p.index, p.cause) for p in points] == [
        (20, "environment"),
        (32, "code"),
        (44, "environment"),
    ]
    assert points[1].before == pytest.approx(1.06, rel=5e-3)
    assert points[1].after == pytest.approx(1.06 * 1.04, rel=5e-3)


def test_an_environment_that_returns_to_another_level_tells_of_the_code():
    levels = levels_of((1.0, 20), (1.06, 20), (1.05, 20))
    epochs = ["a"] * 20 + ["b"] * 20 + ["a"] * 20

    points = detect(rippled(levels), epochs=epochs)

    assert [(p.index, p.cause) for p in points] == [(20, "environment"), (40, "code")]


def test_an_environment_without_effect_is_no_change():
    assert detect(noisy(1, 60), epochs=["a"] * 30 + ["b"] * 30) == []


def test_unknown_environments_count_as_the_last_known_one():
    values = rippled(levels_of((1.0, 20), (1.05, 20)))
    epochs = [None, "a", *[None] * 18, *["b"] * 5, *[None] * 15]

    (point,) = detect(values, epochs=epochs)

    assert (point.index, point.cause) == (20, "environment")
    assert detect(values, epochs=[None] * 40)[0].cause == "unknown"


@pytest.mark.parametrize("power", [-1.0, 1.0])
def test_a_clock_that_moved_by_the_same_ratio_explains_the_change(power):
    factor = levels_of((1.0, 25), (0.9, 25))

    (point,) = detect(
        rippled(np.ones(50)) * factor**power, covariates={"sm_clock_mhz": 1980.0 * factor}
    )

    assert (point.index, point.cause) == (25, "clock")
    assert point.relative_change == pytest.approx(0.9**power - 1.0, abs=3e-3)


def test_a_clock_that_moved_elsewhere_explains_nothing():
    values = rippled(levels_of((1.0, 20), (1.06, 30)))
    clock = 1980.0 * levels_of((1.0, 35), (0.94, 15))

    (point,) = detect(values, covariates={"sm_clock_mhz": clock})

    assert (point.index, point.cause) == (20, "code")


def test_a_clock_that_moved_by_far_less_explains_nothing():
    values = rippled(levels_of((1.0, 25), (1.10, 25)))
    clock = 1980.0 * levels_of((1.0, 25), (0.99, 25))

    (point,) = detect(values, covariates={"sm_clock_mhz": clock})

    assert (point.index, point.cause) == (25, "code")
    assert point.relative_change == pytest.approx(0.10, abs=3e-3)


def test_a_clock_that_was_low_for_a_while_is_no_change():
    factor = levels_of((1.0, 30), (0.94, 4), (1.0, 30))

    assert detect(rippled(np.ones(64)) / factor, covariates={"clock": factor}) == []


def test_a_clock_first_read_late_counts_from_the_start():
    factor = levels_of((1.0, 25), (0.9, 25))
    clock = np.where(np.arange(50) < 5, np.nan, factor)

    (point,) = detect(
        rippled(np.ones(50)) / factor, covariates={"clock": clock, "none": [None] * 50}
    )

    assert (point.index, point.cause) == (25, "clock")


def test_two_clocks_that_come_and_go_hide_no_step():
    rng = np.random.default_rng(0)
    factor = np.where(rng.random(80) < 0.25, 1.06, 1.0)
    values = noisy(7, 80, 0.003) * factor * levels_of((1.0, 60), (1.03, 20))
    clock = np.where(np.arange(80) % 9 == 4, np.nan, 1980.0 / factor)

    points = detect(values, covariates={"sm_clock_mhz": 1980.0 / factor})

    assert [(p.index, p.cause) for p in points] == [(60, "code")]
    assert points[0].relative_change == pytest.approx(0.03, abs=4e-3)
    assert detect(values[:60], covariates={"sm_clock_mhz": clock[:60]}) == []


def test_runners_that_take_turns_hide_no_step_and_make_none():
    rng = np.random.default_rng(1)
    runners = rng.integers(0, 3, 80)
    values = noisy(8, 80, 0.003) * np.array([1.0, 1.03, 0.98])[runners]

    flat = detect(values, runners=list(runners))
    stepped = detect(values * levels_of((1.0, 50), (1.03, 30)), runners=list(runners))

    assert flat == []
    assert [(p.index, p.cause) for p in stepped] == [(50, "code")]


def test_one_wild_result_does_not_define_a_runner_that_takes_turns():
    runners = np.arange(60) % 2
    values = rippled(levels_of((1.0, 30), (1.04, 30))) * np.array([1.0, 1.02])[runners]
    values[1] *= 1.2

    points = detect(values, runners=list(runners))

    assert [(p.index, p.cause) for p in points] == [(30, "code")]
    assert points[0].relative_change == pytest.approx(0.04, abs=5e-3)


def test_a_change_that_meets_another_runner_is_the_hardwares():
    values = rippled(levels_of((1.0, 20), (1.05, 20)))

    (point,) = detect(values, runners=["GPU-1"] * 20 + ["GPU-2"] * 20)

    assert (point.index, point.cause) == (20, "hardware")


# --- replay ----------------------------------------------------------------------------------


def replay(values, start=2):
    """Meet a series as people do, commit by commit: (index, commit at which it was raised)."""
    alarms: list[tuple[int, int]] = []
    for seen in range(start, len(values) + 1):
        alarms += [
            (point.index, seen - 1)
            for point in detect(values[:seen])
            if all(abs(point.index - index) > 3 for index, _ in alarms)
        ]
    return alarms


def heavy_tailed(seed, size, noise):
    rng = np.random.default_rng(seed)
    return np.exp(noise * rng.standard_t(3, size) / math.sqrt(3.0))


def test_replay_of_flat_series_raises_few_alarms():
    """At most 0.05 alarms in 100 commits, in noise as large as the relevance."""
    alarms = sum(len(replay(heavy_tailed(seed, 70, noise=0.02))) for seed in range(30))

    assert alarms <= 1


@pytest.mark.parametrize(("step", "least"), [(1.03, 0.75), (1.05, 0.92), (1.10, 0.98)])
def test_replay_finds_steps_within_five_commits(step, least):
    found = 0
    for seed in range(60):
        index = 25 + seed % 30
        values = heavy_tailed(seed + 1000, index + 6, noise=0.012) * levels_of(
            (1.0, index), (step, 6)
        )
        raised = replay(values, start=index)
        found += any(abs(at - index) <= 3 and 0 <= when - index <= 5 for at, when in raised)

    assert found / 60 >= least


def test_a_stricter_judge_keeps_fewer_boundaries():
    logs = np.log(noisy(2, 90, 0.004) * levels_of((1.0, 30), (1.03, 30), (1.1, 30)))

    assert [b.index for b in segment(logs, Strictness())] == [30, 60]
    assert [b.index for b in segment(logs, Strictness(relevance_rel=0.05))] == [60]
    assert segment(logs, Strictness(max_p_value=1e-30)) == []


def test_a_change_point_is_a_value():
    assert ChangePoint(1, 1.0, 2.0, 1.0, 0.1, "code") == ChangePoint(1, 1.0, 2.0, 1.0, 0.1, "code")
