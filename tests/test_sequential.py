"""Sequential decisions: how often they are wrong, what they see, and how soon."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from db.cases import Verdict
from db.sequential import Levels, Plan, decide

RECORDED = Path(__file__).parent.parent / "benchmarks" / "recorded"
NUM_PAIRS_OF_COMMITS = 2000
SPREADS = (0.001, 0.01, 0.03)  # between processes
PLAN = Plan()


def run(ratios, plan=PLAN, direction="lower"):
    """Look as often as planned, and stop at the first decision."""
    for look in plan.looks:
        found = decide(ratios[:look], plan, direction)
        if not found.is_open:
            break
    return found


def noise(rng, spread, num=24):
    """Ratios of pairs whose logs have a spread."""
    return np.exp(spread * rng.standard_normal(num))


def recorded_samples():
    """Samples of every recorded case, relative to their median."""
    lines = [
        json.loads(line)
        for path in sorted(RECORDED.glob("h200*/telemetry/*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return [
        np.asarray(line["samples_s"]) / statistics.median(line["samples_s"])
        for line in lines
        if len(line["samples_s"]) >= 16
    ]


def processes(samples, rng, spread, drift):
    """Medians of processes that draw from one case's samples; the machine wanders under both."""
    medians = np.median(rng.choice(samples, (PLAN.most_pairs, 5)), axis=1)
    own = np.exp(spread * rng.standard_t(3, PLAN.most_pairs))
    return medians * own * drift


def test_one_commit_twice_is_called_different_in_less_than_a_percent():
    """Resampled pairs of one commit, with heavy tails between processes and a drift over pairs."""
    rng, cases = np.random.default_rng(1), recorded_samples()
    wrong = 0
    for number in range(NUM_PAIRS_OF_COMMITS):
        samples = cases[number % len(cases)]
        spread = SPREADS[number % len(SPREADS)]
        drift = np.exp(0.01 * rng.standard_normal(PLAN.most_pairs).cumsum())
        base, head = (processes(samples, rng, spread, drift) for _ in range(2))
        wrong += run(head / base).verdict in {Verdict.REGRESSION, Verdict.IMPROVEMENT}

    assert wrong <= 0.01 * NUM_PAIRS_OF_COMMITS


@pytest.mark.parametrize(("change", "verdict"), [(1.1, "regression"), (1 / 1.1, "improvement")])
def test_a_change_of_a_tenth_is_called_within_a_few_pairs(change, verdict):
    rng = np.random.default_rng(2)
    found = [run(change * noise(rng, 0.014)) for _ in range(200)]

    assert [one.verdict.value for one in found].count(verdict) >= 198
    assert statistics.median(one.pairs for one in found) <= 6


def test_more_is_better_turns_the_verdict():
    assert run([1.2, 1.21] * 12, direction="higher").verdict == "improvement"


def test_equal_commits_are_called_equal_and_not_only_not_different():
    rng = np.random.default_rng(3)
    found = [run(noise(rng, 0.007)).verdict for _ in range(200)]

    assert found.count(Verdict.NO_CHANGE) >= 190


def test_what_stays_open_is_inconclusive_after_the_last_look():
    found = run(noise(np.random.default_rng(4), 0.4))

    assert (found.verdict, found.pairs) == (Verdict.INCONCLUSIVE, PLAN.most_pairs)
    assert found.low < found.relative_change < found.high


def test_cases_that_are_judged_at_once_share_the_error_of_a_change_and_not_of_no_change():
    many = replace(PLAN, num_cases=40)
    slower, steady = [1.08, 1.09, 1.1, 1.09], [1.001, 0.999, 1.0, 1.002]

    assert (run(slower).verdict, run(slower, many).verdict) == ("regression", "inconclusive")
    assert (run(steady).verdict, run(steady, many).verdict) == ("no change", "no change")
    assert run([1.3, 1.31, 1.29, 1.3], many).verdict == "regression"


def test_a_single_pair_decides_nothing():
    assert decide([2.0], PLAN).is_open


def told(levels, ratios, error=0.0025):
    """Ask after each pair; the answer and how many pairs it took."""
    for count in range(1, len(ratios) + 1):
        is_bad = levels.tell(ratios[:count], error)
        if is_bad is not None:
            return is_bad, count
    return None, len(ratios)


def test_a_large_change_takes_two_pairs_a_commit():
    rng = np.random.default_rng(5)
    levels = Levels(list(np.log(80.0 * noise(rng, 0.1, 4))))

    assert told(levels, noise(rng, 0.1)) == (False, 2)
    assert told(levels, 80.0 * noise(rng, 0.1)) == (True, 2)
    assert (len(levels.good), len(levels.bad)) == (2, 6)


def test_a_change_at_the_noise_takes_as_many_pairs_as_it_needs():
    rng = np.random.default_rng(6)
    ends = list(np.log(1.04 * noise(rng, 0.02, 12)))
    found = [told(Levels(list(ends)), noise(rng, 0.02)) for _ in range(100)]

    assert [is_bad for is_bad, _ in found].count(True) <= 1
    assert 3 <= statistics.median(count for _, count in found) <= 8


def test_a_commit_with_half_of_the_change_is_at_neither_level():
    levels = Levels(list(np.log([1.2, 1.21, 1.2, 1.19])))

    assert told(levels, [1.09, 1.1, 1.1, 1.09] * 6) == (None, 24)
    assert not levels.good


def test_pairs_without_any_noise_are_told():
    assert told(Levels([0.5] * 4), [1.0] * 3) == (False, 2)
