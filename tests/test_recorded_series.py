"""What the detector says of our own cases, recorded at one commit, and of a step planted in them."""

import json
from pathlib import Path

import numpy as np
import pytest

import benchmarks
from tests.replay import alarms
from tests.replay_detectors import ours
from tests.replay_series import Noise

RECORDED = Path(benchmarks.__file__).parent / "recorded" / "h200-series"
KERNELS = json.loads((RECORDED / "kernels.json").read_text("utf-8"))["cases"]
DELAY, NEAR = 5, 3  # commits


def noise(case, *, step=1.0, at=0):
    values = np.array(case["values"])
    values[at:] *= step
    return Noise(values, {"spread": np.array(case["spread"])})


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_raised_where_nothing_changed(name):
    assert len(KERNELS[name]["values"]) > 50
    assert alarms(ours, noise(KERNELS[name])) == []


@pytest.mark.parametrize("name", KERNELS)
def test_a_step_in_the_middle_is_found_there(name):
    at, step = len(KERNELS[name]["values"]) // 2, 1.05 if "(1024" in name else 1.02

    raised = alarms(ours, noise(KERNELS[name], step=step, at=at))

    assert [abs(index - at) <= NEAR and seen - at <= DELAY for index, seen in raised] == [True]
