"""Comparisons of many cases: order, false discoveries, and strict JSON."""

import json
import math

import pytest

from db.cases import DuplicateCaseError, jsonable
from db.compare import SEVERITY, Policy, Verdict, compare
from tests.case_results import FAILED, SKIPPED, case, named, only, processes


def test_the_gravest_case_leads_and_names_the_whole():
    base = [named(name, case(processes(i))) for i, name in enumerate("abcd")]
    head = [
        named("a", case(processes(10, level=1.08))),
        named("b", case(processes(11, level=0.8))),
        named("c", FAILED),
        named("d", case(processes(12, level=1.3))),
        named("e", case()),
    ]

    found = compare(base, head)

    assert [c.key.benchmark for c in found.cases] == ["d", "a", "c", "b", "e"]
    assert found.verdict is Verdict.REGRESSION
    assert found.counts[Verdict.REGRESSION] == 2
    assert found.counts[Verdict.INCONCLUSIVE] == 0
    assert sum(found.counts.values()) == 5
    assert set(found.counts) == set(Verdict)


def test_every_verdict_has_a_place_and_ignorance_outranks_good_news():
    rank = SEVERITY.index

    assert sorted(SEVERITY) == sorted(Verdict)
    assert rank(Verdict.REGRESSION) < rank(Verdict.FAILED) < rank(Verdict.INCONCLUSIVE)
    assert rank(Verdict.NOT_ENOUGH_HISTORY) < rank(Verdict.IMPROVEMENT) < rank(Verdict.NO_CHANGE)


def test_nothing_to_compare_is_not_enough_history():
    assert compare([], []).verdict is Verdict.NOT_ENOUGH_HISTORY


def test_two_results_of_one_case_are_refused():
    with pytest.raises(DuplicateCaseError, match=r"contender: expected one result of step.Step"):
        compare([], [case(), case()])


def test_many_flat_cases_are_not_flagged():
    """At a rate of 5 % about one of 20 comparisons of 30 flat cases may flag anything."""
    flagged = 0
    for seed in range(60):
        base = [named(str(i), case(processes(10**4 * seed + i, 4, noise=0.03))) for i in range(30)]
        head = [
            named(str(i), case(processes(10**6 + 10**4 * seed + i, 4, noise=0.03)))
            for i in range(30)
        ]
        found = compare(base, head)
        flagged += found.counts[Verdict.REGRESSION] + found.counts[Verdict.IMPROVEMENT] > 0

    assert flagged <= 7


def test_one_regression_is_found_among_many_flat_cases():
    base = [named(f"{i:02}", case(processes(i))) for i in range(40)]
    head = [named(f"{i:02}", case(processes(i + 99))) for i in range(39)]
    head.append(named("39", case(processes(500, level=1.05))))

    found = compare(base, head)

    assert [c.key.benchmark for c in found.cases if c.verdict is Verdict.REGRESSION] == ["39"]


def test_a_weak_signal_among_many_cases_is_left_undecided():
    weak = case((1.0, 1.005, 0.995, 1.002)), case((1.05, 1.01, 1.04, 1.09))
    flat = [
        (case(processes(i, noise=0.03)), case(processes(i + 70, noise=0.03))) for i in range(60)
    ]
    base = [named("weak", weak[0]), *(named(f"{i}", pair[0]) for i, pair in enumerate(flat))]
    head = [named("weak", weak[1]), *(named(f"{i}", pair[1]) for i, pair in enumerate(flat))]

    alone = only(*weak, Policy(fdr=0.1))
    among = next(c for c in compare(base, head, Policy(fdr=0.1)).cases if c.key.benchmark == "weak")

    assert alone.verdict is Verdict.REGRESSION
    assert among.p_value == alone.p_value
    assert among.q_value > alone.q_value
    assert among.verdict is Verdict.INCONCLUSIVE


def test_a_comparison_is_strict_json():
    found = compare([case(), named("b", FAILED)], [case((9.0, 9.1)), named("c", SKIPPED)])

    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))

    assert plain["verdict"] == "regression"
    assert plain["counts"]["no change"] == 0
    assert plain["policy"]["relevance_rel"] == 0.03
    assert plain["cases"][0]["case"] == "step.Step.time_step(context=1024, page_size=16)"
    assert plain["cases"][0]["key"]["machine"] == "h200"


def test_what_strict_json_cannot_hold_becomes_null():
    given_values = {Verdict.NEW: (math.inf, -math.inf, math.nan, 1.5), "b": [None, Verdict.FAILED]}

    assert jsonable(given_values) == {"new": [None, None, None, 1.5], "b": [None, "failed"]}
