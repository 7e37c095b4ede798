"""What a change belongs to: code, environment, runner or clock."""

import numpy as np
import pytest

from db.change_points import detect
from tests.level_series import levels_of, noisy, rippled


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
