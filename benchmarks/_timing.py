"""Device time of one body without the launch gap, for bodies that never wait for the device.

An event recorded before the body and one after it also time the host: while Python enqueues the
body, the device sits idle between the two, for as long as the kernels to be told apart take. So
`start` first queues a kernel that only spins; behind it the event, the body and the second event
pile up, and the device runs from the first event to the second without waiting for anybody::

    host    spin · event ·  body enqueued   · event · wait
    device  └──── spinning ───────────────────────┘ event │ body │ event

The sample is *exposed* if the first event was reached before the second one was queued: then the
device may have waited. The clock counts it, and spins twice as long from there on. A body that
waits for the device itself (`.item()`, a copy to the host) is exposed whatever the spin: time it
by the wall.

Two events with nothing between them are a microsecond or two apart. `overhead_s` measures that
constant, and the clock that `settled_clock` returns subtracts it.

Caches: a body that reads what it read in the last sample finds it in L2. `CacheFlush` belongs
into `reset`, outside the timed region, and its benchmark says so in its name (cold). The spin
comes after it, and touches no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch

INITIAL_SPIN_S: Final = 200e-6  # enqueues a graph replay or a few launches with room to spare
MAX_SPIN_S: Final = 0.05  # a body that takes longer to enqueue is no device case
CALIBRATION_CYCLES: Final = 10_000_000  # a few milliseconds: launch gaps are nothing in it
L2_MULTIPLE: Final = 4  # times its size read, so that nothing of the last sample survives
CPU_FLUSH_BYTES: Final = 64 << 20  # a CPU does not say what its last level holds for one core


class ClockError(Exception):
    """A clock that was stopped before it was started."""


class Mark(Protocol):
    """A point in a device's queue."""

    def reached(self) -> bool:
        """Say whether the device has come this far, without waiting."""

    def wait(self) -> None:
        """Wait until the device has come this far."""

    def seconds_until(self, later: "Mark") -> float:
        """Return the device seconds from here to `later`; both must have been reached."""


class DeviceQueue(Protocol):
    """Work queued for a device, in order."""

    def spin(self, seconds: float) -> None:
        """Queue a kernel that keeps the device busy for about this long."""

    def mark(self) -> Mark:
        """Queue a mark."""


class DeviceClock:
    """Clock of a `_Suite` whose body only queues work; see the module for what a sample is."""

    kind = "cuda_events"

    def __init__(
        self, queue: DeviceQueue, *, spin_s: float = INITIAL_SPIN_S, overhead_s: float = 0.0
    ) -> None:
        self._queue = queue
        self._overhead_s = overhead_s  # of two marks with nothing between them; subtracted
        self._started: Mark | None = None
        self.spin_s = spin_s
        self.num_exposed = 0  # samples in which the device may have waited for the host

    def start(self) -> None:
        """Queue the spin and the first mark."""
        self._queue.spin(self.spin_s)
        self._started = self._queue.mark()

    def stop(self) -> float:
        """Queue the second mark, wait for it and return the device seconds between the two."""
        if self._started is None:
            raise ClockError("device clock: expected start before stop, got stop")
        started, self._started = self._started, None
        ended = self._queue.mark()
        if started.reached():
            self.num_exposed += 1
            self.spin_s = min(2 * self.spin_s, MAX_SPIN_S)
        ended.wait()
        return started.seconds_until(ended) - self._overhead_s

    def validity(self) -> tuple[str, ...]:
        """Say whether the device may have waited for the host in some sample."""
        return ("exposed_enqueue",) if self.num_exposed else ()


def settled_clock(
    queue: DeviceQueue, body: Callable[[], object], *, most_runs: int = 16
) -> DeviceClock:
    """Return a clock whose spin hides the enqueue of `body`, found by running it.

    After `most_runs` the clock is returned as it is; its `num_exposed` then tells.
    """
    clock = DeviceClock(queue, overhead_s=overhead_s(queue))
    for _ in range(most_runs):
        clock.num_exposed = 0
        clock.start()
        body()
        clock.stop()
        if not clock.num_exposed:
            break
    return clock


def overhead_s(queue: DeviceQueue, *, num_samples: int = 50) -> float:
    """Return the median seconds of an empty body: what lies between two marks by themselves."""
    clock = DeviceClock(queue)
    samples_s = []
    for _ in range(num_samples):
        clock.start()
        samples_s.append(clock.stop())
    return sorted(samples_s)[num_samples // 2]


class _CudaMark:
    """A CUDA event with time."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_until(self, later: Mark) -> float:
        if not isinstance(later, _CudaMark):
            raise ClockError(f"mark: expected one of the same queue, got {type(later).__name__}")
        return float(self.event.elapsed_time(later.event)) / 1e3


class CudaQueue:
    """The current stream of the current CUDA device."""

    def __init__(self) -> None:
        self._cycles_per_s = _calibrate()

    def spin(self, seconds: float) -> None:
        """Queue a kernel that counts clock cycles."""
        _spin_cycles(round(seconds * self._cycles_per_s))

    def mark(self) -> Mark:
        """Record an event."""
        return _CudaMark()


def _spin_cycles(cycles: int) -> None:
    """Queue torch's kernel that waits for the clock; torch has no public one."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001


def _calibrate() -> float:
    """Return cycles a second of the spinning kernel, at the clock of a device that is busy."""
    rates = []
    for _ in range(3):  # the first one finds the device asleep
        before = _CudaMark()
        _spin_cycles(CALIBRATION_CYCLES)
        after = _CudaMark()
        after.wait()
        rates.append(CALIBRATION_CYCLES / before.seconds_until(after))
    return max(rates)


@dataclass(frozen=True, slots=True)
class CacheFlush:
    """Reads more than the caches hold, so that the next body finds nothing of the last there.

    A write would do so too, but leave dirty lines, and the body would pay for writing them back.
    """

    scratch: torch.Tensor
    read: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, device: str) -> "CacheFlush":
        """Make room for several times the L2 of a CUDA device, or the last level of a CPU."""
        if device == "cpu":
            return cls(torch.ones(CPU_FLUSH_BYTES // 4), torch.sum)
        from benchmarks._streaming_read import SPAN, streaming_read  # noqa: PLC0415 - needs Triton

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        spans = -(-L2_MULTIPLE * int(properties.L2_cache_size) // (4 * SPAN))
        return cls(torch.ones(spans * SPAN, device=device), streaming_read)

    def __call__(self) -> None:
        """Queue the read; it ends before whatever is queued after it begins."""
        self.read(self.scratch)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture the call in a CUDA graph and return its replay.

    The graph owns the results. The operands are only addresses to it: what is returned keeps them.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return partial(_replayed, graph, call)


def _replayed(graph: torch.cuda.CUDAGraph, call: Callable[[], Any]) -> None:
    del call  # kept by the caller's partial for the tensors it holds
    graph.replay()
