"""What readings amount to, at the edges of every rule."""

from dataclasses import replace

import pytest

import db.counters
from benchmarks import _readings
from benchmarks._nvml import CAPPING_REASONS
from benchmarks._readings import LEAST_WINDOW_S, MAX_GAP_S, PERIOD_S, Ends, Reading, summarise

OWN = 41
ENDS = Ends(100.0, 101.0, 16, 500.0, 628.0, has_gpm=True, gpm={"gpm_sm_active_pct": 5.6})
GPM_CODES = [
    f"counter_unsupported:gpm_{name}_pct" for name in ("sm_occupancy", "dram_bandwidth", "tensor")
]
VALUES = {
    "utilization_gpu_pct": 98.0,
    "utilization_memory_pct": 1.0,
    "power_w": 128.0,
    "sm_clock_mhz": 1980.0,
    "memory_clock_mhz": 3201.0,
    "temperature_c": 32.0,
    "clock_event_reasons": 0.0,
}


def readings(*, first=99.0, last=101.5, pids=(OWN,), **changed):
    count = round((last - first) / PERIOD_S)
    values = VALUES | changed
    return [Reading(first + index * PERIOD_S, values, pids=pids) for index in range(count)]


def codes(found, ends=ENDS):
    """What is wrong beyond the GPM metrics that these ends lack."""
    return [code for code in summarise(found, ends, own_pid=OWN)[1] if code not in GPM_CODES]


def with_one(**changed):
    found = readings()
    found[len(found) // 2] = replace(found[len(found) // 2], values=VALUES | changed)
    return found


def test_only_what_was_read_within_the_window_counts():
    found = readings(first=99.0, last=100.0, power_w=700.0) + readings(first=100.0)

    counters, _ = summarise(found, ENDS, own_pid=OWN)

    assert (counters["power_w"].max, counters["energy_j"].median) == (128.0, 128.0)
    assert counters["power_w"].n == pytest.approx(1.0 / PERIOD_S, abs=1)


@pytest.mark.parametrize(
    ("length_s", "expected"),
    [(LEAST_WINDOW_S - 0.01, ["window_too_short"]), (LEAST_WINDOW_S + 0.01, [])],
)
def test_a_window_is_too_short_by_its_length(length_s, expected):
    assert codes(readings(), replace(ENDS, closed_s=100.0 + length_s)) == expected


@pytest.mark.parametrize("gap_s", [MAX_GAP_S - 0.06, MAX_GAP_S + 0.06])
@pytest.mark.parametrize("from_s", [99.9, 100.4, 101.0 - MAX_GAP_S - 0.06])
def test_a_gap_counts_from_the_opening_to_the_closing(from_s, gap_s):
    found = [one for one in readings() if not from_s < one.at_s < max(from_s, 100.0) + gap_s]

    assert codes(found) == (["sampling_gap"] if gap_s > MAX_GAP_S else [])


def test_a_sampler_that_read_nothing_left_a_gap():
    counters, _ = summarise([], ENDS, own_pid=OWN)

    assert codes([]) == ["sampling_gap"]
    assert set(counters) == {"energy_j", "energy_per_run_j", "gpm_sm_active_pct"}
    assert counters["energy_per_run_j"].median == counters["energy_j"].median / 16


@pytest.mark.parametrize("reasons", [0x4, 0x8, 0x20, 0x40, 0x80, 0x4 | 0x1])
def test_one_reading_of_a_capping_reason_is_a_throttled_window(reasons):
    assert codes(with_one(clock_event_reasons=float(reasons))) == ["throttled"]


@pytest.mark.parametrize("reasons", [0x1, 0x2, 0x10, 0x100])
def test_a_sleeping_or_chosen_clock_is_not_throttled(reasons):
    assert codes(with_one(clock_event_reasons=float(reasons))) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"sm_clock_mhz": 1965.0}, []),
        ({"sm_clock_mhz": 1935.0}, ["clock_moved"]),
        ({"memory_clock_mhz": 2619.0}, ["clock_moved"]),
    ],
)
def test_a_clock_moves_by_more_than_a_step(changed, expected):
    assert codes(with_one(**changed)) == expected


@pytest.mark.parametrize(
    ("pids", "expected"),
    [
        ((OWN,), []),
        ((), []),
        ((OWN, 7), ["other_process"]),
        ((3_000_000,), []),
        ((3_000_000, 7), ["other_process"]),
    ],
    ids=["alone", "none-listed", "beside-another", "alone-elsewhere", "elsewhere-beside-another"],
)
def test_another_process_is_told_from_ours_in_another_namespace(pids, expected):
    assert codes(readings(pids=pids)) == expected


@pytest.mark.parametrize(("active", "expected"), [(0.0, 0), (0.9, 0), (1.1, 2), (None, 2)])
def test_a_utilization_of_zero_wants_a_witness(active, expected):
    gpm = {} if active is None else {"gpm_sm_active_pct": active}
    found = readings(utilization_gpu_pct=0.0, utilization_memory_pct=0.0)

    unsupported = [code for code in codes(found, replace(ENDS, gpm=gpm)) if "utilization" in code]

    assert len(unsupported) == expected


@pytest.mark.parametrize(
    ("before_j", "after_j", "expected"),
    [
        (500.0, 500.0, []),
        (500.0, 499.9, ["counter_interrupted:energy_j"]),
        (500.0, None, ["counter_interrupted:energy_j"]),
        (None, None, ["counter_unsupported:energy_j"]),
    ],
)
def test_an_energy_counter_never_falls(before_j, after_j, expected):
    ends = replace(ENDS, energy_before_j=before_j, energy_after_j=after_j)

    assert codes(readings(), ends) == expected


def test_a_diagnosis_knows_the_codes_and_reasons_of_a_window():
    assert [code for code in db.counters.DOUBTS if f"`{code}`" not in _readings.__doc__] == []
    assert db.counters.CAPPING_REASONS == CAPPING_REASONS
