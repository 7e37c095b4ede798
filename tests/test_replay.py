"""The replay that judges detectors: what an alarm is, and how ours does on each kind of noise."""

import numpy as np
import pytest

from tests.replay import Alarms, alarms, gpu_noise, is_found
from tests.replay_detectors import ours
from tests.replay_series import GPU_NOISES, Noise, flat_windows, is_flat, shuffled

NUM = 12


def test_an_alarm_counts_once_and_though_it_is_withdrawn():
    seen = Alarms()
    for size, found in enumerate([[20], [21], [], [20, 40], [44]]):
        seen.see(found, size)

    assert seen.raised == [(20, 0), (40, 3), (44, 4)]


def test_a_step_must_be_found_near_and_soon():
    def detector(index, known):
        return lambda _, sizes: [[index] if size >= known else [] for size in sizes]

    noise = Noise(np.ones(100))
    assert is_found(detector(53, 56), noise, 50)
    assert not is_found(detector(54, 56), noise, 50)
    assert not is_found(detector(50, 57), noise, 50)
    assert not is_found(detector(50, 10), noise, 50)


def test_windows_are_flat_without_asking_a_detector():
    rng = np.random.default_rng(0)
    flat = np.exp(0.005 * rng.standard_normal(100))
    stepped = flat * np.where(np.arange(100) < 60, 1.0, 1.03)

    assert (is_flat(flat), is_flat(stepped)) == (True, False)
    assert len(flat_windows([flat, stepped])) == 1
    assert sorted(shuffled(flat, rng)) == sorted(flat)


@pytest.mark.parametrize("kind", GPU_NOISES)
def test_each_kind_of_noise_hides_few_steps_and_raises_few_alarms(kind):
    found, raised = gpu_noise(kind, ours, NUM)

    assert found.hits >= 0.75 * NUM
    assert raised <= 2 / NUM


def test_a_calm_series_raises_nothing_over_its_whole_replay():
    rng = np.random.default_rng(1)

    assert alarms(ours, Noise(np.exp(0.005 * rng.standard_normal(100)))) == []
