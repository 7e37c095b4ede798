"""The recorded incident says what the report said, nothing more, in files that asv itself reads."""

import hashlib
import json
from pathlib import Path

import pytest
from asv.benchmarks import Benchmarks
from asv.config import Config
from asv.results import iter_results

INCIDENT = Path(__file__).parent.parent / "benchmarks" / "recorded" / "original-incident"
SWEEP_MS = {1024: 8, 32768: 159, 65536: 357, 131072: 714, 189440: 1430}


@pytest.fixture
def lines():
    text = (INCIDENT / "telemetry" / "original-incident.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def result():
    (result,) = iter_results(str(INCIDENT))
    return result


def test_asv_reads_the_tree(result):
    config = Config()
    config.results_dir = str(INCIDENT)
    known = Benchmarks.load(config)
    sweep = known["incident.Sweep.time_step"]

    assert sorted(known) == ["incident.Probe.time_step", "incident.Sweep.time_step"]
    values = result.get_result_value(sweep["name"], sweep["params"])
    assert values == [ms / 1e3 for ms in SWEEP_MS.values()]
    assert sweep["params"] == [[str(context) for context in SWEEP_MS], ["1"]]
    assert result.get_result_value("incident.Probe.time_step", [["65536"], ["1"]]) == [0.327]


def test_nothing_was_invented(result, lines):
    for name in result.get_all_result_keys():
        params = result.get_result_params(name)
        assert result.get_result_samples(name, params) == [None] * len(params[0])
        assert result.get_result_stats(name, params) == [{"number": 1, "repeat": 1}] * len(
            params[0]
        )
    for line in lines:
        assert (line["n"], line["samples_s"], line["timer"]) == (1, [], "external")
        assert (line["bytes"], line["flops"], line["stage_seconds"]) == (None, None, None)
        assert "single_sample" in line["validity"]
        for counter in line["counters"].values():
            assert (counter["min"], counter["max"], counter["n"]) == (None, None, None)


def test_the_commit_is_marked_as_made_up(result, lines):
    for line in lines:
        provenance = line["provenance"]
        digest = hashlib.sha1(provenance["source"].encode(), usedforsecurity=False).hexdigest()
        assert (provenance["external"], line["commit"]) == (True, digest)
    assert result.commit_hash == lines[0]["commit"]


def test_the_sidecar_holds_the_cases_of_the_results(lines):
    cases = {(line["benchmark"], line["context_tokens"]): line["median_s"] for line in lines}

    assert cases == {
        ("incident.Probe.time_step", 65536): 0.327,
        **{("incident.Sweep.time_step", context): ms / 1e3 for context, ms in SWEEP_MS.items()},
    }
    assert all(line["params"] == [str(line["context_tokens"]), "1"] for line in lines)


def test_the_probe_gives_the_reported_rate_and_distance(lines):
    (probe,) = (line for line in lines if line["benchmark"] == "incident.Probe.time_step")
    floor_s = probe["kv_bytes"] / probe["ceilings"]["read_bytes_per_s"]

    assert probe["kv_bytes"] == 61 * 576 * 2 * 65536
    assert probe["kv_bytes"] / probe["median_s"] / 1e9 == pytest.approx(14.1, abs=0.05)
    assert probe["median_s"] / floor_s == pytest.approx(127.8, abs=0.05)
    assert (probe["programs"], probe["device"]["num_sms"]) == (8, 188)
    assert {name: counter["median"] for name, counter in probe["counters"].items()} == {
        "utilization_gpu_pct": 99.8,
        "utilization_memory_pct": 1.2,
        "power_w": 133.0,
        "sm_clock_mhz": 2359.0,
    }
