"""Diagnoses: the recorded incident to its numbers, altered ones to theirs, and healthy cases."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from db.diagnose import Ceilings, Evidence, EvidencePoint, Status, diagnose
from db.line_fit import fit_line, off_the_line

LAYERS, ROW_BYTES = 61, 576 * 2
SWEEP_MS = {1024: 8, 32768: 159, 65536: 357, 131072: 714, 189440: 1430}
SWEEP, PROBE = "incident.Sweep.time_step", "incident.Probe.time_step"


def kv_bytes(context):
    return LAYERS * ROW_BYTES * context


def sweep_point(context, time_ms, **changes):
    params = changes.pop("params", f"context={context}, page_size=1")
    return EvidencePoint(
        SWEEP, params, context, time_ms / 1e3, 1, kv_bytes=kv_bytes(context), **changes
    )


PROBE_POINT = EvidencePoint(
    PROBE,
    "context=65536, page_size=1",
    65536,
    0.327,
    49,
    kv_bytes=kv_bytes(65536),
    commit_length=1.0,
    programs=8,
    num_sms=188,
    counters={
        "utilization_gpu_pct": 99.8,
        "utilization_memory_pct": 1.2,
        "power_w": 133.0,
        "sm_clock_mhz": 2359.0,
    },
)


def incident(sweep_ms=None, probe=PROBE_POINT, peak=1.8e12):
    points = [sweep_point(*pair) for pair in (sweep_ms or SWEEP_MS).items()]
    return Evidence(
        label="incident",
        gpu="RTX PRO 6000 Blackwell",
        ceilings=Ceilings(read_bytes_per_s=peak),
        peak_source="datasheet",
        points=(*points, probe),
        power_limit_w=600.0,
    )


def case_of(diagnosis, benchmark, context):
    return next(
        case
        for case in diagnosis.cases
        if (case.benchmark, case.context_tokens) == (benchmark, context)
    )


def claim_of(diagnosis, name):
    found = [claim for claim in diagnosis.claims if claim.name == name]
    assert len(found) == 1, [claim.name for claim in diagnosis.claims]
    return found[0]


def names(claims):
    return {claim.name for claim in claims}


# --- the incident ----------------------------------------------------------------------------


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
    assert fit.refused.startswith("t0 < 0: a straight line through the 5 points begins at -78.7 ms")
    assert (fit.t0_ms, fit.bandwidth_gb_s) == (None, None)
    assert claim_of(found, "context_fit").value == pytest.approx(-78.75, abs=0.01)
    assert "1430 ms at 189,440 tokens lies 1.4 times the line of the other 4" in excess.statement
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


# --- measured counters of an H200 (measurements of one layer at 64k) -------------------------

H200 = Ceilings(read_bytes_per_s=4.55e12, matmul_flops_per_s=790e12, dtype="bf16")
LAYER_BYTES = 65536 * ROW_BYTES


def h200(*points):
    return Evidence("h200", "NVIDIA H200", H200, "measured", points, 700.0)


def layer(time_us, counters, **changes):
    fields = {
        "benchmark": "attention.Tree.time_layer",
        "params": "context=65536, page_size=1",
        "context_tokens": 65536,
        "time_s": time_us / 1e6,
        "n": 20,
        "bytes": LAYER_BYTES + 10**6,
        "kv_bytes": LAYER_BYTES,
        "flops": 2 * 72 * 65536 * (576 + 512),
        "programs": 8,
        "num_sms": 132,
        "counters": dict(
            zip(
                (
                    "utilization_gpu_pct",
                    "utilization_memory_pct",
                    "power_w",
                    "gpm_sm_active_pct",
                    "gpm_dram_bandwidth_pct",
                    "gpm_tensor_pct",
                ),
                counters,
                strict=True,
            )
        ),
    }
    return EvidencePoint(**{**fields, **changes})


SERIAL = layer(7173, (100, 0, 131, 5.4, 0.22, 0.36))
SPLIT = layer(101.5, (99, 25, 501, 81, 18, 29), programs=66)
COPY = layer(18.0, (100, 100, 615, 98, 86, 0.5), programs=1000)
MATMUL = EvidencePoint(
    "ceiling.Matmul.time_burst",
    "size=8192",
    None,
    1.644e-3,
    20,
    bytes=3 * 8192**2 * 2,
    flops=2 * 8192**3,
    counters={
        "utilization_gpu_pct": 100.0,
        "utilization_memory_pct": 23.0,
        "power_w": 693.0,
        "sm_clock_mhz": 1485.0,
        "clock_event_reasons": 4.0,
        "gpm_sm_active_pct": 91.0,
        "gpm_tensor_pct": 89.0,
    },
)


def test_gpm_supports_the_starvation_of_the_serial_kernel():
    found = diagnose(h200(SERIAL))
    claim = claim_of(found, "starvation")

    assert (claim.status, claim.value, claim.unit) == (Status.SUPPORTED, 5.4, "% SM active")
    assert "94.6 % of the SM time" in claim.statement
    assert "GPM SM active 5.4 %" in claim.evidence
    assert found.cases[0].bound == "too little parallelism"
    assert claim_of(found, "gpu_utilization_misleads").value == 100
    assert claim_of(found, "dram_idle").value == 0


def test_a_kernel_whose_sms_work_is_not_called_starved():
    found = diagnose(h200(SPLIT))

    assert names(found.claims).isdisjoint({"starvation", "gpu_utilization_misleads", "dram_idle"})
    assert found.cases[0].bound is None


@pytest.mark.parametrize(
    ("point", "bound", "value"),
    [(COPY, "bandwidth", 93.4), (MATMUL, "compute", 89.0)],
    ids=["copy", "matmul"],
)
def test_a_healthy_case_raises_no_alarm_and_names_its_bound(point, bound, value):
    found = diagnose(h200(point))

    assert found.alarms == ()
    assert found.cases[0].bound == bound
    assert claim_of(found, "bound_by").statement.startswith(f"bound by {bound}: ")
    assert claim_of(found, "bound_by").value == pytest.approx(value, abs=0.1)


@pytest.mark.parametrize(
    ("point", "bound"), [(COPY, "bandwidth"), (MATMUL, "compute")], ids=["copy", "matmul"]
)
def test_rates_name_the_bound_without_any_counter(point, bound):
    found = diagnose(h200(replace(point, counters={})))

    assert found.cases[0].bound == bound


def test_a_gpu_that_waits_for_its_host_is_bound_by_launches():
    found = diagnose(h200(layer(300, (30, 5, 140, 12, 4, 6), programs=4000)))

    assert found.cases[0].bound == "launches"
    assert claim_of(found, "bound_by").value == 30


def test_the_floor_is_the_larger_of_bytes_and_flop():
    few, many = COPY, replace(COPY, flops=10**12)

    by_bytes, by_flop = diagnose(h200(few)).cases[0], diagnose(h200(many)).cases[0]

    assert by_bytes.floor_ms == pytest.approx((LAYER_BYTES + 10**6) / 4.55e12 * 1e3)
    assert by_bytes.kv_floor_ms == pytest.approx(LAYER_BYTES / 4.55e12 * 1e3)
    assert by_bytes.floor_basis == "all bytes against a measured peak"
    assert by_flop.floor_ms == pytest.approx(1e12 / 790e12 * 1e3)
    assert by_flop.floor_basis == "FLOP against a measured peak"


def test_bytes_that_are_all_kv_are_called_so():
    found = diagnose(h200(replace(COPY, bytes=LAYER_BYTES)))

    assert found.cases[0].bytes_basis == "KV bytes alone"
    assert "1 of 1 cases" in claim_of(found, "floor_is_partial").evidence


def test_a_time_under_its_floor_is_doubted():
    found = diagnose(h200(replace(COPY, time_s=10e-6)))

    claim = claim_of(found, "under_the_floor")

    assert claim.value == pytest.approx(10e-6 * 4.55e12 / (LAYER_BYTES + 10**6))
    assert claim.is_alarm
    assert "under its floor" in claim.statement


def test_a_held_down_clock_is_told_and_a_sleeping_one_is_not():
    idle = replace(MATMUL, counters={**MATMUL.counters, "clock_event_reasons": 1.0})

    claim = claim_of(diagnose(h200(MATMUL)), "clock_capped")

    assert (claim.value, claim.evidence) == (1485.0, "clocks event reasons 0x4")
    assert "clock_capped" not in names(diagnose(h200(idle)).claims)


def test_stage_shares_add_up_and_the_largest_is_named():
    stages = {"draft": 0.001, "build": 0.0005, "verify": 0.008, "commit": 0.0005}
    found = diagnose(h200(replace(COPY, stage_seconds=stages)))
    claim = claim_of(found, "largest_stage")

    assert found.cases[0].stage_shares["verify"] == pytest.approx(0.8)
    assert sum(found.cases[0].stage_shares.values()) == pytest.approx(1.0)
    assert claim.statement == "verify takes 80% of the step"
    assert "draft 1 ms" in claim.evidence


def test_without_ceilings_there_is_no_floor_and_no_alarm():
    found = diagnose(Evidence("bare", "GPU", Ceilings(), None, (SPLIT,)))

    assert found.cases[0].floor_ms is None
    assert found.cases[0].kv_floor_ratio is None
    assert found.cases[0].effective_gb_s == pytest.approx((LAYER_BYTES + 10**6) / 101.5e-6 / 1e9)
    assert found.alarms == ()


# --- one factor over several cases -----------------------------------------------------------


@pytest.mark.parametrize(
    ("slow_us", "matters", "word"), [(7250, False, "is not the cause"), (12000, True, "matters")]
)
def test_a_varied_page_size_is_judged_by_what_it_is_worth(slow_us, matters, word):
    other = replace(SERIAL, params="context=65536, page_size=64", time_s=slow_us / 1e6)

    claim = claim_of(diagnose(h200(SERIAL, other)), "page_size")

    assert claim.status is Status.SUPPORTED
    assert claim.value == pytest.approx(slow_us / 7173)
    assert claim.is_alarm is matters
    assert word in claim.statement


def test_page_sizes_at_different_contexts_test_nothing():
    other = replace(
        SERIAL, params="context=32768, page_size=64", context_tokens=32768, time_s=3.6e-3
    )

    claim = claim_of(diagnose(h200(SERIAL, other)), "page_size")

    assert (claim.status, claim.value) == (Status.UNTESTED, 2.0)
    assert "it was not varied alone" in claim.statement


def test_a_fast_case_needs_no_word_on_page_size():
    assert "page_size" not in names(diagnose(h200(COPY)).claims)


SPLIT_US = {32768: 65.4, 65536: 101.5, 131072: 170.4, 189440: 224.6}
SERIAL_US = {32768: 3595, 65536: 7173, 131072: 14336, 189440: 20726}


def fitted(times_us):
    contexts = np.array(list(times_us), dtype=float)
    return fit_line("layer", contexts * ROW_BYTES, np.array(list(times_us.values())) / 1e6)


def test_measured_kernels_are_fitted_with_their_intervals():
    split, serial = fitted(SPLIT_US), fitted(SERIAL_US)

    assert split.refused is None
    assert split.n_points == 4
    assert split.t0_ms == pytest.approx(0.032, abs=0.001)
    assert split.t0_low_ms < split.t0_ms < split.t0_high_ms
    assert split.bandwidth_low_gb_s < split.bandwidth_gb_s < split.bandwidth_high_gb_s
    assert split.bandwidth_gb_s == pytest.approx(1110, rel=0.02)
    assert serial.refused is None
    assert serial.bandwidth_gb_s == pytest.approx(10.5, rel=0.01)


def test_a_line_through_good_data_is_a_claim_and_no_alarm():
    points = [
        layer(
            us,
            (99, 25, 501, 81, 18, 29),
            params=f"context={c}, page_size=16",
            context_tokens=c,
            kv_bytes=c * ROW_BYTES,
            bytes=c * ROW_BYTES + 10**5,
        )
        for c, us in SPLIT_US.items()
    ]

    found = diagnose(h200(*points))

    assert found.fit.label == "attention.Tree.time_layer(page_size=16)"
    assert "do not grow with context" in claim_of(found, "context_fit").statement
    assert names(found.claims).isdisjoint({"excess_over_line", "suspect_point"})


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 1.0), st.floats(1e9, 5e12), st.integers(4, 9))
def test_an_exact_line_is_recovered_whatever_its_numbers(t0_ms, bandwidth, n):
    num_bytes = np.geomspace(1e7, 2e9, n)

    fit = fit_line("exact", num_bytes, t0_ms / 1e3 + num_bytes / bandwidth)

    assert fit.refused is None
    assert fit.t0_ms == pytest.approx(t0_ms, abs=1e-6 + 1e-6 * 1e10 / bandwidth)
    assert fit.bandwidth_gb_s == pytest.approx(bandwidth / 1e9, rel=1e-6)


def test_intervals_of_noisy_lines_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    num_bytes = np.array([1, 32, 64, 128, 185]) * 1e6
    covered, fitted_lines = np.zeros(2), 0
    for _ in range(800):
        times = (20e-6 + num_bytes / 2e12) * (1 + 0.01 * rng.standard_normal(5))
        fit = fit_line("noisy", num_bytes, times)
        if fit.refused is None:
            fitted_lines += 1
            covered += [
                fit.t0_low_ms <= 0.02 <= fit.t0_high_ms,
                fit.bandwidth_low_gb_s <= 2000 <= (fit.bandwidth_high_gb_s or math.inf),
            ]

    assert fitted_lines >= 790
    assert (covered / fitted_lines >= 0.935).all()
    assert (covered / fitted_lines <= 0.97).all()


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ([1.0, 2.0, 3.0], "expected 4 contexts or more, got 3"),
        ([9.0, 8.0, 7.0, 6.0], "does not grow"),
        ([1.5, 2.5, 4.5, 8.5, 16.5], None),
        ([0.5, 1.5, 3.5, 7.5, 15.5], "t0 < 0"),
        ([1.0, 1.5, 2.5, 6.5, 40.0], "t0 < 0"),
        ([4.0, 4.5, 5.6, 8.4, 16.8], "the points bend"),
        ([4.0, 9.0, 6.0, 10.0, 18.0], "off the best line"),
    ],
)
def test_a_line_is_refused_where_it_does_not_fit(times, reason):
    num_bytes = 2.0 ** np.arange(len(times)) * 1e8

    fit = fit_line("shape", num_bytes, np.array(times))

    assert (fit.refused is None) == (reason is None)
    assert reason is None or reason in fit.refused


def test_one_point_off_the_line_is_found_wherever_it_lies():
    num_bytes = np.array([1.0, 2.0, 3.0, 5.0, 8.0]) * 1e8
    line = 1e-3 + num_bytes / 1e11

    for index in range(5):
        times = line.copy()
        times[index] *= 1.5
        off = off_the_line(num_bytes, times)

        assert off.index == index
        assert off.ratio == pytest.approx(1.5)
    assert off_the_line(num_bytes, line) is None
    assert off_the_line(num_bytes, line * [1.0, 1.1, 0.9, 1.1, 0.9]) is None


def test_only_cases_that_differ_in_context_alone_share_a_line():
    points = [
        sweep_point(c, ms * factor, params=f"context={c}, page_size={page}")
        for page, factor in ((1, 1.0), (64, 0.5))
        for c, ms in SWEEP_MS.items()
    ]

    found = diagnose(replace(incident(), points=tuple(points)))

    assert [fit.label for fit in found.fits] == [f"{SWEEP}(page_size=1)", f"{SWEEP}(page_size=64)"]
    assert {fit.n_points for fit in found.fits} == {5}


def test_cases_without_a_time_or_bytes_are_no_trouble():
    bare = EvidencePoint("tree.Tree.time_build", "", None, 0.001, 3)

    found = diagnose(replace(incident(), points=(bare, replace(bare, time_s=0.0))))

    assert len(found.cases) == 1
    assert (found.cases[0].effective_gb_s, found.cases[0].floor_ratio) == (None, None)
    assert found.claims == ()
    assert found.fit is None
