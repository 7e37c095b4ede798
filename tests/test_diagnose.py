"""The recorded incident is diagnosed to its numbers, an altered one to its own."""

# ruff: noqa: RUF001 - a minus is asserted as it is printed

import json
import math
from dataclasses import replace

import pytest

from db.diagnose import Status, diagnose
from tests.recordings import (
    PROBE,
    PROBE_POINT,
    SWEEP,
    case_of,
    claim_of,
    incident,
    kv_bytes,
    names,
)


@pytest.mark.parametrize(
    ("benchmark", "context", "gb_s", "ratio", "percent"),
    [(PROBE, 65536, 14.1, 128, 0.78), (SWEEP, 65536, 12.9, 140, 0.72)],
)
def test_the_incident_has_its_known_numbers(benchmark, context, gb_s, ratio, percent):
    case = case_of(diagnose(incident()), benchmark, context)

    assert round(case.effective_gb_s, 1) == gb_s
    assert round(case.kv_floor_ratio) == ratio
    assert round(100 * case.fraction_of_peak, 2) == percent
    assert case.kv_floor_ms == pytest.approx(2.5585, abs=1e-4)
    assert case.kv_floor_ratio == pytest.approx(case.time_ms * 1.8e12 / kv_bytes(context) / 1e3)
    assert case.floor_ratio == case.kv_floor_ratio
    assert case.floor_basis == "KV bytes alone against a datasheet peak"
    assert case.bound is None


def test_the_incidents_floor_says_what_it_leaves_out():
    found = diagnose(incident())

    distance = [c for c in found.claims if c.name == "distance_from_floor" and PROBE in c.case]
    partial = claim_of(found, "floor_is_partial")

    assert "327 ms is 128 times its KV-read floor of 2.56 ms" in distance[0].statement
    assert "datasheet" in distance[0].statement
    assert "14.1 GB/s, 0.78% of the datasheet peak, n = 49" in distance[0].evidence
    assert (distance[0].status, distance[0].is_alarm) == (Status.SUPPORTED, True)
    assert "KV bytes alone against a datasheet peak" in partial.statement
    assert "several times larger" in partial.statement
    assert partial.status is Status.UNTESTED
    assert partial.value == pytest.approx(200.1, abs=0.1)


def test_the_incidents_misleading_counters_are_named_with_their_definition():
    found = diagnose(incident())
    gpu, dram = claim_of(found, "gpu_utilization_misleads"), claim_of(found, "dram_idle")

    assert "utilization.gpu 99.8 % is no evidence of work" in gpu.statement
    assert "share of time in which some kernel was resident" in gpu.statement
    assert (gpu.value, gpu.unit, gpu.status) == (99.8, "%", Status.SUPPORTED)
    assert "133 W of 600 W" in gpu.evidence
    assert "utilization.memory 1.2 % says that DRAM was idle, not why" in dram.statement
    assert dram.value == 1.2


def test_the_incidents_starvation_is_consistent_and_untested():
    claim = claim_of(diagnose(incident()), "starvation")

    assert "consistent, untested on this card" in claim.statement
    assert claim.status is Status.CONSISTENT
    assert claim.value == pytest.approx(100 * 8 / 188)
    assert "8 programs on 188 SMs" in claim.evidence
    assert "power 133 W of 600 W" in claim.evidence
    assert "no GPM" in claim.evidence
    assert claim.evidence.endswith("1 of 6 cases agree")


def test_what_merely_agrees_is_told_once_for_the_case_with_most_counters():
    evidence = incident()
    points = [replace(point, programs=8, num_sms=188) for point in evidence.points]

    claim = claim_of(diagnose(replace(evidence, points=tuple(points))), "starvation")

    assert claim.case == PROBE_POINT.name
    assert claim.evidence.endswith("6 of 6 cases agree")


def test_a_lone_case_is_counted_as_one():
    alone = diagnose(replace(incident(), points=(PROBE_POINT,)))

    assert claim_of(alone, "starvation").evidence.endswith("1 of 1 case agrees")
    assert (
        claim_of(alone, "floor_is_partial").evidence == "1 of 1 case records no bytes but their KV"
    )
    assert claim_of(alone, "page_size").evidence == "page_size 1 recorded over 1 case"


def test_the_incidents_page_size_is_untested():
    claim = claim_of(diagnose(incident()), "page_size")

    assert "untested here, a single page size was measured" in claim.statement
    assert (claim.value, claim.status) == (1.0, Status.UNTESTED)
    assert "page_size 1 recorded" in claim.evidence


def test_the_incidents_line_over_context_is_refused_and_its_odd_points_named():
    found = diagnose(incident())
    fit, excess, suspect = (
        found.fit,
        claim_of(found, "excess_over_line"),
        claim_of(found, "suspect_point"),
    )

    assert fit.n_points == 5
    assert fit.refused.startswith("t0 < 0: a straight line through the 5 points begins at −78.7 ms")
    assert (fit.t0_ms, fit.bandwidth_gb_s) == (None, None)
    assert claim_of(found, "context_fit").value == pytest.approx(-78.75, abs=0.01)
    assert "1,430 ms at 189,440 tokens lies 1.4 times the line of the other 4" in excess.statement
    assert excess.value == pytest.approx(1.385, abs=1e-3)
    assert "8 ms at 1,024 tokens is suspect" in suspect.statement
    assert suspect.status is Status.UNTESTED
    assert "per token" not in suspect.statement


def test_a_commit_length_turns_the_doubt_into_a_time_per_token():
    evidence = incident()
    first = replace(evidence.points[0], commit_length=7.5)

    found = diagnose(replace(evidence, points=(first, *evidence.points[1:])))

    assert "60 ms a step of 7.5 tokens" in claim_of(found, "suspect_point").statement

    first = replace(first, commit_length=1.0)
    found = diagnose(replace(evidence, points=(first, *evidence.points[1:])))

    assert "per token" not in claim_of(found, "suspect_point").statement


def test_every_claim_of_the_incident_is_complete_and_strict_json():
    found = diagnose(incident())

    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))

    assert len(plain["cases"]) == 6
    assert plain["fit"]["refused"] == plain["fits"][0]["refused"] == found.fit.refused
    assert {c["status"] for c in plain["claims"]} == {"supported", "consistent", "untested"}
    for claim in found.claims:
        assert math.isfinite(claim.value)
        assert claim.unit
        assert claim.evidence
        assert claim.statement
        assert isinstance(claim.status, Status)


def test_an_altered_recording_gives_its_own_numbers():
    probe = replace(
        PROBE_POINT,
        time_s=0.2,
        programs=16,
        num_sms=100,
        counters={"utilization_gpu_pct": 97.0, "utilization_memory_pct": 4.0, "power_w": 90.0},
    )
    altered = {1024: 12, 32768: 70, 65536: 140, 131072: 300, 189440: 900}

    found = diagnose(replace(incident(altered, probe, peak=1.0e12), power_limit_w=300.0))

    case = case_of(found, PROBE, 65536)
    assert case.effective_gb_s == pytest.approx(kv_bytes(65536) / 0.2 / 1e9)
    assert case.kv_floor_ratio == pytest.approx(0.2 / (kv_bytes(65536) / 1.0e12))
    assert claim_of(found, "gpu_utilization_misleads").value == 97.0
    assert claim_of(found, "starvation").value == pytest.approx(16.0)
    assert "16 programs on 100 SMs, power 90 W of 300 W" in claim_of(found, "starvation").evidence
    assert "900 ms at 189,440" in claim_of(found, "excess_over_line").statement
    said = " ".join(f"{claim.statement} {claim.evidence}" for claim in found.claims)
    for constant in ("327 ms", "99.8", "133 W", "188 SMs", "600 W", "1430 ms", "1.8", "140 times"):
        assert constant not in said


def test_without_program_counts_low_power_still_agrees_with_starvation():
    claim = claim_of(diagnose(incident(probe=replace(PROBE_POINT, programs=None))), "starvation")

    assert claim.status is Status.CONSISTENT
    assert claim.value == pytest.approx(100 * 133 / 600)
    assert claim.unit == "% of the power limit"


def test_without_any_sign_nothing_is_said_of_starvation():
    probe = replace(PROBE_POINT, programs=None, counters={"utilization_gpu_pct": 99.8})

    assert "starvation" not in names(diagnose(incident(probe=probe)).claims)


def test_without_a_gpu_no_counter_is_read():
    found = diagnose(replace(incident(), gpu=None))

    assert names(found.claims).isdisjoint({"starvation", "gpu_utilization_misleads", "dram_idle"})
