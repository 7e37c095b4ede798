"""Change points: golden numbers, laws, and replay commit by commit."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from db.change_points import SeriesInputError, detect
from db.errors import DbError
from tests.level_series import indices, levels_of, noisy, rippled


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


@pytest.mark.parametrize("new", [1, 2])
def test_a_level_of_few_results_waits_for_more(new):
    assert detect(rippled(levels_of((1.0, 30), (1.5, new)))) == []


def test_three_results_after_thirty_are_enough():
    assert indices(detect(rippled(levels_of((1.0, 30), (1.03, 3))))) == [30]


@pytest.mark.parametrize(("step", "expected"), [(1.03, [30]), (1.012, []), (1 / 1.03, [30])])
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
    values = rippled(levels_of((1.0, 30), (1.03, 2)))
    spread = np.full(32, 0.01)

    with_reliable = detect(np.append(values, 1.03), spread=np.append(spread, 0.01))
    with_scattered = detect(np.append(values, 1.03), spread=np.append(spread, 0.2))

    assert indices(with_reliable) == [30]
    assert with_scattered == []


@pytest.mark.parametrize(("value", "first"), [(2.1, 20), (1.1, 21)])
def test_a_level_begins_with_a_result_that_was_left_out_if_it_lies_there(value, first):
    values = np.r_[np.full(20, 1.0), value, np.full(20, 2.0)] * noisy(2, 41, 0.004)
    spread = np.full(41, 0.005)
    spread[20] = 0.4

    (found,) = detect(values, spread=spread)

    assert found.index == first


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
