"""A ladder says of each factor what it is worth, where, and how well that is known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dashboard.cli_exit import ExitCode
from db.diagnose import Status, diagnose
from db.evidence import Outcome, Place
from db.ladder import FACTORS, ladder_readings
from tests.asv_trees import AsvTree, row
from tests.command_on_tree import command_on, strict
from tests.ladders import (
    LADDER,
    MEASURED_US,
    REMOVED,
    VARIANTS,
    ladder,
    measured,
    rung,
    whole,
)
from tests.recordings import SERIAL, claim_of, names, on_h200

WORTH = {"read_once": 2.5, "split": 22.0, "packed": 1.27, "page_64": 1.02, "in_order": 1.01}


def reading(found, factor, place, context=65536):
    (one,) = [
        one
        for one in found
        if (one.factor, one.place, one.context_tokens) == (factor, place, context)
    ]
    return one


def claims_of(diagnosis, name):
    return [claim for claim in diagnosis.claims if claim.name == name]


def test_each_factor_is_read_at_its_three_places():
    found = ladder_readings(whole(WORTH))

    assert len(VARIANTS) == 14
    assert {(one.factor, one.place) for one in found} == {
        (factor, place) for factor in FACTORS for place in Place
    }
    split = [
        (one.before.settings["variant"], one.after.settings["variant"])
        for one in found
        if one.factor == "split"
    ]
    assert split == [
        ("'read_once'", "'read_once+split'"),
        ("'none'", "'split'"),
        ("'read_once+packed+page_64+in_order'", f"'{'+'.join(FACTORS)}'"),
    ]


def test_what_factors_are_worth_is_found_again_within_its_interval():
    for one in ladder_readings(whole(WORTH)):
        assert one.ratio.low <= WORTH[one.factor] <= one.ratio.high, one.factor
        assert one.ratio.high / one.ratio.low < 1.015
        matters = WORTH[one.factor] > 1.03
        assert one.ratio.outcome is (Outcome.MATTERS if matters else Outcome.NO_MATTER)


def test_the_steps_measured_on_an_h200_are_read_with_their_worth():
    found = ladder_readings(measured())
    times = list(MEASURED_US[65536].values())

    for factor, before, after in zip(FACTORS, times, times[1:], strict=False):
        one = reading(found, factor, Place.IN_ORDER)
        assert one.ratio.value == pytest.approx(before / after, rel=0.005)
        assert one.ratio.low < before / after < one.ratio.high
    assert reading(found, "split", Place.IN_ORDER).ratio.value == pytest.approx(22.2, rel=0.01)


def test_the_cause_is_ranked_by_what_each_factor_is_worth_in_the_fixed_order():
    cause = claims_of(diagnose(on_h200(*measured())), "ladder_cause")[1]

    assert cause.status is Status.SUPPORTED
    assert cause.statement == (
        "at 65,536 tokens, 72.8 times between its ends: missing parallelism (split, 22.2 times) "
        "first, V re-read (read_once, 2.5 times) second, a program for each head (packed, 1.27 "
        "times) third; within 3 %: page size 1 (page_64, 1.02 times), shuffled pages (in_order, "
        "1.02 times)"
    )
    assert cause.value == pytest.approx(7097 / 97.5, rel=0.01)
    assert cause.unit == "times, slow over fast end"
    assert "µs (8 programs on 132 SMs) → read_once" in cause.evidence
    assert "(264 programs) → packed" in cause.evidence
    assert cause.evidence.endswith("by 28 rounds of one process")


def test_a_ladder_that_lacks_rungs_leaves_its_cause_untested():
    causes = claims_of(diagnose(on_h200(*measured())), "ladder_cause")

    assert [cause.status for cause in causes] == [
        Status.UNTESTED,
        Status.SUPPORTED,
        Status.UNTESTED,
    ]
    assert "first" not in causes[0].statement
    assert "untested: V re-read (read_once), missing parallelism (split)" in causes[0].statement


def test_a_factor_says_where_it_matters_and_its_worth_everywhere():
    times = {"none": 7097, "read_once": 2843, "packed": 11090, "split": 3000}  # packing alone costs
    by_context = [
        point
        for context, extra in ((1024, 1.0), (65536, 1.27))
        for point in whole(WORTH | {"packed": extra}, context=context, noise=0.001)
        if point.settings["variant"].strip("'") not in times
    ]
    slow_end = [point for context in (1024, 65536) for point in ladder(times, context, noise=0.001)]

    found = diagnose(on_h200(*by_context, *slow_end))

    packed = claim_of(found, "ladder_packed")
    assert packed.statement == (
        "packed matters in the fixed order at 65,536 and removed at 65,536, slows down alone: "
        "at 1,024 tokens 1 times in the fixed order, 0.64 alone, 1 removed; "
        "at 65,536 tokens 1.27 times in the fixed order, 0.64 alone, 1.27 removed"
    )
    assert (packed.status, packed.is_alarm) == (Status.SUPPORTED, False)
    assert packed.value == pytest.approx(1.27, rel=0.01)
    assert packed.unit == "times, in the fixed order at 65,536 tokens"
    assert "alone 7,171 µs to" in packed.evidence
    assert "matters nowhere, within 3 %" in claim_of(found, "ladder_page_64").statement


def test_a_slowdown_in_the_fixed_order_is_no_cause():
    found = diagnose(on_h200(*whole(WORTH | {"packed": 0.64})))

    (cause,) = claims_of(found, "ladder_cause")
    assert "a slowdown: packed (0.64" in cause.statement
    assert "third" not in cause.statement


def test_a_noisy_ladder_decides_nothing_and_gives_its_figures():
    noisy = whole(dict.fromkeys(FACTORS, 1.0), noise=0.5)

    found = diagnose(on_h200(*noisy))

    (cause,) = claims_of(found, "ladder_cause")
    split = claim_of(found, "ladder_split")
    assert (cause.status, split.status) == (Status.UNTESTED, Status.UNTESTED)
    assert "undecided: " in cause.statement
    assert "split is undecided: at 65,536 tokens" in split.statement
    assert "in the fixed order (undecided)" in split.statement
    assert all(one.ratio.outcome is Outcome.UNDECIDED for one in found.ladder)


def test_rounds_cancel_a_drift_that_would_hide_a_factor():
    rng = np.random.default_rng(1)
    drift = np.geomspace(1.0, 3.0, 24)
    rungs = [
        rung(variant, 65536, [float(one) for one in us * 1e-6 * drift * rng.normal(1, 0.002, 24)])
        for variant, us in (("none", 105.0), ("read_once", 100.0))
    ]

    one = reading(ladder_readings(rungs), "read_once", Place.IN_ORDER)

    assert one.ratio.outcome is Outcome.MATTERS
    assert 1.04 < one.ratio.low < 1.05 < one.ratio.high < 1.06


def test_two_factors_without_a_rung_between_them_are_not_compared():
    found = diagnose(on_h200(*ladder({"none": 7097, "read_once+split": 128})))

    assert found.ladder == ()
    assert names(found.claims).isdisjoint({"ladder_cause", "ladder_split"})


def test_a_factor_nobody_could_read_is_untested():
    found = diagnose(on_h200(*ladder({"none": 7097, "read_once": 2843})))

    packed = claim_of(found, "ladder_packed")
    assert packed.status is Status.UNTESTED
    assert packed.statement == "packed is untested: no two rungs differ in it alone"
    assert math.isfinite(packed.value)


def test_ladders_of_two_versions_are_told_apart():
    first = ladder({"none": 7097, "read_once": 2843})
    second = ladder({"none": 710, "read_once": 709}, version="2")

    found = ladder_readings([*first, *second])

    assert {one.ladder for one in found} == {
        f"{LADDER} version 1(context_tokens=65536)",
        f"{LADDER} version 2(context_tokens=65536)",
    }
    assert all(one.before.version == one.after.version for one in found)


@pytest.mark.parametrize("variant", ["split+read_once", "turbo", "none+split", ""])
def test_a_name_that_is_no_rung_is_an_ordinary_case(variant):
    odd = rung(variant, 65536, [7e-3] * 8)

    found = diagnose(on_h200(odd))

    assert found.ladder == ()
    assert "distance_from_floor" in names(found.claims)


def test_a_rung_is_slow_on_purpose_and_only_doubted_under_its_floor():
    rungs = whole(WORTH)
    rungs[0] = replace(rungs[0], counters={"utilization_gpu_pct": 100.0, "gpm_sm_active_pct": 5.0})
    broken = ladder({"none": 1.0}, context=1048576)

    found = diagnose(on_h200(*rungs, *broken))

    assert len(found.cases) == 15
    assert all(case.floor_ratio is not None for case in found.cases)
    about_cases = [claim for claim in found.claims if claim.case is not None]
    assert [claim.name for claim in about_cases] == ["under_the_floor"]


def test_contexts_of_a_ladder_are_no_line():
    found = diagnose(on_h200(*measured()))

    assert found.fits == ()
    assert names(found.claims).isdisjoint({"context_fit", "excess_over_line", "suspect_point"})


def test_page_size_is_tested_by_the_ladder_too():
    found = diagnose(on_h200(SERIAL, *measured()))

    page_size = claim_of(found, "page_size")
    assert page_size.status is Status.SUPPORTED
    assert "is not the cause: it is worth at most 1.047 [" in page_size.statement
    assert "page 1 over page 64, in the fixed order" in page_size.statement
    assert "0 of 3 comparisons beyond 1.1 times, 3 within" in page_size.evidence
    costly = diagnose(on_h200(*whole(WORTH | {"page_64": 1.5})))
    told = claim_of(costly, "page_size")
    assert ("page_size matters" in told.statement, told.is_alarm) == (True, False)


@pytest.fixture
def call(tmp_path):
    """The command on the database of a run that climbed a whole ladder."""
    tree = AsvTree(tmp_path / "results", "h200")
    points = whole(WORTH)
    values = [["65536"], [repr(variant) for variant in VARIANTS]]
    tree.benchmark(LADDER, params=values, names=["context_tokens", "variant"])
    samples = [list(point.process_samples_s[0]) for point in points]
    medians = [point.time_s for point in points]
    tree.results({LADDER: row(medians, params=values, samples=samples)})
    for point, samples_s in zip(points, samples, strict=True):
        tree.line(
            benchmark=LADDER,
            params=["65536", point.settings["variant"]],
            machine="h200",
            n=len(samples_s),
            median_s=point.time_s,
            samples_s=samples_s,
            context_tokens=65536,
            bytes=point.bytes,
            kv_bytes=point.kv_bytes,
            programs=point.programs,
            timer="cuda_events",
            device={"kind": "cuda", "name": "NVIDIA H200", "num_sms": 132},
            ceilings={"read_bytes_per_s": 4.55e12},
            validity=["interleaved"],
        )
    command = command_on(f"sqlite:///{tmp_path / 'bench.db'}")
    stored = command("ingest", str(tree.root))
    assert stored.exit_code == ExitCode.OK, stored.output
    return command


def test_the_command_shows_a_ladder_in_json_and_in_the_terminal(call):
    (found,) = strict(call("diagnose", "--json").stdout)["diagnoses"]
    text = call("diagnose").stdout

    assert len(found["ladder"]) == len(FACTORS) * len(Place)
    split = next(one for one in found["ladder"] if one["factor"] == "split")
    assert (split["place"], split["outcome"]) == ("in the fixed order", "matters")
    assert split["low"] < 22.0 < split["high"]
    assert split["before"] == "context_tokens=65536, variant='read_once'"
    assert [one["status"] for one in found["claims"] if one["name"] == "ladder_cause"] == [
        "supported"
    ]
    assert "missing parallelism (split, 22" in text
    assert f"{LADDER}(context_tokens=65536)" in text
    (line,) = [line for line in text.splitlines() if line.startswith("split ")]
    assert line.count("\N{MULTIPLICATION SIGN} [2") == 3
    assert "129" in line or "130" in line
    assert not any(variant in text for variant in REMOVED)  # the ladder's table stands for them
