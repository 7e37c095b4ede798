"""What one body asks of the device: launches, waits, copies, and the time some kernel ran.

Counted by torch's profiler, whose own cost is in no time but its own: compare `busy_s` with a time
measured without it. Kernels of a replayed graph are counted one by one, their launch once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_LAUNCHES: Final = ("LaunchKernel", "GraphLaunch")
_WAITS: Final = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
_COPIES: Final = ("Memcpy", "Memset")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel."""

    name: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What one body asked of the device."""

    launches: int  # a graph's replay is one
    waits: int
    copies_up: int  # from host to device
    copies_back: int
    kernels: int
    busy_s: float  # some kernel or copy ran
    slowest: tuple[KernelTime, ...]  # the most seconds first


def device_work(body: Callable[[], object], *, own_waits: int, most_kernels: int) -> DeviceWork:
    """Profile `body` once; `own_waits` are those that are only there to measure it."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        body()
    names: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for event in profiler.events() or ():
        if not str(event.device_type).endswith("CUDA"):
            names[event.name] += 1
            continue
        span = event.time_range
        spans.append((span.start, span.end))
        seconds[event.name].append(span.elapsed_us() / 1e6)
    return DeviceWork(
        launches=_count(names, _LAUNCHES),
        waits=_count(names, _WAITS) - own_waits,
        copies_up=sum(len(times) for name, times in seconds.items() if "HtoD" in name),
        copies_back=sum(len(times) for name, times in seconds.items() if "DtoH" in name),
        kernels=sum(len(times) for name, times in seconds.items() if not name.startswith(_COPIES)),
        busy_s=covered(spans) / 1e6,
        slowest=_slowest(seconds, most_kernels),
    )


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how much the spans cover together, overlaps once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _slowest(seconds: dict[str, list[float]], most: int) -> tuple[KernelTime, ...]:
    times = [KernelTime(name, len(each), sum(each)) for name, each in seconds.items()]
    return tuple(sorted(times, key=lambda time: -time.seconds)[:most])


def _count(names: Counter[str], parts: Sequence[str]) -> int:
    return sum(count for name, count in names.items() if any(part in name for part in parts))
