"""A process of asv's on a GPU that is a trace: one suite, one case for each trace it is given.

Usage: watched_cases.py FOLDER TRACE...; the sidecar lines say what came of it.
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

TRACES = Path(__file__).parent / "nvml_traces"
HEALTHY = TRACES / "serial_64k.txt"
UUID = "00000000-1111-2222-3333-444444444444"

# All that a watched case asks torch of its GPU; the body below needs none.
torch.cuda.current_device = lambda: 0
torch.cuda.synchronize = lambda: None
torch.cuda.get_device_properties = lambda _: SimpleNamespace(
    name="NVIDIA H200", uuid=UUID, multi_processor_count=132
)

from benchmarks import _suite  # noqa: E402 - after torch was prepared


class Watched(_suite._Suite):
    """A case whose trace begins with its process."""

    version = "1"
    params = ([],)
    param_names = ("trace",)

    def build(self, trace):
        folder = Path(sys.argv[1])
        os.environ["FAKE_NVML_TRACE"] = f"{HEALTHY}:{TRACES / trace}.txt"
        os.environ["FAKE_NVML_OPENED"] = str(folder / f"{trace}.opened")

    def time_sleep(self, trace):
        time.sleep(0.002)


def measure(trace):
    """Take two samples the way asv does."""
    suite = Watched()
    for _ in range(2):
        suite.setup(trace)
        suite.timer()
        suite.time_sleep(trace)
        suite.timer()


if __name__ == "__main__":
    _suite.DEVICE = "cuda"
    for name in sys.argv[2:]:
        measure(name)
