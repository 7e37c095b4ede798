"""The telemetry window against an NVML of our own: a small C library under the real `pynvml`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._meters import CHUNK_S, chunk_of, observe

ROOT = Path(__file__).parent.parent
UUID = "GPU-00000000-1111-2222-3333-444444444444"

LIBRARY = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { char *shortName, *longName, *unit; } Info;
typedef struct { unsigned id; int ret; double value; Info info; } Metric;
typedef struct { unsigned version, count; void *first, *last; Metric metrics[333]; } Request;
typedef struct { unsigned version, supported; } Support;
enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
static unsigned calls;
static unsigned long long energy_mj = 1000;
static int lacks(const char *what) { const char *l = getenv("NVML_LACKS"); return l && strstr(l, what); }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "refused"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    *handle = &calls;
    return strcmp(uuid, "GPU-00000000-1111-2222-3333-444444444444") ? NOT_FOUND : OK;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "580.1"); return OK; }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *mw) { *mw = 700000; return OK; }
int nvmlDeviceGetUtilizationRates(void *h, Rates *r) {
    calls++; r->gpu = 100; r->memory = calls % 2; return lacks("utilization") ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) {
    if (lacks("power-later") && calls > 3) return NOT_SUPPORTED;
    *mw = 131000; return OK;
}
int nvmlDeviceGetClockInfo(void *h, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1980 : 3201; return OK; }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *c) { *c = 41; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(void *h, unsigned long long *bits) {
    *bits = calls % 2 ? 4 : 1; return OK;
}
int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
    *mj = energy_mj; energy_mj += 250000; return OK;
}
int nvmlGpmQueryDeviceSupport(void *h, Support *s) { s->supported = !lacks("gpm"); return OK; }
int nvmlGpmSampleAlloc(void **sample) { *sample = malloc(8); return OK; }
int nvmlGpmSampleFree(void *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(void *h, void *sample) { return OK; }
int nvmlGpmMetricsGet(Request *r) {
    for (unsigned i = 0; i < r->count; i++) {
        r->metrics[i].ret = lacks("tensor") && r->metrics[i].id == 5 ? NOT_SUPPORTED : OK;
        r->metrics[i].value = r->metrics[i].id == 2 ? 5.4 : 0.25;
    }
    return OK;
}
"""

WATCH = f"""
import json, time
from dataclasses import asdict
from benchmarks._window import watch
from benchmarks._nvml import NvmlIdentity, NvmlMissingError, open_nvml
try:
    with open_nvml({UUID!r}) as nvml:
        counters, validity = watch(
            nvml, lambda: time.sleep(0.01), settle_s=0.0, window_s=WINDOW_S
        )
        identity = asdict(NvmlIdentity.read(nvml))
except NvmlMissingError as missing:
    print(json.dumps({{"code": missing.code}}))
else:
    summaries = {{name: asdict(value) for name, value in counters.items()}}
    print(json.dumps({{"counters": summaries, "validity": validity, "identity": identity}}))
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc to build an NVML of our own")
    folder = tmp_path_factory.mktemp("nvml")
    source = folder / "nvml.c"
    source.write_text(LIBRARY, encoding="utf-8")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", target, source], check=True)
    return folder


def watch(library, *, window_s=0.7, lacks="", script=WATCH):
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_LACKS": lacks}
    outcome = subprocess.run(
        [sys.executable, "-c", script.replace("WINDOW_S", str(window_s))],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(outcome.stdout)


def test_a_window_gives_every_counter_with_its_unit(library):
    found = watch(library)

    counters = found["counters"]
    assert found["validity"] == []
    assert {name: (value["median"], value["unit"]) for name, value in counters.items()} == {
        "utilization_gpu_pct": (100.0, "%"),
        "utilization_memory_pct": (counters["utilization_memory_pct"]["median"], "%"),
        "power_w": (131.0, "W"),
        "sm_clock_mhz": (1980.0, "MHz"),
        "memory_clock_mhz": (3201.0, "MHz"),
        "temperature_c": (41.0, "°C"),
        "clock_event_reasons": (5.0, "bitmask"),
        "energy_j": (250.0, "J"),
        "gpm_sm_active_pct": (5.4, "%"),
        "gpm_sm_occupancy_pct": (0.25, "%"),
        "gpm_dram_bandwidth_pct": (0.25, "%"),
        "gpm_tensor_pct": (0.25, "%"),
    }
    assert (counters["utilization_memory_pct"]["min"], counters["power_w"]["n"] >= 10) == (0, True)
    assert found["identity"] == {"driver": "580.1", "power_limit_w": 700.0}


def test_energy_and_gpm_are_read_at_the_ends_only(library):
    counters = watch(library)["counters"]

    assert {counters[name]["n"] for name in counters if name.startswith(("gpm", "energy"))} == {1}


def test_what_nvml_refuses_is_absent_and_named_never_zero(library):
    found = watch(library, lacks="utilization gpm")

    absent = {"utilization_gpu_pct", "utilization_memory_pct", "gpm_sm_active_pct"}
    assert absent.isdisjoint(found["counters"])
    assert found["validity"] == [
        "counter_unsupported:utilization_gpu_pct",
        "counter_unsupported:utilization_memory_pct",
        "gpm_unsupported",
    ]


def test_one_gpm_metric_may_be_missing_without_the_others(library):
    found = watch(library, lacks="tensor")

    assert "gpm_sm_active_pct" in found["counters"]
    assert found["validity"] == ["counter_unsupported:gpm_tensor_pct"]


def test_a_counter_lost_within_the_window_is_marked(library):
    found = watch(library, lacks="power-later")

    assert found["counters"]["power_w"]["n"] == 3
    assert found["validity"] == ["counter_interrupted:power_w"]


def test_a_window_of_few_readings_says_so(library):
    assert watch(library, window_s=0.2)["validity"] == ["window_too_short"]


def test_an_unknown_device_is_not_another_one(library):
    script = WATCH.replace(UUID, "GPU-other")

    assert watch(library, script=script) == {"code": "no_nvml_device"}


def test_without_the_library_nothing_is_read(tmp_path):
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_bytes(b"not a library")

    assert watch(tmp_path) == {"code": "no_nvml"}


def test_a_cpu_case_runs_nothing_for_telemetry():
    found = observe(fail, fail, device="cpu", window_s=1.0)

    assert (found.counters, found.validity, found.device.kind) == ({}, ("no_nvml",), "cpu")
    assert found.device.name


def fail():
    raise AssertionError


def test_short_work_is_queued_and_waited_for_once_a_chunk():
    calls = []
    chunk = chunk_of(
        lambda: calls.append("reset"), lambda: calls.append("body"), lambda: calls.append("wait")
    )
    calls.clear()
    chunk()

    assert calls.count("wait") == 1
    assert calls[-1] == "wait"
    assert 100 < calls.count("body") == calls.count("reset") <= CHUNK_S / 1e-6
