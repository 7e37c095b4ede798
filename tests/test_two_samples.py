"""The statistics behind a comparison, against definitions and other libraries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_ind

from db.two_samples import by_noise, by_samples, false_discovery_rates, needed_samples


@pytest.mark.parametrize(("m", "n"), [(2, 2), (3, 7), (7, 4)])
def test_few_processes_are_compared_by_welchs_t(m, n):
    rng = np.random.default_rng(m * n)
    a, b = rng.standard_normal(m), 0.5 + 2.0 * rng.standard_normal(n)
    theirs = ttest_ind(b, a, equal_var=False)

    ours = by_samples(a, b, 0.95)

    assert ours.p_value == pytest.approx(theirs.pvalue)
    assert (ours.low, ours.high) == pytest.approx(theirs.confidence_interval(0.95))


def test_many_samples_are_compared_by_rank_and_one_wild_one_does_not_matter():
    a = np.linspace(0.0, 0.01, 12)
    b = a + 0.05
    wild = np.append(b[:-1], 50.0)

    calm, disturbed = by_samples(a, b, 0.95), by_samples(a, wild, 0.95)

    assert disturbed.high < 0.07
    assert disturbed.p_value == calm.p_value < 1e-5


def naive_rates(p_values):
    """For each p: the least over thresholds at or above it of expected over found."""
    return [
        min([1.0] + [len(p_values) * t / sum(q <= t for q in p_values) for t in p_values if t >= p])
        for p in p_values
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-12, 1.0), max_size=30))
def test_false_discovery_rates_are_those_of_the_definition(p_values):
    assert false_discovery_rates(p_values) == pytest.approx(naive_rates(p_values))


def test_needed_samples_is_the_first_number_that_is_enough():
    deviation, distance = 0.02, 0.013

    def half_width(n):
        rng = np.random.default_rng(0)
        side = rng.standard_normal(n)
        side = deviation * (side - side.mean()) / side.std(ddof=1)
        theirs = ttest_ind(side, side, equal_var=True).confidence_interval(0.95)
        return theirs.high

    n = needed_samples(deviation, distance, 0.95, limit=500)

    assert half_width(n) < distance <= half_width(n - 1)
    assert needed_samples(deviation, distance, 0.95, limit=n - 1) is None
    assert needed_samples(deviation, 0.0, 0.95, limit=50) is None


def test_no_p_value_is_zero():
    far = by_noise(5.0, 1e-6, 0.95)
    still = by_samples(np.zeros(3), np.ones(3), 0.95)

    assert far.p_value == still.p_value == 1e-15
    assert by_noise(0.0, 0.0, 0.95).p_value == 1.0
