"""Comparisons of one case: every verdict, and what a verdict must not say."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from db.compare import Policy, Verdict, compare
from db.two_samples import needed_samples
from tests.case_results import FAILED, KEY, SKIPPED, case, only, processes


@pytest.mark.parametrize(
    ("direction", "level", "verdict"),
    [
        ("lower", 1.10, Verdict.REGRESSION),
        ("lower", 0.90, Verdict.IMPROVEMENT),
        ("higher", 1.10, Verdict.IMPROVEMENT),
        ("higher", 0.90, Verdict.REGRESSION),
    ],
)
def test_direction_comes_from_the_metric(direction, level, verdict):
    base, head = case(processes(0)), case(processes(1, level=level))

    found = only(replace(base, direction=direction), replace(head, direction=direction))

    assert found.verdict is verdict
    assert found.relative_change == pytest.approx(level - 1.0, abs=0.01)
    assert found.interval_low < found.relative_change < found.interval_high
    assert found.interval_low * found.interval_high > 0.0


def test_a_flag_is_screened_and_says_so():
    found = only(case(processes(0)), case(processes(1, level=1.2)))

    assert not found.confirmed
    assert "screened, not yet confirmed" in found.reason
    assert found.to_dict()["tier"] == "screened"


def test_calm_sides_at_one_level_are_no_change():
    found = only(case(processes(0)), case(processes(1)))

    assert found.verdict is Verdict.NO_CHANGE
    assert -0.03 <= found.interval_low <= found.interval_high <= 0.03


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(2, 10),
    st.floats(-0.08, 0.08),
    st.floats(0.0005, 0.05),
)
def test_no_change_holds_exactly_where_the_whole_interval_is_irrelevant(seed, n, change, noise):
    base = case(processes(seed, n, noise=noise))
    head = case(processes(seed + 1, n, level=1.0 + change, noise=noise))

    found = only(base, head)

    inside = found.interval_low >= -0.03 and found.interval_high <= 0.03
    assert (found.verdict is Verdict.NO_CHANGE) == inside
    if found.verdict in {Verdict.REGRESSION, Verdict.IMPROVEMENT}:
        assert abs(found.relative_change) >= 0.03
        assert found.q_value <= 0.05
    assert 0.0 < found.p_value <= found.q_value <= 1.0
    assert found.interval_low <= found.relative_change <= found.interval_high


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.8, 1.25))
def test_swapping_the_sides_swaps_the_verdict(seed, level):
    base, head = case(processes(seed)), case(processes(seed + 1, level=level))
    swapped = {
        Verdict.REGRESSION: Verdict.IMPROVEMENT,
        Verdict.IMPROVEMENT: Verdict.REGRESSION,
    }

    there, back = only(base, head), only(head, base)

    ends = (there.relative_change, there.interval_low, there.interval_high)
    # The margin is relative to the baseline, so close to it the two sides see it differently.
    if all(abs(abs(end) - 0.03) > 0.005 for end in ends):
        assert back.verdict is swapped.get(there.verdict, there.verdict)
    assert (1 + there.relative_change) * (1 + back.relative_change) == pytest.approx(1.0)
    assert (1 + there.interval_low) * (1 + back.interval_high) == pytest.approx(1.0)


def test_wide_intervals_are_inconclusive_and_say_what_would_decide_them():
    found = only(case(processes(0, 3, noise=0.03)), case(processes(2, 3, noise=0.03)))

    assert found.verdict is Verdict.INCONCLUSIVE
    assert 3 < found.needed_processes < 200
    assert "n = 30 and 30" in found.reason
    assert f"about {found.needed_processes} interleaved processes a side" in found.reason
    assert f"{found.interval_high:+.1%}" in found.reason


def test_the_processes_needed_are_those_that_exclude_zero_or_the_margin():
    base, unclear = case((1.0, 1.04, 0.96)), case((1.06, 1.1, 1.02))
    level = case((1.01, 1.05, 0.97))
    deviation = float(np.std(np.log([1.0, 1.04, 0.96]), ddof=1))

    beyond, within = only(base, unclear), only(base, level)

    assert beyond.verdict is within.verdict is Verdict.INCONCLUSIVE
    to_zero, to_margin = math.log(1.06), math.log(1.03 / 1.01)
    assert abs(beyond.needed_processes - needed_samples(deviation, to_zero, 0.95, 200)) <= 1
    assert abs(within.needed_processes - needed_samples(deviation, to_margin, 0.95, 200)) <= 2


def test_the_interval_always_holds_the_change_of_the_values_shown():
    found = only(case(processes(0), value=1.0), case(processes(1, level=1.1), value=1.2))

    assert found.relative_change == pytest.approx(0.2)
    assert found.interval_low < 0.11
    assert found.interval_high == pytest.approx(0.2)


def test_a_change_on_the_margin_is_undecidable_and_says_so():
    base, head = case((1.0, 1.001, 0.999)), case((1.0299, 1.03, 1.02999))

    found = only(base, head, Policy(max_processes=5))

    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.needed_processes is None
    assert "even 5 interleaved processes a side would not decide it" in found.reason


def test_a_significant_but_irrelevant_change_is_no_regression():
    base = case((1.0, 1.0001, 0.9999, 1.0))
    head = case((1.01, 1.0101, 1.0099, 1.01))

    found = only(base, head)

    assert found.p_value < 1e-6
    assert found.verdict is Verdict.NO_CHANGE


@pytest.mark.parametrize(
    ("base", "head", "culprit"),
    [
        (case((1.0,), status="single-sample"), case(), "the baseline is a single sample"),
        (case(), case((1.2,), status="single-sample"), "the contender is a single sample"),
        (case((1.0,)), case(), "the baseline has 1 process of the 2"),
        (case(), case((1.2, 1.2, 1.2), num_processes=None), "the contender has 3 samples of the 4"),
    ],
)
def test_a_short_side_is_not_enough_history(base, head, culprit):
    found = only(base, head)

    assert found.verdict is Verdict.NOT_ENOUGH_HISTORY
    assert culprit in found.reason
    assert "no noise floor is known" in found.reason
    assert found.p_value is None


def test_a_known_noise_floor_decides_single_samples():
    base = case((1.0,), status="single-sample", noise_rel=0.005)
    head = case((1.1,), status="single-sample")

    found = only(base, head)

    assert found.verdict is Verdict.REGRESSION
    assert found.noise_rel == 0.005
    # t with 9 degrees of freedom, 2.262, times the root of two of the floor, around ln 1.1
    half = 2.262157 * math.sqrt(2) * 0.005
    assert found.interval_low == pytest.approx(1.1 * math.exp(-half) - 1, rel=1e-5)
    assert found.interval_high == pytest.approx(1.1 * math.exp(half) - 1, rel=1e-5)


def test_the_larger_noise_floor_counts():
    quiet, loud = case(noise_rel=0.001), case((1.1,) * 4, noise_rel=0.08)

    assert only(quiet, loud).verdict is Verdict.INCONCLUSIVE
    assert only(quiet, loud).noise_rel == 0.08


def test_a_run_noisier_than_its_history_is_judged_by_itself():
    base = case((1.0, 1.12, 0.91, 1.05), noise_rel=0.001)
    head = case((1.06, 1.2, 0.95, 1.1), noise_rel=0.001)

    found = only(base, head)

    assert found.verdict is Verdict.INCONCLUSIVE
    assert "scatter more than its history" in found.reason


def test_raw_samples_of_unknown_processes_are_widened_by_the_usual_noise():
    samples = 1.0 + 1e-5 * np.arange(40)

    found = only(case(samples, num_processes=None), case(1.012 * samples, num_processes=None))

    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.interval_high - found.interval_low == pytest.approx(0.0486, abs=0.002)
    assert "samples of unknown processes" in found.reason


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        (case(), FAILED, Verdict.FAILED),
        (FAILED, FAILED, Verdict.FAILED),
        (SKIPPED, FAILED, Verdict.FAILED),
        (FAILED, case(), Verdict.NOT_ENOUGH_HISTORY),
        (case(), SKIPPED, Verdict.SKIPPED),
        (SKIPPED, SKIPPED, Verdict.SKIPPED),
        (FAILED, SKIPPED, Verdict.SKIPPED),
        (SKIPPED, case(), Verdict.NEW),
        (case(), None, Verdict.REMOVED),
        (FAILED, None, Verdict.REMOVED),
        (SKIPPED, None, Verdict.REMOVED),
        (None, case(), Verdict.NEW),
        (None, FAILED, Verdict.FAILED),
        (None, SKIPPED, Verdict.SKIPPED),
        (case(), case((), value=math.nan), Verdict.FAILED),
        (case((0.0, 0.0)), case(), Verdict.INCONCLUSIVE),
        (case(), case((1.0, -1.0, 1.0)), Verdict.INCONCLUSIVE),
        (case((1.0, math.nan, 1.0), value=1.0), case(), Verdict.INCONCLUSIVE),
    ],
)
def test_a_side_without_a_usable_number_has_its_own_verdict(base, head, verdict):
    sides = [[side] if side is not None else [] for side in (base, head)]

    (found,) = compare(*sides).cases

    assert found.verdict is verdict
    assert found.reason
    assert (found.p_value, found.interval_low, found.interval_high) == (None, None, None)


@pytest.mark.parametrize(
    "result",
    [
        case(),
        case((4.0,), status="single-sample", unit="tokens", direction="higher"),
        case((0.0,), status="single-sample"),
        case((1.0,) * 4, num_processes=None),
    ],
)
def test_equal_is_no_change(result):
    found = only(result, result)

    assert found.verdict is Verdict.NO_CHANGE
    assert (found.relative_change, found.interval_low, found.interval_high) == (0.0, 0.0, 0.0)


def test_one_value_from_different_samples_is_not_taken_for_equal():
    assert only(case((0.5, 1.0, 1.5)), case((0.6, 1.0, 1.4))).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("values", [(1e300, 1e-30), (1e-30, 1e300), (1e-3, 1e7), (5e-324, 1.0)])
def test_values_that_no_ratio_relates_are_inconclusive(values):
    base, head = (case([value] * 4) for value in values)

    found = only(base, head)

    assert found.verdict is Verdict.INCONCLUSIVE
    assert "measures nothing" in found.reason
    assert "inf" not in json.dumps(found.to_dict(), allow_nan=False).lower().replace("info", "")


def test_a_benchmark_whose_version_changed_is_not_compared():
    newer = replace(case(), key=replace(KEY, version="2"))

    removed, new = compare([case()], [newer]).cases

    assert (removed.verdict, new.verdict) == (Verdict.REMOVED, Verdict.NEW)
    assert "version 1 here, 2 on the other side" in removed.reason
    assert "version 2 here, 1 on the other side" in new.reason


@pytest.mark.parametrize(
    ("base", "head", "differs"),
    [("driver 1", "driver 2", True), ("driver 1", "driver 1", False), (None, "driver 2", False)],
)
def test_differing_environments_are_said(base, head, differs):
    comparison = compare(
        [case(processes(0), environment=base)], [case(processes(1, level=1.1), environment=head)]
    )

    assert comparison.environment_differs is differs
    assert comparison.cases[0].environment_differs is differs
    assert ("driver 1 and driver 2" in comparison.cases[0].reason) is differs
