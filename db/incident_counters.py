"""What each counter of the incident says alone, and what it is worth beside the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from db.counters import LOW_POWER_SHARE, REASONS
from db.evidence import Status
from db.incident_sides import Line
from db.numbers import MISSING, digits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from db.incident_sides import Side

SAID_ALONE: Final = {  # what a reader takes from a counter that has no other beside it
    "utilization_gpu_pct": "the GPU is busy",
    "utilization_memory_pct": "memory is not the limit",
    "power_w": "far from the power limit",
    "sm_clock_mhz": "clocks are up",
    "gpm_sm_active_pct": "how much of the GPU had work",
    "gpm_sm_occupancy_pct": "how many warps it had",
    "gpm_dram_bandwidth_pct": "how much of the DRAM's rate was used",
    "gpm_tensor_pct": "how busy the tensor cores were",
}
UNITS: Final = {"power_w": "W", "sm_clock_mhz": "MHz"}
NEARLY_NONE_PCT: Final = 10.0  # of what a counter could read


def counter_lines(first: Side, second: Side, twin: Side | None) -> Iterable[Line]:
    """Give every counter that either side recorded, and what a reader would have taken from it."""
    for name, alone in SAID_ALONE.items():
        readings = ["" if side is None else _reading(side, name) for side in (first, second, twin)]
        if any(one not in {"", MISSING} for one in readings):
            label = name.removesuffix("_pct").removesuffix("_w").removesuffix("_mhz")
            original, repeated, fast = readings
            yield Line(label, original, repeated, fast, alone, _worth(second, name))


def _reading(side: Side, name: str) -> str:
    value = side.point.counters.get(name)
    if value is None:
        return MISSING
    unit = UNITS.get(name, "%")
    limit = side.evidence.power_limit_w if name == "power_w" else None
    of = "" if limit is None else f" of {digits(limit, 3)} {unit}"
    told = f"{digits(value, 4 if name in UNITS else 3)} {unit}{of}"
    is_free = name == "sm_clock_mhz" and side.point.counters.get(REASONS) == 0.0
    return f"{told}, nothing held it down" if is_free else told


def _worth(side: Side, name: str) -> str:
    """Say what a counter was worth where all of them were read; nothing where that is not known."""
    counters = side.point.counters
    active, starved = counters.get("gpm_sm_active_pct"), side.claim("starvation")
    if active is None or name not in counters:
        return ""
    is_starved = starved is not None and starved.status is Status.SUPPORTED
    limit = side.evidence.power_limit_w
    told = {
        "utilization_gpu_pct": (
            side.claim("gpu_utilization_misleads") is not None,
            f"misleads: as high while {digits(active, 2)} % of the SM time is active",
        ),
        "utilization_memory_pct": (
            side.claim("dram_idle") is not None,
            "right that DRAM idled, and says not why",
        ),
        "power_w": (
            bool(limit) and counters[name] < LOW_POWER_SHARE * (limit or 0.0),
            "agrees with idle SMs: work costs power",
        ),
        "sm_clock_mhz": (counters.get(REASONS) == 0.0, "right: no clock was held down"),
        "gpm_sm_active_pct": (
            is_starved,
            f"decides: {digits(100.0 - active, 3)} % of the SM time had nothing to do",
        ),
    }
    is_small = is_starved and counters[name] < NEARLY_NONE_PCT
    is_told, words = told.get(name, (is_small, "agrees"))
    return words if is_told else ""
