"""Two recorded quick runs of one commit say how far runs lie apart and what the incident looks like."""

import json
from pathlib import Path

import pytest

import benchmarks
from benchmarks._run_spread import newest_pair, read

TELEMETRY = Path(benchmarks.__file__).parent / "recorded" / "h200-quick" / "telemetry"
SERIAL, SPLIT = "triton_serial", "triton_split"


@pytest.fixture(scope="module")
def lines():
    files = sorted(TELEMETRY.glob("*.jsonl"))
    return [json.loads(text) for file in files for text in file.read_text().splitlines()]


def counters_of(lines, benchmark, *params):
    """Medians of the counters of a case's windows, the sound ones of both runs."""
    mine = [
        {name: one["median"] for name, one in line["counters"].items() if "median" in one}
        for line in lines
        if line["benchmark"] == benchmark and line["params"][: len(params)] == list(params)
    ]
    found = [one for one in mine if "utilization_gpu_pct" in one]
    assert found
    return found


def test_the_serial_walk_of_64k_looks_busy_and_is_idle(lines):
    for one in counters_of(lines, "attention.TreeAttention.time_cold", "65536", f"'{SERIAL}'"):
        assert one["utilization_gpu_pct"] >= 99
        assert one["power_w"] <= 0.25 * 700
        assert one["gpm_sm_active_pct"] <= 8
    for one in counters_of(lines, "attention.TreeAttention.time_cold", "65536", f"'{SPLIT}'"):
        assert one["utilization_gpu_pct"] >= 99
        assert one["gpm_sm_active_pct"] > 80


def test_two_runs_of_one_commit_have_the_same_cases_and_a_naive_threshold_flags_six(lines):
    found = newest_pair(read([TELEMETRY]))

    assert len(found.cases) == len({(line["benchmark"], *line["params"]) for line in lines}) == 25
    assert found.num_flagged == 6
    assert found.median_rel < 0.01
