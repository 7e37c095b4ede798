"""The NVML calls the meters make, each with its unit; the only file that touches `pynvml`.

Costs on an H200: utilization, power, clocks, temperature and reasons take 2-3 µs each, total
energy 3-18 ms, so energy is read at the ends of a window and never in it. A call that NVML refuses
raises `pynvml.NVMLError`; the meters turn it into a validity code. The sampler is a process that
imports this module and no torch.
"""

import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Self

import pynvml

NvmlError: type[Exception] = pynvml.NVMLError

# Names of the sidecar for GPM's metrics; all are averages in percent between two samples.
GPM_METRICS: Final = {
    "gpm_sm_active_pct": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "gpm_sm_occupancy_pct": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "gpm_dram_bandwidth_pct": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "gpm_tensor_pct": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
}


class NvmlMissingError(Exception):
    """NVML cannot serve this case; `code` is the validity code that says why."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True)
class Summary:
    """One counter over a window, in `unit`; `n` readings."""

    median: float
    min: float
    max: float
    n: int
    unit: str

    @classmethod
    def of(cls, values: Sequence[float], unit: str) -> Self:
        """Summarise readings; bit masks are joined, because a bit seen once was set."""
        middle = (
            float(reduce(operator.or_, map(int, values)))
            if unit == "bitmask"
            else float(statistics.median(values))
        )
        return cls(middle, float(min(values)), float(max(values)), len(values), unit)


@dataclass(frozen=True, slots=True)
class Nvml:
    """An initialised NVML and the device it watches."""

    api: Any  # the module `pynvml`
    handle: Any
    uuid: str  # as torch gives it, with which another process finds the device


@dataclass(frozen=True, slots=True)
class Probe:
    """One NVML call: the counters it yields, all in `unit`."""

    names: tuple[str, ...]
    unit: str
    call: Callable[[Nvml], Sequence[float]]

    def read(self, nvml: Nvml) -> Sequence[float] | None:
        """Return one value for each name, or None where NVML refuses."""
        try:
            return self.call(nvml)
        except NvmlError:
            return None


def _utilization(nvml: Nvml) -> tuple[float, float]:
    rates = nvml.api.nvmlDeviceGetUtilizationRates(nvml.handle)
    return rates.gpu, rates.memory


def _power(nvml: Nvml) -> tuple[float]:
    return (nvml.api.nvmlDeviceGetPowerUsage(nvml.handle) / 1e3,)


def _sm_clock(nvml: Nvml) -> tuple[float]:
    return (nvml.api.nvmlDeviceGetClockInfo(nvml.handle, pynvml.NVML_CLOCK_SM),)


def _memory_clock(nvml: Nvml) -> tuple[float]:
    return (nvml.api.nvmlDeviceGetClockInfo(nvml.handle, pynvml.NVML_CLOCK_MEM),)


def _temperature(nvml: Nvml) -> tuple[float]:
    return (nvml.api.nvmlDeviceGetTemperature(nvml.handle, pynvml.NVML_TEMPERATURE_GPU),)


def _reasons(nvml: Nvml) -> tuple[float]:
    return (nvml.api.nvmlDeviceGetCurrentClocksEventReasons(nvml.handle),)


def _energy(nvml: Nvml) -> tuple[float]:
    return (nvml.api.nvmlDeviceGetTotalEnergyConsumption(nvml.handle) / 1e3,)


# Read again and again within the window.
PROBES: Final = (
    Probe(("utilization_gpu_pct", "utilization_memory_pct"), "%", _utilization),
    Probe(("power_w",), "W", _power),
    Probe(("sm_clock_mhz",), "MHz", _sm_clock),
    Probe(("memory_clock_mhz",), "MHz", _memory_clock),
    Probe(("temperature_c",), "°C", _temperature),
    Probe(("clock_event_reasons",), "bitmask", _reasons),
)
# Reasons that hold a clock down; the others say that it may sleep, or who chose it.
CAPPING_REASONS: Final = (
    pynvml.nvmlClocksEventReasonSwPowerCap
    | pynvml.nvmlClocksEventReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonSwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
)
# Read at both ends; the counter is what it grew by.
ENERGY: Final = Probe(("energy_j",), "J", _energy)


def compute_pids(nvml: Nvml) -> list[int] | None:
    """Return the processes with a context on the device, as NVML numbers them; None = refused."""
    try:
        return [int(one.pid) for one in nvml.api.nvmlDeviceGetComputeRunningProcesses(nvml.handle)]
    except NvmlError:
        return None


@dataclass(frozen=True, slots=True)
class NvmlIdentity:
    """What NVML alone knows of a device; None = NVML refuses."""

    driver: str | None
    power_limit_w: float | None

    @classmethod
    def read(cls, nvml: Nvml) -> Self:
        """Ask NVML."""
        return cls(
            driver=_text(nvml.api.nvmlSystemGetDriverVersion),
            power_limit_w=_watts(lambda: nvml.api.nvmlDeviceGetEnforcedPowerLimit(nvml.handle)),
        )


class Gpm:
    """GPM averages between `begin` and `end`; Hopper and newer have it."""

    def __init__(self, nvml: Nvml, first: Any, last: Any) -> None:
        self._nvml = nvml
        self._samples = (first, last)

    @classmethod
    def begin(cls, nvml: Nvml) -> "Gpm | None":
        """Take the first sample, or return None where the device or driver has no GPM."""
        api = nvml.api
        try:
            if not api.nvmlGpmQueryDeviceSupport(nvml.handle).isSupportedDevice:
                return None
            gpm = cls(nvml, api.nvmlGpmSampleAlloc(), api.nvmlGpmSampleAlloc())
        except NvmlError:
            return None
        try:
            api.nvmlGpmSampleGet(nvml.handle, gpm._samples[0])
        except NvmlError:
            gpm._free()
            return None
        return gpm

    def end(self) -> Mapping[str, float]:
        """Take the last sample, free both and return the metrics that NVML has, in percent."""
        try:
            self._nvml.api.nvmlGpmSampleGet(self._nvml.handle, self._samples[1])
            return self._metrics()
        except NvmlError:
            return {}
        finally:
            self._free()

    def _free(self) -> None:
        for sample in self._samples:
            with suppress(NvmlError):  # of a driver that is gone
                self._nvml.api.nvmlGpmSampleFree(sample)

    def _metrics(self) -> dict[str, float]:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM_METRICS)
        request.sample1, request.sample2 = self._samples
        for index, metric in enumerate(GPM_METRICS.values()):
            request.metrics[index].metricId = metric
        self._nvml.api.nvmlGpmMetricsGet(request)
        answers = zip(GPM_METRICS, request.metrics, strict=False)
        return {
            name: float(answer.value)
            for name, answer in answers
            if answer.nvmlReturn == pynvml.NVML_SUCCESS
        }


@contextmanager
def open_nvml(gpu_uuid: str) -> Iterator[Nvml]:
    """Initialise NVML for the device with this UUID; `NvmlMissingError` where that fails."""
    try:
        pynvml.nvmlInit()
    except NvmlError as error:
        raise NvmlMissingError("no_nvml") from error
    try:
        yield Nvml(pynvml, _handle(gpu_uuid), gpu_uuid)
    finally:
        with suppress(NvmlError):  # a driver that went meanwhile leaves nothing to shut down
            pynvml.nvmlShutdown()


def _handle(gpu_uuid: str) -> Any:
    """Find the device, or the MIG instance: to CUDA both are a UUID, NVML names them apart."""
    instance = gpu_uuid.replace("GPU-", "MIG-", 1)
    for name in (gpu_uuid, instance):
        with suppress(NvmlError):
            return pynvml.nvmlDeviceGetHandleByUUID(name)
    raise NvmlMissingError("no_nvml_device")


def _text(ask: Callable[[], Any]) -> str | None:
    try:
        return str(ask())
    except NvmlError:
        return None


def _watts(ask: Callable[[], float]) -> float | None:
    try:
        return ask() / 1e3
    except NvmlError:
        return None
