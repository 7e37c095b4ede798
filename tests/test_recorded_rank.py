"""What the recorded steps of a rank are said to show."""

import json
from pathlib import Path

import pytest

import benchmarks

RECORDED = Path(benchmarks.__file__).parent / "recorded" / "h200-rank"


def rows(name):
    return json.loads((RECORDED / name).read_text())["rows"]


def test_the_serial_walk_makes_a_step_of_64k_the_incident_and_its_undoing_is_within_twice_the_floor():
    steps = {(row["context"], row["backend"]): row for row in rows("rank.json")}
    (alone,) = rows("rank-64k-alone.json")

    slow, fast = steps[65536, "triton_serial"], steps[65536, "cuda"]
    assert slow["step_s"] > 30 * fast["step_s"]
    assert slow["stages_s"]["verify"] > 0.98 * slow["step_s"]
    assert alone["step_s"] <= 2 * alone["floor_s"]


@pytest.mark.parametrize("name", ["rank.json", "rank-64k-alone.json"])
def test_times_and_floors_are_those_of_the_stages(name):
    for row in rows(name):
        times = sorted(row["step_times_s"])
        assert row["step_s"] == times[len(times) // 2]
        assert row["floor_s"] == pytest.approx(sum(row["floors_s"].values()))


def test_experts_read_at_more_than_half_the_rate_at_few_tokens():
    shares = {(row["num_tokens"], row["backend"]): row["read_share"] for row in rows("moe.json")}

    assert all(shares[tokens, "cuda"] > 0.55 for tokens in (9, 17, 33, 65))
    assert all(shares[tokens, "cuda"] > 2 * shares[tokens, "triton"] for tokens in (1, 9, 65, 1024))
