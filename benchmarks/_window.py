"""One telemetry window: run a case for a while, with NVML read meanwhile and at both ends.

A process that was started before the window reads the cheap counters at 20 Hz (`_sampler.py`).
What is dear to read (energy: milliseconds) or averages by itself (GPM) is read at the two ends
only. A case that is shorter than the window is run again until it is filled. What the readings
amount to, and the validity codes, stand in `_readings.py`.

How to read them: `utilization_gpu_pct` is the share of time in which some kernel was resident. It
is no evidence of work: one program on one SM makes it 100. `gpm_sm_active_pct` counts SMs.
`energy_j` grows in steps on an H200, one every 0.1 s, so that a window has it to within a tenth of
a second's power: 10 % of a window of 1 s. `energy_per_run_j` is its share of one run of the case.
"""

import os
import time
from collections.abc import Callable
from typing import Final

from benchmarks._nvml import ENERGY, Gpm, Nvml, Summary
from benchmarks._readings import Ends, summarise
from benchmarks._sampler import Sampler, sampling

START_S: Final = 10.0  # most that is waited for the sampler's first reading


def watch(
    nvml: Nvml, run: Callable[[], int], *, settle_s: float, window_s: float
) -> tuple[dict[str, Summary], tuple[str, ...]]:
    """Call `run` for the settling time and the window; return its counters and validity codes.

    It says how many times it ran the case.
    """
    with sampling(nvml.uuid) as sampler:
        _repeat(run, settle_s)
        _repeat_until_read(run, sampler)
        ends = _window(nvml, run, window_s)
        readings = sampler.stop()
    return summarise(readings, ends, own_pid=os.getpid())


def _window(nvml: Nvml, run: Callable[[], int], window_s: float) -> Ends:
    """Call `run` until the window is filled, and read what is read at its ends."""
    energy_before = ENERGY.read(nvml)
    gpm = Gpm.begin(nvml)
    opened_s = time.monotonic()
    num_runs = _repeat(run, window_s)
    closed_s = time.monotonic()
    gpm_values = {} if gpm is None else gpm.end()
    energy_after = ENERGY.read(nvml)
    return Ends(
        opened_s=opened_s,
        closed_s=closed_s,
        num_runs=num_runs,
        energy_before_j=None if energy_before is None else energy_before[0],
        energy_after_j=None if energy_after is None else energy_after[0],
        has_gpm=gpm is not None,
        gpm=gpm_values,
    )


def _repeat(run: Callable[[], int], least_s: float) -> int:
    """Call `run` until `least_s` have passed; return how many times the case ran."""
    end_s = time.monotonic() + least_s
    num_runs = 0
    while time.monotonic() < end_s:
        num_runs += run()
    return num_runs


def _repeat_until_read(run: Callable[[], int], sampler: Sampler) -> None:
    """Keep the device at work until the sampler reads; one that cannot leaves a gap."""
    end_s = time.monotonic() + START_S
    while sampler.is_starting and time.monotonic() < end_s:
        run()
