"""What the readings of a window amount to: a summary of each counter, and what is wrong with them.

Pure: readings in, summaries and validity codes out. A counter that could not be read is absent and
its code says so, never zero. The codes of a window:

======================================  ============================================================
`window_too_short`                      shorter than `LEAST_WINDOW_S`
`sampling_gap`                          nothing was read for more than `MAX_GAP_S` within it
`throttled`                             a clock was held down: power cap, heat, power brake
`clock_moved`                           a clock moved by more than `CLOCK_MOVE_REL`
`other_process`                         another process had a context on the GPU
`counter_unsupported:<name>`            NVML refuses it, or it reads a zero that nothing confirms
`counter_interrupted:<name>`            lost within the window, or counted anew
`gpm_unsupported`, `gpm_interrupted`    the same of all GPM metrics together
======================================  ============================================================
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks._nvml import CAPPING_REASONS, ENERGY, GPM_METRICS, PROBES, Summary

# Codes that leave a window's counters no claim about the case: it, or the GPU, was not itself.
DOUBTS: Final = frozenset(
    {"window_too_short", "sampling_gap", "throttled", "clock_moved", "other_process"}
)
PERIOD_S: Final = 0.05
LEAST_WINDOW_S: Final = 10 * PERIOD_S
MAX_GAP_S: Final = 5 * PERIOD_S
CLOCK_MOVE_REL: Final = 0.02  # of the highest; clocks come in steps of 15 MHz, under 1 %
ACTIVE_PCT: Final = 1.0  # of the SMs, from where a utilization of zero is not believed
PROCESSES: Final = "compute_processes"
ENERGY_PER_RUN: Final = "energy_per_run_j"
UTILIZATION: Final = ("utilization_gpu_pct", "utilization_memory_pct")


@dataclass(frozen=True, slots=True)
class Reading:
    """What one look at the cheap counters found."""

    at_s: float  # `time.monotonic`, one clock for all processes of a machine
    values: Mapping[str, float]
    refused: tuple[str, ...] = ()  # what NVML refused, now or before
    pids: tuple[int, ...] | None = None  # on the GPU; None = not asked, or refused


@dataclass(frozen=True, slots=True)
class Ends:
    """What was read at the two ends of a window; None = NVML refuses."""

    opened_s: float
    closed_s: float
    num_runs: int  # of the case between the two
    energy_before_j: float | None = None
    energy_after_j: float | None = None
    has_gpm: bool = False  # at the opening
    gpm: Mapping[str, float] = field(default_factory=dict)


def summarise(
    readings: Sequence[Reading], ends: Ends, *, own_pid: int
) -> tuple[dict[str, Summary], tuple[str, ...]]:
    """Return the counters of the window between `ends` and its validity codes."""
    inside = [one for one in readings if ends.opened_s <= one.at_s <= ends.closed_s]
    counters, codes = _sampled(inside)
    energy, energy_codes = _energy(ends)
    counters |= energy
    counters |= {name: Summary.of([value], "%") for name, value in ends.gpm.items()}
    codes += [*energy_codes, *_missing_gpm(ends), *_unconfirmed_zeros(counters)]
    if ends.closed_s - ends.opened_s < LEAST_WINDOW_S:
        codes.append("window_too_short")
    elif _longest_gap_s(inside, ends) > MAX_GAP_S:
        codes.append("sampling_gap")
    return counters, (*codes, *_clock_codes(counters), *_process_codes(inside, own_pid))


def is_shared(pids: Sequence[int], own_pid: int) -> bool:
    """Whether a GPU that lists `pids` is used by others too.

    In a container NVML may number processes as the host does: one that is listed alone is ours.
    """
    return len(set(pids) | {own_pid}) > (1 if own_pid in pids else 2)


def _sampled(inside: Sequence[Reading]) -> tuple[dict[str, Summary], list[str]]:
    """Summarise what was read, with a code for each counter that was refused."""
    counters: dict[str, Summary] = {}
    codes: list[str] = []
    refused = {name for one in inside for name in one.refused}
    for probe in PROBES:
        for name in probe.names:
            values = [one.values[name] for one in inside if name in one.values]
            if values:
                counters[name] = Summary.of(values, probe.unit)
            if name in refused:
                how = "interrupted" if values else "unsupported"
                codes.append(f"counter_{how}:{name}")
    return counters, codes


def _energy(ends: Ends) -> tuple[dict[str, Summary], list[str]]:
    """Give what the energy counter grew by; one that fell was reset and says nothing."""
    (name,) = ENERGY.names
    before_j, after_j = ends.energy_before_j, ends.energy_after_j
    if before_j is None:
        return {}, [f"counter_unsupported:{name}"]
    if after_j is None or after_j < before_j:
        return {}, [f"counter_interrupted:{name}"]
    grown_j = after_j - before_j
    values = {name: grown_j, ENERGY_PER_RUN: grown_j / max(1, ends.num_runs)}
    return {name: Summary.of([value], ENERGY.unit) for name, value in values.items()}, []


def _missing_gpm(ends: Ends) -> list[str]:
    if not ends.gpm:
        return ["gpm_interrupted" if ends.has_gpm else "gpm_unsupported"]
    return [f"counter_unsupported:{name}" for name in GPM_METRICS if name not in ends.gpm]


def _unconfirmed_zeros(counters: dict[str, Summary]) -> list[str]:
    """Take out a utilization that is always 0/0, unless GPM too saw no SM at work.

    Some drivers answer 0/0 with success whatever runs. Source: iopsystems/rezolus issue 1105.
    """
    found = [counters[name].max for name in UTILIZATION if name in counters]
    active = counters.get("gpm_sm_active_pct")
    if not found or any(found) or (active is not None and active.max < ACTIVE_PCT):
        return []
    return [
        f"counter_unsupported:{name}"
        for name in UTILIZATION
        if counters.pop(name, None) is not None
    ]


def _longest_gap_s(inside: Sequence[Reading], ends: Ends) -> float:
    """Return the longest time without a reading; where some have values, those without are none."""
    with_values = [one for one in inside if one.values]
    times_s = [ends.opened_s, *(one.at_s for one in with_values or inside), ends.closed_s]
    return max(later - earlier for earlier, later in itertools.pairwise(times_s))


def _clock_codes(counters: Mapping[str, Summary]) -> list[str]:
    codes = []
    reasons = counters.get("clock_event_reasons")
    if reasons is not None and int(reasons.median) & CAPPING_REASONS:
        codes.append("throttled")
    clocks = [counters[name] for name in ("sm_clock_mhz", "memory_clock_mhz") if name in counters]
    if any(clock.max - clock.min > CLOCK_MOVE_REL * clock.max for clock in clocks):
        codes.append("clock_moved")
    return codes


def _process_codes(inside: Sequence[Reading], own_pid: int) -> list[str]:
    codes = []
    listed = [one.pids for one in inside if one.pids is not None]
    if any(PROCESSES in one.refused for one in inside):
        how = "interrupted" if listed else "unsupported"
        codes.append(f"counter_{how}:{PROCESSES}")
    if any(is_shared(pids, own_pid) for pids in listed):
        codes.append("other_process")
    return codes
