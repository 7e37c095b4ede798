"""What the GPU's counters say while a case runs: one window, before the samples are taken.

The window stands in `_window.py`, its validity codes in `_readings.py`. Two codes say that there
was none: `no_nvml` (no GPU in use, or no driver) and `no_nvml_device` (NVML does not know the one
in use). A third, `no_window`, says that nobody watched: another process of the run did already.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from benchmarks._device import Device, cpu_device, cuda_device
from benchmarks._nvml import NvmlIdentity, NvmlMissingError, Summary, open_nvml
from benchmarks._readings import DOUBTS
from benchmarks._window import watch

SETTLE_S: Final = 0.5  # utilization and power are averages over up to a second
CHUNK_S: Final = 0.02  # most work queued on a GPU before the host waits for it


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a window found: the device, its counters, and what is missing and why."""

    device: Device
    counters: Mapping[str, Summary] = field(default_factory=dict)
    validity: tuple[str, ...] = ()


def observe(
    reset: Callable[[], None], body: Callable[[], object], *, device: str, window_s: float
) -> Telemetry:
    """Run the case through a telemetry window; without a GPU, say so and run nothing.

    Parameters
    ----------
    reset, body : the case; `reset` is called before each run and counts as part of it
    device : "cpu" or "cuda" (torch's current device)
    window_s : least length of the window; it ends with the run under way
    """
    if device == "cpu":
        return Telemetry(cpu_device(), validity=("no_nvml",))
    gpu, uuid = cuda_device()
    try:
        with open_nvml(uuid) as nvml:
            gpu = _named(gpu, NvmlIdentity.read(nvml))
            run = chunk_of(reset, body, torch.cuda.synchronize)
            counters, validity = watch(nvml, run, settle_s=SETTLE_S, window_s=window_s)
    except NvmlMissingError as missing:
        return Telemetry(gpu, validity=(missing.code,))
    return Telemetry(gpu, counters, validity)


def identify(device: str) -> Telemetry:
    """Describe the device as `observe` does, without a window."""
    if device == "cpu":
        return Telemetry(cpu_device(), validity=("no_nvml",))
    gpu, uuid = cuda_device()
    try:
        with open_nvml(uuid) as nvml:
            gpu = _named(gpu, NvmlIdentity.read(nvml))
    except NvmlMissingError as missing:
        return Telemetry(gpu, validity=(missing.code,))
    return Telemetry(gpu, validity=("no_window",))


def is_watched(lines: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of the sidecar lines of a case has a window that supports what it counts."""
    return any(line["counters"] and DOUBTS.isdisjoint(line["validity"]) for line in lines)


def _named(gpu: Device, identity: NvmlIdentity) -> Device:
    return replace(gpu, driver=identity.driver, power_limit_w=identity.power_limit_w)


def chunk_of(
    reset: Callable[[], None], body: Callable[[], object], synchronize: Callable[[], None]
) -> Callable[[], int]:
    """Return a call that runs the case for about `CHUNK_S` and then waits for the device once.

    Short kernels queue up and leave no gaps that the counters would see; the queue stays short. The
    call returns how many times it ran the case.
    """

    def runs(count: int) -> int:
        for _ in range(count):
            reset()
            body()
        synchronize()
        return count

    synchronize()
    started_s = time.perf_counter()
    runs(1)
    once_s = max(time.perf_counter() - started_s, 1e-6)
    size = max(1, int(CHUNK_S / once_s))
    return lambda: runs(size)
