"""What NVML says of a GPU, and what of that makes results noisy or wrong.

`read_gpu` asks, `gpu_findings` judges; nothing is changed. What NVML refuses stays None and is
named in one finding, because silence is not health.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from dashboard.doctor_finding import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dashboard.gpus import Gpu

LEAST_HEADROOM_C: Final = 15  # below the temperature at which the clocks fall
MOST_IDLE_UTILIZATION_PCT: Final = 5
MOST_FOREIGN_MEMORY_MIB: Final = 1024  # of an idle GPU; the driver itself takes some hundred
FLOATING_RATIO: Final = 0.9  # an idle GPU below this part of its top clock is not locked near it
IDLE_BIT: Final = 0x1  # of the clock event reasons
# Source: NVIDIA's nvml.h, nvmlClocksEventReason*
THROTTLING: Final = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """What NVML answered; None = it refused."""

    index: int
    name: str | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    default_clock_mhz: int | None = None  # that the maker promises under load
    event_reasons: int | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    is_persistent: bool | None = None
    process_ids: tuple[int, ...] | None = None
    utilization_pct: int | None = None
    used_memory_mib: int | None = None
    ecc: tuple[bool, bool] | None = None  # now, after the next reset
    uncorrected_errors: int | None = None  # since the driver was loaded
    is_remap_pending: bool | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    is_mig: bool | None = None


def read_gpu(gpu: Gpu) -> GpuReadings:
    """Ask NVML, which must be open, all that the findings need."""
    import pynvml as nvml  # noqa: PLC0415 - commands without a GPU start without it

    card = gpu.handle

    def ask(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - NVML's own values
        try:
            return call()
        except nvml.NVMLError:
            return None

    sm = nvml.NVML_CLOCK_SM
    slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    return GpuReadings(
        index=gpu.index,
        name=ask(lambda: str(nvml.nvmlDeviceGetName(card))),
        sm_clock_mhz=ask(lambda: nvml.nvmlDeviceGetClockInfo(card, sm)),
        max_sm_clock_mhz=ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(card, sm)),
        default_clock_mhz=ask(lambda: nvml.nvmlDeviceGetDefaultApplicationsClock(card, sm)),
        event_reasons=ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(card)),
        power_limit_w=ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(card) / 1e3),
        default_power_limit_w=ask(
            lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(card) / 1e3
        ),
        is_persistent=ask(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(card))),
        process_ids=ask(lambda: _process_ids(nvml, card)),
        utilization_pct=ask(lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu),
        used_memory_mib=ask(lambda: nvml.nvmlDeviceGetMemoryInfo(card).used >> 20),
        ecc=ask(lambda: tuple(map(bool, nvml.nvmlDeviceGetEccMode(card)))),
        uncorrected_errors=ask(lambda: _uncorrected(nvml, card)),
        is_remap_pending=ask(lambda: bool(nvml.nvmlDeviceGetRemappedRows(card)[2])),
        temperature_c=ask(lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
        slowdown_c=ask(lambda: nvml.nvmlDeviceGetTemperatureThreshold(card, slowdown)),
        is_mig=ask(lambda: bool(nvml.nvmlDeviceGetMigMode(card)[0])),
    )


def _process_ids(nvml: Any, card: Any) -> tuple[int, ...]:  # noqa: ANN401 - a module, a handle
    listed = [
        *nvml.nvmlDeviceGetComputeRunningProcesses(card),
        *nvml.nvmlDeviceGetGraphicsRunningProcesses(card),
    ]
    return tuple(sorted({int(one.pid) for one in listed}))


def _uncorrected(nvml: Any, card: Any) -> int:  # noqa: ANN401 - a module, a handle
    return int(
        nvml.nvmlDeviceGetTotalEccErrors(
            card, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
    )


def gpu_findings(found: GpuReadings) -> list[Finding]:
    """Say what makes results of this GPU noisy or wrong, worst first in each part."""
    return [
        *_clocks(found),
        *_power(found),
        *_company(found),
        *_memory(found),
        *_heat(found),
        *_slices(found),
        *_unknown(found),
    ]


def _clocks(found: GpuReadings) -> Iterator[Finding]:
    now, top, reasons = found.sm_clock_mhz, found.max_sm_clock_mhz, found.event_reasons
    is_idle = reasons is not None and reasons & IDLE_BIT
    # NVML has no word for locked clocks, but locked ones do not fall when the GPU is idle.
    if (
        is_idle
        and now is not None
        and top
        and now < FLOATING_RATIO * (found.default_clock_mhz or top)
    ):
        clock = found.default_clock_mhz or "tdp"
        yield Finding(
            Level.NOISY,
            "clocks",
            f"expected locked clocks, got {now} MHz at idle and up to {top} under load "
            "(they move with heat and power, and times with them)",
            f"sudo nvidia-smi -i {found.index} --lock-gpu-clocks={clock},{clock}",
        )
    for bit, words in THROTTLING.items():
        if reasons is not None and reasons & bit:
            yield Finding(
                Level.NOISY,
                "throttling",
                f"expected no reason to slow down, got {words}",
                f"nvidia-smi -i {found.index} -q -d PERFORMANCE,TEMPERATURE,POWER",
            )
    if found.is_persistent is False:
        yield Finding(
            Level.NOISY,
            "persistence",
            "expected persistence mode, got none (the driver unloads between processes: locked "
            "clocks are lost and each start takes seconds)",
            f"sudo nvidia-smi -i {found.index} -pm 1",
        )


def _power(found: GpuReadings) -> Iterator[Finding]:
    limit, default = found.power_limit_w, found.default_power_limit_w
    if limit is not None and default is not None and limit < default:
        yield Finding(
            Level.NOISY,
            "power cap",
            f"expected {default:.0f} W, got {limit:.0f} (times are those of a slower card)",
            f"sudo nvidia-smi -i {found.index} -pl {default:.0f}",
        )


def _company(found: GpuReadings) -> Iterator[Finding]:
    if found.process_ids:
        ids = ",".join(map(str, found.process_ids))
        yield Finding(
            Level.NOISY,
            "other processes",
            f"expected an idle GPU, got processes {ids} on it (they share its time and memory)",
            f"ps -o pid,user,etime,args -p {ids}",
        )
        return
    used, busy = found.used_memory_mib or 0, found.utilization_pct or 0
    if busy > MOST_IDLE_UTILIZATION_PCT or used > MOST_FOREIGN_MEMORY_MIB:
        yield Finding(
            Level.NOISY,
            "other processes",
            f"expected an idle GPU, got {busy} % utilization and {used} MiB in use (by processes "
            "that cannot be seen from here)",
            f"nvidia-smi -i {found.index}",
        )


def _memory(found: GpuReadings) -> Iterator[Finding]:
    if found.uncorrected_errors:
        yield Finding(
            Level.WRONG,
            "ECC",
            f"expected no uncorrected errors, got {found.uncorrected_errors} since the driver was "
            "loaded (results may be those of broken memory)",
            f"sudo nvidia-smi -i {found.index} --gpu-reset",
        )
    if found.is_remap_pending:
        yield Finding(
            Level.WRONG,
            "ECC",
            "expected no rows to be remapped, got some that wait for a reset",
            f"sudo nvidia-smi -i {found.index} --gpu-reset",
        )
    if found.ecc is not None and found.ecc[0] != found.ecc[1]:
        yield Finding(
            Level.NOISY,
            "ECC",
            f"expected a mode that stays, got {_on(found.ecc[0])} now and {_on(found.ecc[1])} "
            "after the next reset (it moves the memory's bandwidth)",
            f"sudo nvidia-smi -i {found.index} --ecc-config={int(found.ecc[0])}",
        )
    elif found.ecc == (False, False):
        yield Finding(
            Level.NOISY,
            "ECC",
            "expected ECC to be on as cards are shipped for servers, got off (errors go unseen)",
            f"sudo nvidia-smi -i {found.index} --ecc-config=1",
        )


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"


def _heat(found: GpuReadings) -> Iterator[Finding]:
    if found.temperature_c is None or found.slowdown_c is None:
        return
    headroom = found.slowdown_c - found.temperature_c
    if headroom < LEAST_HEADROOM_C:
        yield Finding(
            Level.NOISY,
            "heat",
            f"expected {LEAST_HEADROOM_C} °C below the slowdown at {found.slowdown_c}, got "
            f"{found.temperature_c} °C before any work (let it cool, look at fans and inlet)",
            f"nvidia-smi -i {found.index} -q -d TEMPERATURE",
        )


def _slices(found: GpuReadings) -> Iterator[Finding]:
    if found.is_mig:
        yield Finding(
            Level.NOISY,
            "MIG",
            "expected a whole GPU, got MIG (slices share power and clocks, and NVML gives no "
            "utilization)",
            f"sudo nvidia-smi -i {found.index} -mig 0",
        )


def _unknown(found: GpuReadings) -> Iterator[Finding]:
    refused = [one.name for one in fields(found) if getattr(found, one.name) is None]
    if refused:
        yield Finding(
            Level.UNKNOWN,
            "not answered",
            f"NVML does not tell {', '.join(refused)} of {found.name or 'this GPU'}",
            f"nvidia-smi -i {found.index} -q",
        )
