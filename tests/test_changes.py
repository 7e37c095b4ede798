"""What changed between two runs: one thing is planted, that one is named, and the others are not."""

from dataclasses import replace

import numpy as np
import pytest

from db.changes import change_claims, summary
from db.diagnose import Ceilings, Evidence, EvidencePoint, Status

CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
ROW_BYTES = 1152
CLOCK = 1980.0


def name(context):
    return f"attention.Tree.time_cold(context={context})"


def run(*, t0_us=12.0, gb_s=900.0, contexts=CONTEXTS, seed=0, noise=0.002, times=1.0, **more):
    """One case over its contexts on the line that is asked for."""
    rng = np.random.default_rng(seed)
    points = []
    for context in contexts:
        num_bytes = context * ROW_BYTES
        seconds = (t0_us / 1e6 + num_bytes / gb_s / 1e9) * times * np.exp(noise * rng.normal())
        samples = seconds * np.exp(0.004 * rng.normal(size=20))
        fields = {
            "n": 20,
            "kv_bytes": num_bytes,
            "programs": 128,
            "counters": {"sm_clock_mhz": CLOCK},
            "process_samples_s": (tuple(samples),),
            "version": "1",
        }
        points.append(
            EvidencePoint(
                "attention.Tree.time_cold", f"context={context}", context, seconds, **fields
            )
        )
    sides = {"runs_with": "torch 2.11", "imposed": "H200, driver 580", "device": "H200 GPU-1"}
    return Evidence("h200", "H200", Ceilings(), None, tuple(points), **{**sides, **more})


def with_points(evidence, **changes):
    return replace(evidence, points=tuple(replace(point, **changes) for point in evidence.points))


def found(before, after, cases=None):
    claims = change_claims(before, after, {name(c) for c in CONTEXTS} if cases is None else cases)
    return {claim.name.removeprefix("change_of_"): claim for claim in claims}


def moved(claims):
    return {kind for kind, claim in claims.items() if claim.is_alarm}


def test_a_planted_t0_is_told_from_the_bandwidth():
    claims = found(run(), run(t0_us=22.0, seed=1))

    assert moved(claims) == {"t0"}
    assert claims["t0"].value == pytest.approx(0.010, rel=0.05)
    assert claims["t0"].statement.startswith("t0 changed: 0.012")
    assert claims["bandwidth"].statement.startswith("the bandwidth is as before: 9")
    assert claims["bandwidth"].status is Status.SUPPORTED


def test_a_planted_bandwidth_is_told_from_t0():
    claims = found(run(), run(gb_s=600.0, seed=1))

    assert moved(claims) == {"bandwidth"}
    assert claims["bandwidth"].value == pytest.approx(2 / 3, rel=0.02)
    assert claims["t0"].statement.startswith("t0 is as before")


def test_both_may_change():
    assert moved(found(run(), run(t0_us=30.0, gb_s=600.0, seed=1))) == {"t0", "bandwidth"}


def test_of_two_runs_of_one_commit_nothing_is_said_to_have_moved():
    """A hundred pairs without a change: intervals hold what they promise, with what is relevant."""
    alarms = [moved(found(run(seed=2 * seed), run(seed=2 * seed + 1))) for seed in range(100)]

    assert sum(bool(one) for one in alarms) <= 5, alarms


def test_where_the_noise_hides_it_t0_is_not_told():
    claims = found(run(noise=0.05), run(noise=0.05, t0_us=13.0, seed=1))

    assert "t0" not in moved(claims)
    assert claims["t0"].status is Status.UNTESTED
    assert "may be as before" in claims["t0"].statement


@pytest.mark.parametrize(
    ("contexts", "reason"),
    [(CONTEXTS[:3], "before: expected 4 contexts or more, got 3"), (CONTEXTS, "the points bend")],
)
def test_a_line_that_does_not_fit_is_refused_with_its_reason(contexts, reason):
    bend = run(contexts=contexts, noise=0.0)
    if contexts is CONTEXTS:
        points = [replace(p, time_s=p.time_s * (1 + i**2 / 10)) for i, p in enumerate(bend.points)]
        bend = replace(bend, points=tuple(points))

    claims = found(bend, run(seed=1))

    assert reason in claims["line"].statement
    assert (claims["line"].status, "t0" in claims) == (Status.UNTESTED, False)


def test_only_contexts_of_both_sides_are_on_the_lines():
    """The longest context is slow for a reason of its own, and only one side has it."""
    longer = run(contexts=(*CONTEXTS, 262_144), seed=1)
    last = replace(longer.points[-1], time_s=longer.points[-1].time_s * 3)

    claims = found(run(), replace(longer, points=(*longer.points[:-1], last)))

    assert "through 5 contexts" in claims["bandwidth"].evidence
    assert moved(claims) == set()


def test_a_clock_that_fell_by_the_ratio_of_the_times_agrees_and_is_no_proof():
    slow = with_points(run(times=1 / 0.9, seed=1), counters={"sm_clock_mhz": 0.9 * CLOCK})

    claims = found(run(), slow)

    assert claims["clock"].status is Status.CONSISTENT
    assert claims["clock"].statement == (
        "the SM clock changed by as much as the time: 1,980 → 1,782 MHz"
    )
    assert claims["clock"].value == pytest.approx(-10.0)


def test_a_clock_that_fell_by_less_is_not_the_cause():
    slow = with_points(run(times=1.5, seed=1), counters={"sm_clock_mhz": 0.97 * CLOCK})

    claims = found(run(), slow)

    assert "clock" not in moved(claims)
    assert "changed by less than the time" in claims["clock"].statement


def test_a_clock_that_rose_does_not_explain_a_slowdown():
    slow = with_points(run(times=1.1, seed=1), counters={"sm_clock_mhz": 1.1 * CLOCK})

    assert "clock" not in moved(found(run(), slow))


@pytest.mark.parametrize(
    ("field", "kind"),
    [("runs_with", "dependency"), ("imposed", "environment"), ("device", "hardware")],
)
def test_what_it_ran_on_and_with_is_named_where_it_changed(field, kind):
    claims = found(run(), run(times=1.2, seed=1, **{field: "another"}))
    others = {"dependency", "environment", "hardware"} - {kind}

    assert claims[kind].statement.endswith("→ another")
    assert claims[kind].status is Status.CONSISTENT
    assert not others & moved(claims)
    assert {claims[one].status for one in others} == {Status.SUPPORTED}


def test_samples_that_became_restless_are_noise():
    rng = np.random.default_rng(3)
    after = run(times=1.05, seed=1)
    points = [
        replace(p, process_samples_s=(tuple(p.time_s * np.exp(0.2 * rng.normal(size=20))),))
        for p in after.points
    ]

    claims = found(run(), replace(after, points=tuple(points)))

    assert "noise" in moved(claims)
    assert claims["noise"].status is Status.CONSISTENT


def test_the_stage_that_took_the_change_is_named():
    def staged(evidence, **seconds):
        return with_points(evidence, stage_seconds=seconds, time_s=sum(seconds.values()))

    claims = found(
        staged(run(), draft=0.002, verify=0.010), staged(run(), draft=0.0021, verify=0.014)
    )

    assert claims["stage"].statement == "verify takes 98% of the change: 10 → 14 ms"


def test_other_work_than_before_is_told():
    claims = found(run(), with_points(run(times=0.5, seed=1), programs=260))

    assert claims["work"].statement == "the programs of its kernel changed: 128 → 260"
    assert claims["work"].value == pytest.approx(260 / 128)


def test_a_case_that_one_side_lacks_has_no_change():
    other_version = with_points(run(seed=1), version="2")

    assert found(run(), run(seed=1), cases={"tree.Build.time_build"}) == {}
    assert found(run(), other_version) == {}
    assert summary([]) == ""


def test_the_sentence_says_what_moved_before_what_did_not():
    claims = change_claims(run(), run(gb_s=600.0, seed=1), {name(65_536)})

    told = summary(claims)

    assert told.startswith("The bandwidth changed: ")
    assert told.endswith(
        "Not it: dependencies, driver and limits, another device, clocks, restless samples, t0."
    )
    nothing = summary(change_claims(run(), run(), {name(65_536)}))
    assert nothing.startswith("Nothing that was recorded moved with it. Not it: dependencies, ")
