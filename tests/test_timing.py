"""The queued clock on a simulated device: what it counts, what it subtracts, when it gives up."""

import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from benchmarks._timing import MAX_SPIN_CYCLES, ColdL2, CudaQueue, QueuedClock, TimingError

CYCLE_S = 1e-9
EVENT_GAP_S = 1.3e-6  # between two events with nothing between them


class Simulation:
    """A host and a device with clocks of their own; the device runs what the host has queued."""

    def __init__(self):
        self.host_s = self.device_s = self.start_s = self.end_s = 0.0

    def queue(self, seconds):
        self.device_s = max(self.device_s, self.host_s) + seconds

    def spin(self, cycles):
        self.queue(cycles * CYCLE_S)

    def record_start(self):
        self.queue(0.0)
        self.start_s = self.device_s

    def record_end(self):
        self.queue(EVENT_GAP_S)
        self.end_s = self.device_s

    def reached_start(self):
        return self.host_s >= self.start_s

    def wait_s(self):
        self.host_s = max(self.host_s, self.end_s)
        return self.end_s - self.start_s

    def body(self, *, host_s, device_s):
        self.host_s += host_s
        self.queue(device_s)


def sample(clock, body):
    clock.start()
    body()
    return clock.stop()


@pytest.mark.parametrize("host_s", [0.0, 90e-6, 3e-3])
def test_a_sample_is_the_device_time_however_slow_the_host(host_s):
    device = Simulation()

    def body():
        device.body(host_s=host_s, device_s=20e-6)

    clock = QueuedClock(device, body)

    assert sample(clock, body) == pytest.approx(20e-6, rel=1e-6)
    assert clock.num_exposed == 0


def test_a_plain_event_pair_would_have_timed_the_host():
    device = Simulation()
    device.record_start()
    device.body(host_s=90e-6, device_s=20e-6)
    device.record_end()

    assert device.wait_s() > 4 * 20e-6


def test_an_exposed_sample_is_counted_and_the_next_one_hidden():
    device = Simulation()
    clock = QueuedClock(device, lambda: device.body(host_s=90e-6, device_s=20e-6))

    slow = sample(clock, lambda: device.body(host_s=600e-6, device_s=20e-6))
    after = sample(clock, lambda: device.body(host_s=600e-6, device_s=20e-6))

    assert clock.num_exposed == 1
    assert slow > 25e-6
    assert after == pytest.approx(20e-6, rel=1e-6)


def test_a_body_that_no_spin_hides_is_refused():
    device = Simulation()

    with pytest.raises(TimingError, match="capture it in a CUDA graph"):
        QueuedClock(
            device, lambda: device.body(host_s=2 * MAX_SPIN_CYCLES * CYCLE_S, device_s=20e-6)
        )


@triton.jit
def arithmetic(out, rounds, lanes: tl.constexpr):
    value = tl.arange(0, lanes).to(tl.float32)
    for _ in range(rounds):
        value = value * 0.999 + 0.5
    tl.store(out + tl.program_id(0) * lanes + tl.arange(0, lanes), value)


def launch(rounds):
    out = torch.empty(132, 128, device="cuda")
    return lambda: arithmetic[(132,)](out, rounds, lanes=128, num_warps=4)


def about_20_us(rounds=4096):
    """Return a kernel of about 20 us, whose time no cache decides."""
    body = launch(rounds)
    body()
    clock = QueuedClock(CudaQueue(), body)
    once_s = statistics.median(sample(clock, body) for _ in range(21))
    return round(rounds * 20e-6 / once_s)


@pytest.mark.gpu
def test_a_20_us_kernel_is_timed_within_5_percent_of_ncu():
    ncu = shutil.which("ncu")
    assert ncu, "expected Nsight Compute's ncu on the path, found none"
    rounds = about_20_us()
    body = launch(rounds)
    clock = QueuedClock(CudaQueue(), body)
    ours_us = 1e6 * statistics.median(sample(clock, body) for _ in range(101))

    report = subprocess.run(
        [ncu, "--clock-control", "none", "--cache-control", "none", "-k", "arithmetic",
         "--metrics", "gpu__time_duration.sum", sys.executable, __file__, str(rounds)],
        cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    times = re.findall(r"gpu__time_duration.sum\s+(\S+)\s+([\d.,]+)", report)
    scale = {"ns": 1e-3, "us": 1.0, "usecond": 1.0, "nsecond": 1e-3}
    ncu_us = statistics.median(scale[unit] * float(value) for unit, value in times)

    sys.stderr.write(f"\nours {ours_us:.2f} us, ncu {ncu_us:.2f} us, {len(times)} launches\n")
    assert 15 < ncu_us < 25
    assert abs(ours_us / ncu_us - 1) < 0.05


@pytest.mark.gpu
def test_a_cold_body_pays_for_its_reads():
    rows = torch.ones(4 << 20, device="cuda")
    body = rows.sum
    clock, cold = QueuedClock(CudaQueue(), body), ColdL2()

    def median_s(*, flush):
        times = []
        for _ in range(31):
            if flush:
                cold.flush()
            times.append(sample(clock, body))
        return statistics.median(times)

    assert median_s(flush=True) > 1.1 * median_s(flush=False)


if __name__ == "__main__":
    run = launch(int(sys.argv[1]))
    for _ in range(20):
        run()
    torch.cuda.synchronize()
