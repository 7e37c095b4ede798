"""Doctor names what disturbs a measurement and the command that mends it, and changes nothing."""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
from click.testing import CliRunner

from dashboard.asv_runs import measuring_place
from dashboard.cli import main
from dashboard.cli_exit import ExitCode
from dashboard.doctor import (
    HostReadings,
    RunRecord,
    host_findings,
    read_host,
    write_record,
)
from dashboard.doctor_finding import Level
from dashboard.doctor_gpu import GpuReadings, gpu_findings, read_gpu
from dashboard.gpus import chosen_gpu
from dashboard.locks import device_lock
from tests.asv_trees import GitRepository

HEALTHY = GpuReadings(
    index=1,
    name="H200",
    sm_clock_mhz=1500,
    max_sm_clock_mhz=1980,
    default_clock_mhz=1500,
    event_reasons=0x1,
    power_limit_w=700.0,
    default_power_limit_w=700.0,
    is_persistent=True,
    process_ids=(),
    utilization_pct=0,
    used_memory_mib=600,
    ecc=(True, True),
    uncorrected_errors=0,
    is_remap_pending=False,
    temperature_c=35,
    slowdown_c=87,
    is_mig=False,
)
QUIET = HostReadings(
    is_checkout=True, is_shallow=False, changed=(), governors=frozenset(), load=0.1
)


def test_a_healthy_machine_has_no_findings():
    assert gpu_findings(HEALTHY) == []
    assert host_findings(QUIET) == []
    assert host_findings(replace(QUIET, governors=frozenset({"performance"}))) == []


@pytest.mark.parametrize(
    ("sick", "level", "subject", "command"),
    [
        ({"sm_clock_mhz": 345}, "noisy", "clocks", "--lock-gpu-clocks=1500,1500"),
        ({"sm_clock_mhz": 345, "default_clock_mhz": None}, "noisy", "clocks", "=tdp,tdp"),
        ({"event_reasons": 0x41}, "noisy", "throttling", "-q -d PERFORMANCE"),
        ({"power_limit_w": 500.0}, "noisy", "power cap", "-pl 700"),
        ({"is_persistent": False}, "noisy", "persistence", "-pm 1"),
        (
            {"process_ids": (71, 72)},
            "noisy",
            "other processes",
            "ps -o pid,user,etime,args -p 71,72",
        ),
        ({"utilization_pct": 40}, "noisy", "other processes", "nvidia-smi -i 1"),
        ({"used_memory_mib": 9000}, "noisy", "other processes", "nvidia-smi -i 1"),
        ({"ecc": (False, False)}, "noisy", "ECC", "--ecc-config=1"),
        ({"ecc": (True, False)}, "noisy", "ECC", "--ecc-config=1"),
        ({"uncorrected_errors": 2}, "wrong", "ECC", "--gpu-reset"),
        ({"is_remap_pending": True}, "wrong", "ECC", "--gpu-reset"),
        ({"temperature_c": 80}, "noisy", "heat", "-d TEMPERATURE"),
        ({"is_mig": True}, "noisy", "MIG", "-mig 0"),
    ],
)
def test_each_illness_of_a_gpu_is_named_with_its_command(sick, level, subject, command):
    found = [one for one in gpu_findings(replace(HEALTHY, **sick)) if one.level != Level.UNKNOWN]

    assert [(one.level, one.subject) for one in found] == [(level, subject)]
    assert command in found[0].command


def test_a_busy_gpu_is_not_accused_of_floating_clocks():
    """Between its idle clock and its top one a GPU may be locked anywhere."""
    assert gpu_findings(replace(HEALTHY, sm_clock_mhz=345, event_reasons=0)) == []


def test_what_nvml_refuses_is_said_and_is_no_illness():
    (found,) = gpu_findings(GpuReadings(index=0))

    assert found.level == Level.UNKNOWN
    for name in ("sm_clock_mhz", "power_limit_w", "process_ids", "slowdown_c"):
        assert name in found.message


@pytest.mark.parametrize(
    ("sick", "level", "subject", "command"),
    [
        ({"is_checkout": False}, "wrong", "checkout", "git clone"),
        ({"is_shallow": True}, "wrong", "shallow clone", "git fetch --unshallow"),
        ({"changed": ("engine/a.py",)}, "wrong", "dirty tree", "git stash --include-untracked"),
        ({"governors": frozenset({"powersave"})}, "noisy", "CPU governor", "cpupower"),
        ({"load": 3.0}, "noisy", "load", "ps -eo"),
    ],
)
def test_each_illness_of_a_host_is_named_with_its_command(sick, level, subject, command):
    (found,) = host_findings(replace(QUIET, **sick))

    assert (found.level, found.subject) == (level, subject)
    assert command in found.command


def test_the_host_is_read_from_git_and_the_system(tmp_path):
    repository = GitRepository(tmp_path / "whole")
    repository.commit("one")
    repository.commit("two")
    for cpu, governor in enumerate(("performance", "powersave")):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{governor}\n", encoding="utf-8")
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth", "1", f"file://{repository.root}", str(shallow))
    whole = read_host(repository.root, system=tmp_path)
    (shallow / "engine" / "new.py").write_text("", encoding="utf-8")
    (shallow / "notes.txt").write_text("no code", encoding="utf-8")

    part = read_host(shallow, system=tmp_path)

    assert (whole.is_checkout, whole.is_shallow, whole.changed) == (True, False, ())
    assert (part.is_shallow, part.changed) == (True, ("engine/new.py",))
    assert whole.governors == {"performance", "powersave"}
    assert not read_host(tmp_path, system=tmp_path).is_checkout


class FakeNvml:
    """Answers as a card does that is lent to somebody; what it was not told it refuses."""

    NVMLError = pynvml.NVMLError

    def __init__(self, cards=1, **answers):
        self.cards, self.answers, self.opened = cards, answers, 0

    def __getattr__(self, name):
        assert hasattr(pynvml, name), f"pynvml has no {name}"
        if name.startswith("NVML_"):
            return getattr(pynvml, name)
        if name not in self.answers:
            return self.refuse
        return lambda *_: self.answers[name]

    def refuse(self, *_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self):  # noqa: N802 - NVML's names
        self.opened += 1

    def nvmlShutdown(self):  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return self.cards

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle}000"


@pytest.fixture
def nvml(monkeypatch):
    def put(**answers):
        made = FakeNvml(**answers)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    return put


def test_a_gpu_is_read_with_calls_that_nvml_has(nvml):
    made = nvml(
        nvmlDeviceGetName="H200",
        nvmlDeviceGetClockInfo=345,
        nvmlDeviceGetMaxClockInfo=1980,
        nvmlDeviceGetCurrentClocksEventReasons=1,
        nvmlDeviceGetEnforcedPowerLimit=500_000,
        nvmlDeviceGetPowerManagementDefaultLimit=700_000,
        nvmlDeviceGetPersistenceMode=0,
        nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=9), SimpleNamespace(pid=7)],
        nvmlDeviceGetGraphicsRunningProcesses=[SimpleNamespace(pid=9)],
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=3, memory=0),
        nvmlDeviceGetMemoryInfo=SimpleNamespace(used=5 << 20),
        nvmlDeviceGetEccMode=(1, 0),
        nvmlDeviceGetRemappedRows=(0, 0, 1, 0),
        nvmlDeviceGetTemperature=80,
        nvmlDeviceGetTemperatureThreshold=87,
        nvmlDeviceGetMigMode=(1, 1),
    )
    with chosen_gpu({}) as gpu:
        found = read_gpu(gpu)

    assert found == GpuReadings(
        index=0,
        name="H200",
        sm_clock_mhz=345,
        max_sm_clock_mhz=1980,
        default_clock_mhz=None,
        event_reasons=1,
        power_limit_w=500.0,
        default_power_limit_w=700.0,
        is_persistent=False,
        process_ids=(7, 9),
        utilization_pct=3,
        used_memory_mib=5,
        ecc=(True, False),
        uncorrected_errors=None,
        is_remap_pending=True,
        temperature_c=80,
        slowdown_c=87,
        is_mig=True,
    )
    assert made.opened == 0


@pytest.mark.parametrize(
    ("allowed", "index"),
    [
        (None, 0),
        ("2,0", 2),
        ("GPU-1", 1),
        ("GPU-1000,GPU-2000", 1),
        ("", None),
        ("-1", None),
        ("7", None),
    ],
)
def test_a_run_uses_the_first_gpu_that_cuda_may_see(nvml, allowed, index):
    nvml(cards=3)
    with chosen_gpu({} if allowed is None else {"CUDA_VISIBLE_DEVICES": allowed}) as gpu:
        assert (gpu and gpu.index) == index
        assert gpu is None or gpu.visible == f"GPU-{index}000"


def test_all_that_a_run_measures_goes_to_its_gpu_and_another_run_to_another(
    nvml, tmp_path, monkeypatch
):
    nvml(cards=3)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ExitStack() as stack:
        for allowed, uuid in (("2,0", "GPU-2000"), ("1", "GPU-1000")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
            place = stack.enter_context(measuring_place(tmp_path / uuid, pytest.fail))
            assert (place.device, place.environ) == (uuid, {"CUDA_VISIBLE_DEVICES": uuid})
            assert device_lock(uuid).read_text(encoding="utf-8").startswith("process ")


def test_a_slice_is_locked_as_its_whole_card(nvml):
    nvml(cards=3, nvmlDeviceGetHandleByUUID="slice", nvmlDeviceGetDeviceHandleFromMigDeviceHandle=1)
    with chosen_gpu({"CUDA_VISIBLE_DEVICES": "MIG-abc"}) as gpu:
        assert (gpu.index, gpu.uuid, gpu.visible) == (1, "GPU-1000", "MIG-abc")


def test_a_driver_that_answers_nothing_is_no_gpu(nvml):
    made = nvml()
    made.nvmlDeviceGetCount = made.refuse
    with chosen_gpu({}) as gpu:
        assert gpu is None


def test_the_command_prints_findings_and_its_status_says_how_bad(tmp_path, monkeypatch, nvml):
    repository = GitRepository(tmp_path)
    repository.commit("one")
    monkeypatch.chdir(tmp_path)
    nvml(nvmlDeviceGetPersistenceMode=0)
    before = sorted(tmp_path.rglob("*"))

    noisy = CliRunner().invoke(main, ["doctor"])
    (tmp_path / "engine" / "step.py").write_text("changed", encoding="utf-8")
    wrong = CliRunner().invoke(main, ["doctor", "--json"])

    assert noisy.exit_code == ExitCode.INCONCLUSIVE
    assert "noisy: persistence: expected persistence mode, got none" in noisy.output
    assert "    sudo nvidia-smi -i 0 -pm 1" in noisy.output.splitlines()
    assert wrong.exit_code == ExitCode.FAILED
    first = json.loads(wrong.stdout)[0]
    assert set(first) == {"level", "subject", "message", "command"}
    assert (first["level"], first["subject"]) == ("wrong", "dirty tree")
    assert "got changes in engine/step.py" in first["message"]
    assert [path for path in sorted(tmp_path.rglob("*")) if ".git" not in path.parts] == [
        path for path in before if ".git" not in path.parts
    ]


def test_a_run_record_is_no_result_file_and_holds_the_findings(tmp_path):
    found = host_findings(replace(QUIET, load=3.0))
    record = RunRecord("run-1", "quick", None, None, None, "cpu")

    path = write_record(tmp_path / "telemetry", record, found)

    content = json.loads(path.read_text(encoding="utf-8"))
    assert (path.name, content["schema"], content["run_id"]) == ("run-1.run", 1, "run-1")
    assert content["findings"][0]["subject"] == "load"
