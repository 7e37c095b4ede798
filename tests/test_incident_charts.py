"""The incident's rows and pictures: floors, ratios, counters and what each of them can say."""

# ruff: noqa: RUF001 - factors are printed with their sign

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import vl_convert

from dashboard import incident_charts
from dashboard.incident_frames import cases_over_context, counter_readings, telling_cases
from db.diagnose import Ceilings, Evidence, EvidencePoint, diagnose

KV_ROW_BYTES = 61 * 576 * 2


def spec_of(chart: Any) -> dict[str, Any]:
    return chart.to_dict()


def layers_of(spec: dict[str, Any], mark: str) -> list[dict[str, Any]]:
    return [layer for layer in spec["layer"] if layer["mark"]["type"] == mark]


def svg_of(chart: Any) -> str:
    return vl_convert.vegalite_to_svg(chart.to_dict())


def point(name: str, context: int, time_s: float, **more: Any) -> EvidencePoint:
    return EvidencePoint(
        benchmark=name,
        params=f"context={context}, page_size=1",
        context_tokens=context,
        time_s=time_s,
        n=1,
        bytes=context * KV_ROW_BYTES,
        kv_bytes=context * KV_ROW_BYTES,
        **more,
    )


@pytest.fixture
def evidence() -> Evidence:
    return Evidence(
        label="the report",
        gpu="NVIDIA RTX PRO 6000 Blackwell",
        ceilings=Ceilings(read_bytes_per_s=1.8e12),
        peak_source="datasheet",
        points=(
            point("step.Sweep.time_step", 131072, 0.714),
            point("step.Sweep.time_step", 65536, 0.357),
            point(
                "step.Probe.time_step",
                65536,
                0.327,
                counters={
                    "utilization_gpu_pct": 99.8,
                    "utilization_memory_pct": 1.2,
                    "power_w": 133,
                },
            ),
        ),
        power_limit_w=600.0,
    )


def test_cases_stand_by_series_and_context_with_the_floors_of_the_diagnosis(evidence):
    frame = cases_over_context(diagnose(evidence), only_kv=True)

    assert frame["series"].tolist() == [
        "step.Probe.time_step · page_size=1",
        "step.Sweep.time_step · page_size=1",
        "step.Sweep.time_step · page_size=1",
    ]
    assert frame["context_tokens"].tolist() == [65536, 65536, 131072]
    assert frame["floor_ms"].tolist() == pytest.approx([2.56, 2.56, 5.12], rel=1e-3)
    assert frame["ratio_text"].tolist() == ["128×", "140×", "140×"]


def test_the_whole_floor_counts_more_than_the_kv_bytes():
    weights = point("step.Step.time_step", 65536, 0.357)
    heavy = replace(weights, bytes=2 * weights.kv_bytes)
    run = Evidence("a run", "GPU", Ceilings(read_bytes_per_s=1.8e12), "measured", (heavy,))

    whole = cases_over_context(diagnose(run))
    kv_alone = cases_over_context(diagnose(run), only_kv=True)

    assert whole["floor_ms"].tolist() == pytest.approx([5.12], rel=1e-3)
    assert kv_alone["floor_ms"].tolist() == pytest.approx([2.56], rel=1e-3)


def test_one_benchmark_is_named_by_its_parameters_alone(evidence):
    frame = cases_over_context(diagnose(evidence), prefix="step.Sweep")

    assert set(frame["series"]) == {"page_size=1"}


def test_the_case_with_counters_tells_the_most(evidence):
    (first, case), (second, _) = telling_cases(evidence, diagnose(evidence))

    assert case.benchmark == "step.Probe.time_step"
    assert len(first.counters) == 3
    assert not second.counters


def test_counters_are_shares_and_only_util_gpu_misleads(evidence):
    ((told, case), *_) = telling_cases(evidence, diagnose(evidence))

    readings = counter_readings(told, case, evidence.power_limit_w).set_index("counter")

    assert readings.index[readings["role"] == "misleads"].tolist() == ["util.gpu"]
    assert readings.loc["power", "share_pct"] == pytest.approx(22.2, abs=0.05)
    assert readings.loc["power", "text"] == "133 W of 600 W"
    assert readings.loc["bytes it had to read", "text"] == "14.1 GB/s, 0.78 % of peak"


def test_power_without_a_limit_is_no_share(evidence):
    ((told, case), *_) = telling_cases(evidence, diagnose(evidence))

    assert "power" not in counter_readings(told, case, None)["counter"].tolist()


def incident_frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "context_tokens": [32768, 65536, 131072, 65536],
            "time_ms": [159.0, 357.0, 714.0, 327.0],
            "floor_ms": [1.28, 2.56, 5.12, 2.56],
            "ratio_text": ["124×", "140×", "140×", "128×"],
            "n": [1, 1, 1, 49],
            "series": ["sweep"] * 3 + ["probe"],
        }
    )


def test_times_stand_above_their_floors_on_two_log_axes():
    chart = incident_charts.times_over_context(incident_frame(), floor_name="KV-read floor")

    spec, svg = spec_of(chart), svg_of(chart)
    dots = layers_of(spec, "point")[0]["encoding"]
    assert dots["x"]["scale"]["type"] == dots["y"]["scale"]["type"] == "log"
    for text in ("128×", "140×", "64k", "KV-read floor", "sweep", "probe"):
        assert text in svg


def test_a_ratio_beside_its_floor_is_written_below_the_floor():
    frame = pd.DataFrame(
        {
            "context_tokens": [1024, 1024, 65536, 65536],
            "time_ms": [8.0, 0.8, 357.0, 5.0],
            "floor_ms": [0.04, 0.04, 2.56, 2.56],
            "ratio_text": ["200×", "20×", "139×", "1.95×"],
            "n": [1] * 4,
            "series": ["slow", "fast"] * 2,
        }
    )

    spec = spec_of(incident_charts.times_over_context(frame, floor_name="floor"))

    below = next(one for one in layers_of(spec, "text") if one["mark"].get("dy") == 16)
    field = below["encoding"]["y"]["field"]
    rows = next(rows for rows in spec["datasets"].values() if len(rows) == 4 and field in rows[0])
    assert [row[field] for row in rows] == [8.0, 0.8, 357.0, 2.56]


@pytest.mark.parametrize("floor_ms", [0.0, np.nan])
def test_a_context_without_rows_has_its_ratio_below_its_time(floor_ms):
    frame = incident_frame().assign(floor_ms=floor_ms)

    spec = spec_of(incident_charts.times_over_context(frame, floor_name="floor"))

    rows = next(rows for rows in spec["datasets"].values() if "beneath" in rows[0])
    assert [row["beneath"] for row in rows] == frame["time_ms"].tolist()


def test_times_without_a_known_floor_are_drawn_without_one():
    frame = incident_frame().assign(floor_ms=np.nan, ratio_text="")

    svg = svg_of(incident_charts.times_over_context(frame, floor_name="KV-read floor"))

    assert ">KV-read floor<" not in svg
    assert "sweep" in svg


def test_a_misleading_counter_is_coloured_apart_from_evidence():
    readings = pd.DataFrame(
        {
            "counter": ["util.gpu", "util.memory"],
            "share_pct": [99.8, 1.2],
            "text": ["99.8 %", "1.2 %"],
            "meaning": ["some kernel was resident", "memory was idle"],
            "role": ["misleads", "evidence"],
        }
    )

    chart = incident_charts.counters(readings)

    svg = svg_of(chart)
    assert "99.8 %" in svg
    assert "1.2 %" in svg
    bar = layers_of(spec_of(chart), "bar")[1]["encoding"]["color"]["scale"]
    assert len(set(bar["range"])) == len(bar["domain"]) == 2
