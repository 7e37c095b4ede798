"""How many times one case takes what another takes: intervals, grounds, corrected p-values."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from db.evidence import EvidencePoint, Outcome
from db.ratios import judged, ratio_of

TURNS = ("interleaved",)


def case(*processes, validity=()):
    """A case from the samples of each of its processes."""
    medians = [float(np.median(one)) for one in processes]
    return EvidencePoint(
        "suite.Suite.time_it",
        "",
        None,
        float(np.median(medians)),
        sum(len(one) for one in processes),
        validity=validity,
        process_samples_s=tuple(tuple(float(one) for one in samples) for samples in processes),
    )


def in_turns(rng, ratio, *, num_rounds=20, noise=0.02, drift=0.3):
    """Two cases measured in turns while the machine slows down."""
    common = 1e-3 * np.exp(drift * np.linspace(0, 1, num_rounds))
    noisy = [common * np.exp(noise * rng.standard_normal(num_rounds)) for _ in range(2)]
    return case(ratio * noisy[0], validity=TURNS), case(noisy[1], validity=TURNS)


def test_intervals_of_rounds_cover_the_truth_as_often_as_they_say_whatever_the_drift():
    rng = np.random.default_rng(3)
    found = [ratio_of(*in_turns(rng, 1.2), 1.03) for _ in range(1000)]

    covered = np.mean([one.low <= 1.2 <= one.high for one in found])
    assert 0.945 <= covered <= 0.98  # of 20 signs the interval nearest to 95 % holds 95.9 %
    assert np.median([one.high / one.low for one in found]) < 1.04


def test_intervals_of_process_medians_cover_the_truth_at_least_as_often_as_they_say():
    rng = np.random.default_rng(4)
    found = []
    for _ in range(1000):
        sides = [
            [[scale * math.exp(0.1 * rng.standard_normal())] for _ in range(3)]
            for scale in (1.2, 1.0)
        ]
        found.append(ratio_of(case(*sides[0]), case(*sides[1]), 1.03))

    assert np.mean([one.low <= 1.2 <= one.high for one in found]) >= 0.94


@pytest.mark.parametrize(
    ("slow", "fast", "reason"),
    [
        (case([2.0, 2.1]), case([1.0, 1.1]), "1 process a side of the 2 needed"),
        (replace(case([2.0]), process_samples_s=()), case([1.0], [1.1]), "0 processes a side"),
        (case([2.0] * 5, validity=TURNS), case([1.0] * 5, validity=TURNS), "5 rounds of the 6"),
        (case([2.0] * 9, validity=TURNS), case([1.0] * 8, validity=TURNS), "do not match"),
        (case([2.0, 2.0], [0.0, 2.0]), case([1.0], [1.0]), "not above 0"),
    ],
)
def test_what_cannot_carry_an_interval_has_none_and_says_why(slow, fast, reason):
    slow, fast = replace(slow, time_s=2.0), replace(fast, time_s=1.0)

    (found,) = judged([ratio_of(slow, fast, 1.03)], 1.03)

    assert (found.value, found.low, found.high, found.q_value) == (2.0, None, None, None)
    assert found.outcome is Outcome.UNDECIDED
    assert reason in found.ground


def test_only_cases_both_measured_in_turns_are_compared_round_by_round():
    slow, fast = case([2.0] * 9, validity=TURNS), case([1.0] * 9)

    assert "process a side" in ratio_of(slow, fast, 1.03).ground


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [
        (1.2, Outcome.MATTERS),
        (1 / 1.2, Outcome.MATTERS),
        (1.0, Outcome.NO_MATTER),
        (1.08, Outcome.NO_MATTER),
        (1 / 1.08, Outcome.NO_MATTER),
        (1.1, Outcome.UNDECIDED),
    ],
)
def test_a_factor_matters_beyond_the_margin_and_not_within_it(ratio, outcome):
    pair = in_turns(np.random.default_rng(5), ratio, num_rounds=40, noise=0.005)

    (found,) = judged([ratio_of(*pair, 1.1)], 1.1)

    assert found.outcome is outcome


def test_a_doubtful_ratio_is_not_called_among_many_that_are_nothing():
    rng = np.random.default_rng(6)
    slow = case([1.05] * 10 + [1.0] * 2, validity=TURNS)  # beyond the margin in 10 of 12 rounds
    doubtful = ratio_of(slow, case([1.0] * 12, validity=TURNS), 1.03)
    nothing = [ratio_of(*in_turns(rng, 1.0), 1.03) for _ in range(40)]

    alone, among = judged([doubtful], 1.03)[0], judged([doubtful, *nothing], 1.03)[0]

    assert 0.01 < doubtful.p_value < 0.05
    assert (alone.outcome, among.outcome) == (Outcome.MATTERS, Outcome.UNDECIDED)


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0.1, 10.0),
    st.integers(6, 40),
    st.integers(0, 2**32 - 1),
)
def test_exchanging_the_sides_turns_a_ratio_over(ratio, num_rounds, seed):
    a, b = in_turns(np.random.default_rng(seed), ratio, num_rounds=num_rounds)

    there, back = ratio_of(a, b, 1.03), ratio_of(b, a, 1.03)

    assert math.isclose(there.value * back.value, 1.0)
    assert math.isclose(there.low * back.high, 1.0)
    assert math.isclose(there.high * back.low, 1.0)
    assert math.isclose(there.p_value, back.p_value)
