"""Telemetry of whole cases against an NVML that replays a trace, under the real `pynvml`.

Nothing of ours is replaced: `_Suite` runs the cases in processes of their own, as asv does, and
their samplers are processes too. The traces and the library say what the GPU does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks._meters import CHUNK_S, chunk_of, observe
from benchmarks._nvml import GPM_METRICS, PROBES
from benchmarks._readings import DOUBTS
from db import counters as told_by_diagnose

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "tests" / "fake_nvml.c"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
UUID = "00000000-1111-2222-3333-444444444444"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
UTILIZATION = ("utilization_gpu_pct", "utilization_memory_pct")
ENERGY = ("energy_j", "energy_per_run_j")
SAMPLED = tuple(name for probe in PROBES for name in probe.names)

# What each trace must end in, beside a finished case.
CODES = {
    "serial_64k": [],
    "idle": [],
    "namespaces": [],
    "no_gpm": ["gpm_unsupported"],
    "no_tensor_metric": ["counter_unsupported:gpm_tensor_pct"],
    "zero_utilization": [f"counter_unsupported:{name}" for name in UTILIZATION],
    "throttled": ["throttled"],
    "clock_moved": ["clock_moved"],
    "energy_reset": ["counter_interrupted:energy_j"],
    "power_lost": ["counter_interrupted:power_w"],
    "other_process": ["other_process"],
    "no_processes": ["counter_unsupported:compute_processes"],
    "stall": ["sampling_gap"],
    "hang": ["sampling_gap"],
    "mig": [*(f"counter_unsupported:{name}" for name in (*SAMPLED, "energy_j")), "gpm_unsupported"],
    "driver_gone": [
        *(f"counter_interrupted:{name}" for name in (*SAMPLED, "energy_j")),
        *("gpm_interrupted", "sampling_gap", "counter_interrupted:compute_processes"),
    ],
    "not_loaded": ["no_nvml"],
}
TWICE = ("serial_64k", "clock_moved")  # each in a later process of its run, too


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", target, SOURCE], check=True)
    return folder


@pytest.fixture(scope="module")
def folder(library, tmp_path_factory):
    """What cases left under each trace; two processes share the traces, to save time."""
    folder = tmp_path_factory.mktemp("watched")
    environ = os.environ | {
        "LD_LIBRARY_PATH": str(library),
        "DDTREE_BENCH_SIDECAR_DIR": str(folder),
        "DDTREE_BENCH_RUN_ID": "watched",
        "DDTREE_BENCH_PROFILE": "quick",
    }
    traces = list(CODES)
    command = [sys.executable, "-m", "tests.watched_cases", str(folder)]
    processes = [
        subprocess.Popen([*command, *part], cwd=ROOT, env=environ)
        for part in ([*traces[::2], *TWICE], [*traces[1::2], "--cost"])
    ]
    assert [process.wait() for process in processes] == [0, 0]
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """The sidecar line of each trace."""
    return lines_of(folder, process_number=0)


def lines_of(folder, *, process_number):
    text = (folder / "watched.jsonl").read_text(encoding="utf-8")
    lines = map(json.loads, text.splitlines())
    return {
        line["params"][0].strip("'"): line
        for line in lines
        if line["process_number"] == process_number
    }


@needs_compiler
@pytest.mark.parametrize("trace", CODES)
def test_every_fault_ends_in_its_codes_and_a_finished_case(found, trace):
    line = found[trace]

    assert line["validity"] == CODES[trace]
    assert (line["n"], line["device"]["name"]) == (2, "NVIDIA H200")


@needs_compiler
def test_a_window_gives_every_counter_with_its_unit(found):
    line = found["serial_64k"]
    counters = line["counters"]
    num_runs = round(counters["energy_j"]["median"] / counters["energy_per_run_j"]["median"])

    assert 10 < num_runs <= 1.1 / 0.002  # of a case of 2 ms in a window of a second
    assert {name: (value["median"], value["unit"]) for name, value in counters.items()} == {
        "utilization_gpu_pct": (100.0, "%"),
        "utilization_memory_pct": (1.0, "%"),
        "power_w": (128.044, "W"),
        "sm_clock_mhz": (1980.0, "MHz"),
        "memory_clock_mhz": (3201.0, "MHz"),
        "temperature_c": (32.0, "°C"),
        "clock_event_reasons": (0.0, "bitmask"),
        "energy_j": (pytest.approx(counters["power_w"]["median"], rel=0.3), "J"),
        "energy_per_run_j": (pytest.approx(counters["energy_j"]["median"] / num_runs), "J"),
        "gpm_sm_active_pct": (5.63, "%"),
        "gpm_sm_occupancy_pct": (0.99, "%"),
        "gpm_dram_bandwidth_pct": (0.63, "%"),
        "gpm_tensor_pct": (0.36, "%"),
    }
    assert (counters["power_w"]["min"], counters["power_w"]["max"]) == (127.5, 128.5)
    assert (line["device"]["driver"], line["device"]["power_limit_w"]) == ("580.159.04", 700.0)


@needs_compiler
def test_energy_and_gpm_are_read_at_the_ends_only(found):
    counters = found["serial_64k"]["counters"]

    assert {counters[name]["n"] for name in (*GPM_METRICS, *ENERGY)} == {1}
    assert {counters[name]["n"] >= 10 for name in SAMPLED} == {True}


@needs_compiler
@pytest.mark.parametrize(
    ("trace", "absent"),
    [
        ("mig", {*SAMPLED, *GPM_METRICS, *ENERGY}),
        ("no_gpm", {*GPM_METRICS}),
        ("no_tensor_metric", {"gpm_tensor_pct"}),
        ("zero_utilization", {*UTILIZATION}),
        ("energy_reset", {*ENERGY}),
        ("driver_gone", {*GPM_METRICS, *ENERGY}),
        ("not_loaded", {*SAMPLED, *GPM_METRICS, *ENERGY}),
    ],
)
def test_what_nvml_cannot_tell_is_absent_never_zero(found, trace, absent):
    everything = {*SAMPLED, *GPM_METRICS, *ENERGY}

    assert set(found[trace]["counters"]) == everything - absent


@needs_compiler
def test_one_sound_window_of_a_run_will_do_and_a_doubted_one_will_not(folder):
    again = lines_of(folder, process_number=1)

    assert set(again) == set(TWICE)
    assert again["serial_64k"]["validity"] == ["no_window"]
    assert again["serial_64k"]["counters"] == {}
    assert (again["serial_64k"]["n"], again["serial_64k"]["device"]["driver"]) == (2, "580.159.04")
    assert again["clock_moved"]["validity"] == ["clock_moved"]
    assert set(DOUBTS) == set(told_by_diagnose.DOUBTS)


@needs_compiler
def test_a_zero_that_gpm_confirms_is_a_zero(found):
    assert found["idle"]["counters"]["utilization_gpu_pct"]["max"] == 0.0


@needs_compiler
def test_a_reason_seen_for_a_part_of_the_window_was_set(found):
    assert found["throttled"]["counters"]["clock_event_reasons"]["median"] == 4.0


@needs_compiler
def test_what_was_read_before_a_fault_is_kept(found):
    for trace in ("driver_gone", "power_lost", "hang"):
        power = found[trace]["counters"]["power_w"]
        assert 2 <= power["n"] < found["serial_64k"]["counters"]["power_w"]["n"], trace


@needs_compiler
def test_the_cost_of_telemetry_is_measured_beside_a_sampler_and_after_a_window(folder):
    cost = json.loads((folder / "cost.json").read_text(encoding="utf-8"))

    assert set(cost) == {"before", "beside"}
    assert {difference["num_pairs"] for difference in cost.values()} == {2}
    assert all(one["low"] < one["relative"] < one["high"] for one in cost.values())


@needs_compiler
def test_no_sampler_outlives_its_case_even_one_that_hangs(folder):
    assert [path for path in Path("/proc").glob("[0-9]*") if environ_names(path, folder)] == []


def environ_names(process, folder):
    try:
        return str(folder).encode() in (process / "environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False


@needs_compiler
def test_a_sampler_ends_with_a_case_that_was_killed(library, tmp_path):
    script = (
        "import time; from benchmarks._sampler import sampling\n"
        f"with sampling('GPU-{UUID}') as sampler:\n"
        "    while sampler.is_starting: time.sleep(0.01)\n"
        "    print(sampler._process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environ_of(library, tmp_path),
        stdout=subprocess.PIPE,
    ) as case:
        sampler = Path("/proc", case.stdout.readline().decode().strip())
        assert sampler.exists()
        case.kill()

    for _ in range(600):
        if not sampler.exists() or "(zombie)" in (sampler / "status").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the sampler outlived its case by half a minute")


@needs_compiler
def test_an_unknown_device_is_not_another_one(library, tmp_path):
    assert opened(library, tmp_path, uuid="GPU-other") == "no_nvml_device"


def test_without_the_library_there_is_no_nvml(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")

    assert opened(tmp_path, tmp_path, uuid="GPU-other") == "no_nvml"


def opened(library, folder, *, uuid):
    """Open NVML in a fresh process; return the code it is refused with."""
    script = (
        "import sys; from benchmarks._nvml import NvmlMissingError, open_nvml\n"
        "try:\n"
        "    with open_nvml(sys.argv[1]): print('open')\n"
        "except NvmlMissingError as missing: print(missing.code)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script, uuid],
        cwd=ROOT,
        env=environ_of(library, folder),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def environ_of(library, folder):
    return os.environ | {
        "LD_LIBRARY_PATH": str(library),
        "FAKE_NVML_TRACE": str(ROOT / "tests" / "nvml_traces" / "serial_64k.txt"),
        "FAKE_NVML_OPENED": str(folder / "opened"),
    }


def test_the_library_of_the_tests_has_what_the_meters_call_and_nothing_else():
    called = set(re.findall(r"\.(nvml[A-Z]\w+)\(", meters_source("_nvml", "_sampler", "_window")))
    called |= set(re.findall(r"_text\(nvml\.api\.(nvml\w+)\)", meters_source("_nvml")))
    exported = set(re.findall(r"^[\w ]+[ *](nvml\w+)\(", SOURCE.read_text(), re.MULTILINE))
    behind_pynvml = {
        "nvmlInit": "nvmlInitWithFlags",
        "nvmlDeviceGetComputeRunningProcesses": "nvmlDeviceGetComputeRunningProcesses_v3",
    }

    assert exported == {behind_pynvml.get(name, name) for name in called} | {"nvmlErrorString"}


def meters_source(*modules):
    return "".join((ROOT / "benchmarks" / f"{name}.py").read_text() for name in modules)


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
    num_runs = chunk()

    assert calls.count("wait") == 1
    assert calls[-1] == "wait"
    assert num_runs == calls.count("body")
    assert 100 < num_runs == calls.count("reset") <= CHUNK_S / 1e-6
