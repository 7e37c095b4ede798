"""Device time of queued work, free of the host's launch gap.

An event recorded, waited for and read around a launch also times the host: the device sits idle
between the first event and the kernel. So a sample is queued as a whole behind a spin::

    host     spin  start  body            end   | wait
    device   ~~~~~~~~~~~~~~~~~~~~~  start  body  end
                                    └── seconds ──┘

When the host has queued `end`, `start` must still lie ahead of the device. If it does not, the body
may have waited for the host: the sample is counted in `num_exposed` and the next spin is longer.
Two events with nothing between them are some time apart, too: `overhead_s`, which is subtracted.
"""

import statistics
from collections.abc import Callable
from typing import Final, Protocol

import torch

FIRST_SPIN_CYCLES: Final = 200_000  # 0.1 ms at 2 GHz
MAX_SPIN_CYCLES: Final = 400_000_000  # 0.2 s: a body that takes longer to queue should be a graph
HIDDEN_RUNS: Final = 5  # in a row, until a spin counts as long enough
MARGIN: Final = 2  # times that spin, against a host that is slow for once
OVERHEAD_SAMPLES: Final = 51
FLUSH_BYTES: Final = 512 << 20  # several times the L2 of any card


class TimingError(Exception):
    """A body that cannot be timed this way."""


class Queue(Protocol):
    """The stream a sample is queued on, with two events of its own."""

    def spin(self, cycles: int) -> None:
        """Queue a kernel that keeps the device busy for about `cycles` clock cycles."""

    def record_start(self) -> None:
        """Queue the first event."""

    def record_end(self) -> None:
        """Queue the second event."""

    def reached_start(self) -> bool:
        """Whether the device has passed the first event already."""

    def wait_s(self) -> float:
        """Wait for the second event and return the seconds between both."""


class CudaQueue:
    """torch's current CUDA stream."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def spin(self, cycles: int) -> None:
        """Queue torch's own spin kernel; it has no public one."""
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # noqa: SLF001

    def record_start(self) -> None:
        """Record on the current stream."""
        self._start.record()

    def record_end(self) -> None:
        """Record on the current stream."""
        self._end.record()

    def reached_start(self) -> bool:
        """Ask without waiting."""
        return bool(self._start.query())  # type: ignore[no-untyped-call]

    def wait_s(self) -> float:
        """Block the host until the second event, then read their distance."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3


class QueuedClock:
    """Seconds the device needs for a body that only queues work.

    Parameters
    ----------
    queue : Queue
    body : callable
        Run some times at first, to find a spin that hides its queueing.

    Raises
    ------
    TimingError
        No spin up to `MAX_SPIN_CYCLES` hides it.
    """

    kind = "cuda_events"

    def __init__(self, queue: Queue, body: Callable[[], object]) -> None:
        self._queue = queue
        self._spin_cycles = FIRST_SPIN_CYCLES
        self.num_exposed = 0
        self.overhead_s = 0.0
        self.overhead_s = statistics.median(
            self._run(lambda: None) for _ in range(OVERHEAD_SAMPLES)
        )
        self._lengthen_until_hidden(body)
        self.num_exposed = 0

    def start(self) -> None:
        """Queue the spin and the first event."""
        self._queue.spin(self._spin_cycles)
        self._queue.record_start()

    def stop(self) -> float:
        """Queue the second event, wait for it, return the seconds between both less overhead."""
        self._queue.record_end()
        if self._queue.reached_start():
            self.num_exposed += 1
            self._lengthen()
        return self._queue.wait_s() - self.overhead_s

    def _run(self, body: Callable[[], object]) -> float:
        self.start()
        body()
        return self.stop()

    def _lengthen_until_hidden(self, body: Callable[[], object]) -> None:
        hidden = 0
        while hidden < HIDDEN_RUNS:
            exposed = self.num_exposed
            self._run(body)
            hidden = hidden + 1 if self.num_exposed == exposed else 0
        self._spin_cycles = min(MARGIN * self._spin_cycles, MAX_SPIN_CYCLES)

    def _lengthen(self) -> None:
        if self._spin_cycles >= MAX_SPIN_CYCLES:
            raise TimingError(
                f"spin: expected a body queued within {MAX_SPIN_CYCLES} cycles, got one that takes "
                "longer (capture it in a CUDA graph)"
            )
        self._spin_cycles = min(2 * self._spin_cycles, MAX_SPIN_CYCLES)


class ColdL2:
    """Fills the L2 with rows of its own, so that the next body finds nothing of its inputs there.

    It reads: a write would leave dirty lines, and the body would pay for writing them back.
    """

    def __init__(self) -> None:
        from benchmarks._streaming_read import SPAN  # noqa: PLC0415 - needs Triton

        self._rows = torch.ones(FLUSH_BYTES // 4 // SPAN * SPAN, device="cuda")

    def flush(self) -> None:
        """Queue one read of more bytes than the L2 holds."""
        from benchmarks._streaming_read import streaming_read  # noqa: PLC0415 - needs Triton

        streaming_read(self._rows)
