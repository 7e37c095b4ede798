"""What counters, rates and floors say of single cases measured on an H200."""

from dataclasses import replace

import pytest

from db.diagnose import Ceilings, Evidence, Status, diagnose
from tests.recordings import (
    COPY,
    LAYER_BYTES,
    MATMUL,
    SERIAL,
    SPLIT,
    claim_of,
    layer,
    names,
    on_h200,
)


def test_gpm_supports_the_starvation_of_the_serial_kernel():
    found = diagnose(on_h200(SERIAL))
    claim = claim_of(found, "starvation")

    assert (claim.status, claim.value, claim.unit) == (Status.SUPPORTED, 5.4, "% SM active")
    assert "94.6 % of the SM time" in claim.statement
    assert "GPM SM active 5.4 %" in claim.evidence
    assert found.cases[0].bound == "too little parallelism"
    assert claim_of(found, "gpu_utilization_misleads").value == 100
    assert claim_of(found, "dram_idle").value == 0


def test_a_kernel_whose_sms_work_is_not_called_starved():
    found = diagnose(on_h200(SPLIT))

    assert names(found.claims).isdisjoint({"starvation", "gpu_utilization_misleads", "dram_idle"})
    assert found.cases[0].bound is None


@pytest.mark.parametrize(
    ("point", "bound", "value"),
    [(COPY, "bandwidth", 93.4), (MATMUL, "compute", 89.0)],
    ids=["copy", "matmul"],
)
def test_a_healthy_case_raises_no_alarm_and_names_its_bound(point, bound, value):
    found = diagnose(on_h200(point))

    assert found.alarms == ()
    assert found.cases[0].bound == bound
    assert claim_of(found, "bound_by").statement.startswith(f"bound by {bound}: ")
    assert claim_of(found, "bound_by").value == pytest.approx(value, abs=0.1)


@pytest.mark.parametrize(
    ("point", "bound"), [(COPY, "bandwidth"), (MATMUL, "compute")], ids=["copy", "matmul"]
)
def test_rates_name_the_bound_without_any_counter(point, bound):
    found = diagnose(on_h200(replace(point, counters={})))

    assert found.cases[0].bound == bound


def test_memory_traffic_of_a_reset_does_not_bound_the_case():
    body = replace(SPLIT, bytes=10**6, counters=SPLIT.counters | {"gpm_dram_bandwidth_pct": 65.0})

    alone = diagnose(on_h200(body))
    mixed = diagnose(on_h200(replace(body, validity=("reset_in_window",))))

    assert alone.cases[0].bound == "bandwidth"
    assert mixed.cases[0].bound is None


def test_a_gpu_that_waits_for_its_host_is_bound_by_launches():
    found = diagnose(on_h200(layer(300, (30, 5, 140, 12, 4, 6), programs=4000)))

    assert found.cases[0].bound == "launches"
    assert claim_of(found, "bound_by").value == 30


def test_the_floor_is_the_larger_of_bytes_and_flop():
    few, many = COPY, replace(COPY, flops=10**12)

    by_bytes, by_flop = diagnose(on_h200(few)).cases[0], diagnose(on_h200(many)).cases[0]

    assert by_bytes.floor_ms == pytest.approx((LAYER_BYTES + 10**6) / 4.55e12 * 1e3)
    assert by_bytes.kv_floor_ms == pytest.approx(LAYER_BYTES / 4.55e12 * 1e3)
    assert by_bytes.floor_basis == "all bytes against a measured peak"
    assert by_flop.floor_ms == pytest.approx(1e12 / 790e12 * 1e3)
    assert by_flop.floor_basis == "FLOP against a measured peak"


def test_bytes_that_are_all_kv_are_called_so():
    found = diagnose(on_h200(replace(COPY, bytes=LAYER_BYTES)))

    assert found.cases[0].bytes_basis == "KV bytes alone"
    assert "1 of 1 case " in claim_of(found, "floor_is_partial").evidence


def test_a_time_under_its_floor_is_doubted():
    found = diagnose(on_h200(replace(COPY, time_s=10e-6)))

    claim = claim_of(found, "under_the_floor")

    assert claim.value == pytest.approx(10e-6 * 4.55e12 / (LAYER_BYTES + 10**6))
    assert claim.is_alarm
    assert "under its floor" in claim.statement


def test_a_held_down_clock_is_told_and_a_sleeping_one_is_not():
    idle = replace(MATMUL, counters={**MATMUL.counters, "clock_event_reasons": 1.0})

    claim = claim_of(diagnose(on_h200(MATMUL)), "clock_capped")

    assert (claim.value, claim.evidence) == (1485.0, "clocks event reasons 0x4")
    assert "clock_capped" not in names(diagnose(on_h200(idle)).claims)


def test_stage_shares_add_up_and_the_largest_is_named():
    stages = {"draft": 0.001, "build": 0.0005, "verify": 0.008, "commit": 0.0005}
    found = diagnose(on_h200(replace(COPY, stage_seconds=stages)))
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
