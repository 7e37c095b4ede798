"""What the recorded steps of a rank are said to show."""

import json
from pathlib import Path

import pytest

import benchmarks

RECORDED = Path(benchmarks.__file__).parent / "recorded" / "h200-rank"


def rows(name):
    return json.loads((RECORDED / name).read_text())["rows"]


def steps_of(name):
    return {(row["context"], row["backend"]): row for row in rows(name)}


def test_the_serial_walk_makes_a_step_of_long_contexts_the_incident_and_cuda_undoes_it():
    steps, earlier = steps_of("rank.json"), steps_of("rank-launched.json")

    for which, context, times in ((steps, 65536, 50), (steps, 131072, 88), (earlier, 189440, 110)):
        slow, fast = which[context, "triton_serial"], which[context, "cuda"]
        assert slow["step_s"] > times * fast["step_s"]
        assert slow["stages_s"]["verify"] > 0.99 * slow["step_s"]
    for which in (steps, earlier):
        assert {context for context, _ in which} == {1024, 8192, 32768, 65536, 131072, 189440}


def test_a_step_whose_rows_choose_apart_is_within_twice_what_its_bytes_cost():
    steps = steps_of("rank.json")
    before = steps_of("rank-before.json")[65536, "cuda"]

    assert all(64 < row["experts_hit"] < 68 for row in (*steps.values(), before))
    over = {
        context: row["step_s"] / row["floor_s"]
        for (context, name), row in steps.items()
        if name == "cuda"
    }
    assert all(over[context] < 2 for context in (8192, 65536, 131072, 189440))
    assert all(over[context] < 2.03 for context in (1024, 32768))
    assert before["step_s"] > 2.1 * before["floor_s"]


def test_replayed_trees_leave_the_device_hardly_a_moment():
    before, after = (steps_of(name) for name in ("rank-launched.json", "rank-replayed.json"))

    assert all(row["step_s"] < before[case]["step_s"] for case, row in after.items())
    row = after[65536, "cuda"]
    assert row["stages_s"]["build"] + row["stages_s"]["commit"] < 0.5e-3
    assert row["work"]["launches"] == 6
    assert row["work"]["busy_s"] > 0.95 * row["step_s"]


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.glob("rank*.json")))
def test_times_and_floors_are_those_of_the_stages(name):
    for row in rows(name):
        times = sorted(row["step_times_s"])
        assert row["step_s"] == times[len(times) // 2]
        assert row["floor_s"] == pytest.approx(sum(row["floors_s"].values()))


def test_experts_read_at_more_than_half_the_rate_at_few_tokens():
    shares = {(row["num_tokens"], row["backend"]): row["read_share"] for row in rows("moe.json")}

    assert all(shares[tokens, "cuda"] > 0.55 for tokens in (9, 17, 33, 65))
    assert all(shares[tokens, "cuda"] > 2 * shares[tokens, "triton"] for tokens in (1, 9, 65, 1024))
