"""A process that serves asv on a GPU that is a trace: one suite, one case for each trace it is given.

Usage: watched_cases.py FOLDER TRACE...; the sidecar lines say what came of it. A trace that is given
again is the same case in a later process of the run. `--cost` instead of a trace measures what
telemetry costs the case, into cost.json.
"""

import json
import os
import sys
import time
from dataclasses import asdict
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
from benchmarks._case_end import SERVES_VARIABLE, end_case  # noqa: E402
from benchmarks._telemetry_cost import Trial, differences  # noqa: E402


class Watched(_suite._Suite):
    """A case whose trace begins with its process."""

    version = "1"
    params = ([],)
    param_names = ("trace",)

    def build(self, trace):
        folder = Path(sys.argv[1])
        fault = "" if trace == "cost" else f":{TRACES / trace}.txt"
        os.environ["FAKE_NVML_TRACE"] = f"{HEALTHY}{fault}"
        opened = folder / f"{trace}.opened"
        opened.unlink(missing_ok=True)
        os.environ["FAKE_NVML_OPENED"] = str(opened)

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
    end_case()


def measure_cost():
    """Compare a healthy case with itself under telemetry, two pairs of two samples."""
    trial = Trial(Watched(), ["cost"])
    found = differences(trial, num_pairs=2, num_samples=2, least_s=0.0, window_s=0.1)
    text = json.dumps({name: asdict(one) for name, one in found.items()})
    Path(sys.argv[1], "cost.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _suite.DEVICE = "cuda"
    os.environ[SERVES_VARIABLE] = "1"
    for name in sys.argv[2:]:
        if name == "--cost":
            measure_cost()
        else:
            measure(name)
