"""The device clock on a device made of numbers, and against graph-amortised time on a GPU."""

import gc
import os
import re
import shutil
import statistics
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from benchmarks._timing import (
    MAX_SPIN_S,
    CacheFlush,
    ClockError,
    CudaQueue,
    DeviceClock,
    captured,
    overhead_s,
    settled_clock,
)

EVENT_S = 1e-6  # the fake device takes this long to get past a mark
MARK_S = 2e-6  # the fake host takes this long to queue anything


class FakeMark:
    def __init__(self, machine, at_s):
        self.machine, self.at_s = machine, at_s

    def reached(self):
        return self.machine.now_s >= self.at_s

    def wait(self):
        self.machine.now_s = max(self.machine.now_s, self.at_s)

    def seconds_until(self, later):
        return later.at_s - self.at_s


class FakeMachine:
    """A host that takes time to queue and a device that works off its queue in order."""

    def __init__(self):
        self.now_s = 0.0  # of the host
        self.idle_from_s = 0.0  # when the device has nothing left to do

    def run(self, seconds, *, enqueue_s=MARK_S):
        self.now_s += enqueue_s
        self.idle_from_s = max(self.idle_from_s, self.now_s) + seconds

    def spin(self, seconds):
        self.run(seconds)

    def mark(self):
        self.run(EVENT_S)
        return FakeMark(self, self.idle_from_s)


def sample(clock, body):
    clock.start()
    body()
    return clock.stop()


def test_a_sample_is_device_time_however_slowly_it_is_enqueued():
    machine = FakeMachine()
    clock = DeviceClock(machine, spin_s=200e-6)

    seconds = sample(clock, lambda: machine.run(20e-6, enqueue_s=150e-6))

    assert seconds == pytest.approx(20e-6 + EVENT_S)
    assert clock.num_exposed == 0


def test_without_a_spin_the_same_body_would_be_timed_with_its_launch_gap():
    machine = FakeMachine()
    clock = DeviceClock(machine, spin_s=0.0)

    seconds = sample(clock, lambda: machine.run(20e-6, enqueue_s=150e-6))

    assert seconds > 150e-6
    assert clock.num_exposed == 1
    assert clock.validity() == ("exposed_enqueue",)


def test_an_exposed_sample_lengthens_the_next_spin_up_to_a_limit():
    machine = FakeMachine()
    clock = DeviceClock(machine, spin_s=1e-3)

    for _ in range(10):
        sample(clock, lambda: machine.run(1e-6, enqueue_s=1.0))

    assert clock.num_exposed == 10
    assert clock.spin_s == MAX_SPIN_S


def test_a_settled_clock_exposes_no_sample_of_its_body():
    machine = FakeMachine()

    def body():
        machine.run(20e-6, enqueue_s=3e-3)

    clock = settled_clock(machine, body)

    assert clock.validity() == ()
    assert sample(clock, body) == pytest.approx(20e-6)  # without the distance of empty marks


def test_a_body_that_waits_for_the_device_is_never_called_hidden():
    machine = FakeMachine()

    def body():
        machine.run(20e-6)
        machine.now_s = max(machine.now_s, machine.idle_from_s)

    clock = settled_clock(machine, body, most_runs=12)

    assert clock.num_exposed == 1
    assert clock.spin_s == MAX_SPIN_S


def test_overhead_is_what_an_empty_body_takes():
    assert overhead_s(FakeMachine()) == pytest.approx(EVENT_S)


def test_a_clock_that_was_not_started_cannot_stop():
    clock = DeviceClock(FakeMachine())
    sample(clock, lambda: None)

    with pytest.raises(ClockError, match="expected start before stop"):
        clock.stop()


@triton.jit
def arithmetic(out, rounds, lanes: tl.constexpr):
    value = tl.arange(0, lanes).to(tl.float32)
    for _ in range(rounds):
        value = value * 0.999 + 0.5
    tl.store(out + tl.program_id(0) * lanes + tl.arange(0, lanes), value)


@triton.jit
def chase(out, links, hops):
    place = tl.load(links)
    for _ in range(hops):
        place = tl.load(links + place)
    tl.store(out, place)


def launch(rounds):
    """Return a launch of a kernel whose time no cache decides."""
    out = torch.empty(132, 128, device="cuda")
    return lambda: arithmetic[(132,)](out, rounds, lanes=128, num_warps=4)


gpu = pytest.mark.gpu
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@gpu
@no_gpu
def test_a_kernel_of_twenty_microseconds_agrees_with_ncu_within_five_percent():
    ncu = shutil.which("ncu")
    assert ncu, "expected Nsight Compute's ncu on the path, found none"
    trial = launch(4096)
    clock = settled_clock(CudaQueue(), trial)
    rounds = round(4096 * 20e-6 / statistics.median(sample(clock, trial) for _ in range(21)))
    body = launch(rounds)
    ours_us = 1e6 * statistics.median(sample(clock, body) for _ in range(101))

    report = subprocess.run(
        [ncu, "--clock-control", "none", "--cache-control", "none", "-k", "arithmetic",
         "--metrics", "gpu__time_duration.sum", sys.executable, __file__, str(rounds)],
        cwd=Path(__file__).parent.parent, env={**os.environ, "PYTHONPATH": "."},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    times = re.findall(r"gpu__time_duration.sum\s+(ns|us|nsecond|usecond)\s+([\d.,]+)", report)
    ncu_us = statistics.median(
        float(value.replace(",", "")) * (1e-3 if unit.startswith("n") else 1.0)
        for unit, value in times
    )

    sys.stderr.write(f"\nours {ours_us:.2f} us, ncu {ncu_us:.2f} us, {len(times)} launches\n")
    assert 15 < ncu_us < 25
    assert ours_us == pytest.approx(ncu_us, rel=0.05)


@gpu
@no_gpu
def test_a_captured_call_keeps_its_operands():
    operand = torch.ones(1 << 20, device="cuda")
    kept, result = weakref.ref(operand), torch.zeros((), device="cuda")
    replay = captured(partial(torch.sum, operand, dim=0, out=result))
    del operand
    gc.collect()
    torch.cuda.empty_cache()  # which would unmap what nobody keeps

    replay()

    assert kept() is not None
    assert result.item() == 1 << 20


@gpu
@no_gpu
def test_a_flush_leaves_nothing_of_the_last_sample_in_the_cache():
    """A chain of reads, each naming the next one's place, takes what one read takes, many times.

    That is the latency of the cache or of the memory, several times as long, whatever a launch
    costs and however fast many reads at once would be. The best of many samples is compared, so
    that whoever else uses the device cannot make a warm chain look cold.
    """
    hops, line = 1024, 1024  # places 8 KiB apart: none in another's line, all in an L2
    order = torch.randperm(hops, generator=torch.Generator().manual_seed(0)) * line
    links = torch.zeros(hops * line, dtype=torch.int64)
    links[order] = order.roll(-1)
    links, out = links.to("cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    flush, clock = CacheFlush.of("cuda"), DeviceClock(CudaQueue())

    def body():
        chase[(1,)](out, links, hops, num_warps=1)

    def cold():
        flush()
        return sample(clock, body)

    body()  # compiles
    warm_s = min(sample(clock, body) for _ in range(51))
    cold_s = min(cold() for _ in range(51))

    assert out.item() in order
    assert cold_s > 1.5 * warm_s


if __name__ == "__main__":
    profiled = launch(int(sys.argv[1]))
    for _ in range(20):
        profiled()
    torch.cuda.synchronize()
