"""One telemetry window: run a case for a while and read NVML meanwhile.

A thread that was started before the window reads the cheap counters at 20 Hz. What is dear to read
(energy: milliseconds) or averages by itself (GPM) is read at the two ends only. Every summary
carries its unit; a counter that could not be read is absent and its validity code says so, never
zero.

How to read them: `utilization_gpu_pct` is the share of time in which some kernel was resident. It
is no evidence of work: one program on one SM makes it 100. `gpm_sm_active_pct` counts SMs.

Validity codes of a window: `window_too_short`, `counter_unsupported:<name>`,
`counter_interrupted:<name>` (lost within the window), `gpm_unsupported`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from benchmarks._nvml import ENERGY, GPM_METRICS, PROBES, Gpm, Nvml, Probe, Summary

PERIOD_S: Final = 0.05
LEAST_READINGS: Final = 10


def watch(
    nvml: Nvml, run: Callable[[], None], *, settle_s: float, window_s: float
) -> tuple[dict[str, Summary], tuple[str, ...]]:
    """Call `run` for the settling time and the window; return its counters and validity codes."""
    with _sampling(nvml) as sampler:
        _repeat(run, settle_s)
        energy_before = ENERGY.read(nvml)
        gpm = Gpm.begin(nvml)
        sampler.open()
        length_s = _repeat(run, window_s)
        sampler.close()
        gpm_values = {} if gpm is None else gpm.end()
        energy_after = ENERGY.read(nvml)
    counters, validity = _summaries(sampler)
    if energy_before is None or energy_after is None:
        validity.append("counter_unsupported:energy_j")
    else:
        counters["energy_j"] = Summary.of([energy_after[0] - energy_before[0]], ENERGY.unit)
    counters |= {name: Summary.of([value], "%") for name, value in gpm_values.items()}
    validity += _missing_gpm(gpm_values)
    if length_s < window_s or sampler.num_readings < LEAST_READINGS:
        validity.append("window_too_short")
    return counters, tuple(validity)


class _Sampler(threading.Thread):
    """Reads all probes every period while it is open; started before the window it serves."""

    def __init__(self, nvml: Nvml) -> None:
        super().__init__(name="nvml-sampler", daemon=True)
        self._nvml = nvml
        self._done = threading.Event()
        self._open = threading.Event()
        self.readings: dict[str, list[float]] = {}
        self.lost: set[str] = set()
        self.num_readings = 0

    def open(self) -> None:
        """Begin to keep readings."""
        self._open.set()

    def close(self) -> None:
        """Keep no more readings."""
        self._open.clear()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._done.set()
        self.join()

    def run(self) -> None:
        """Read until stopped; a probe that fails once is not asked again."""
        probes = list(PROBES)
        while not self._done.wait(PERIOD_S):
            if self._open.is_set():
                probes = [probe for probe in probes if self._keep(probe)]
                self.num_readings += 1

    def _keep(self, probe: Probe) -> bool:
        values = probe.read(self._nvml)
        if values is None:
            self.lost.update(probe.names)
            return False
        for name, value in zip(probe.names, values, strict=True):
            self.readings.setdefault(name, []).append(value)
        return True


@contextmanager
def _sampling(nvml: Nvml) -> Iterator[_Sampler]:
    sampler = _Sampler(nvml)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def _summaries(sampler: _Sampler) -> tuple[dict[str, Summary], list[str]]:
    """Return the summaries of what was read and a code for each counter that was lost."""
    counters: dict[str, Summary] = {}
    validity: list[str] = []
    for probe in PROBES:
        for name in probe.names:
            values = sampler.readings.get(name, [])
            if values:
                counters[name] = Summary.of(values, probe.unit)
            if name in sampler.lost:
                how = "interrupted" if values else "unsupported"
                validity.append(f"counter_{how}:{name}")
    return counters, validity


def _missing_gpm(values: Mapping[str, float]) -> list[str]:
    if not values:
        return ["gpm_unsupported"]
    return [f"counter_unsupported:{name}" for name in GPM_METRICS if name not in values]


def _repeat(run: Callable[[], None], least_s: float) -> float:
    """Call `run` until `least_s` have passed; return the seconds it took."""
    started_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < least_s:
        run()
    return elapsed_s
