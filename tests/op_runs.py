"""Where the tests of an op run its backends: the reference and, in two places, the kernels.

As attention_runs.py says, Triton backends run in Triton's interpreter and on a CUDA device.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.attention_runs import INTERPRETED, ON_GPU

# The interpreter cuts bits off where a device rounds to bfloat16.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.bfloat16)

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_kernel_run = pytest.mark.parametrize(
    "device", ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=ON_GPU)]
)


@dataclass(frozen=True)
class OpRuns:
    """An op's cases and the places its backends run in, as marks of tests."""

    plain: list[tuple[str, str]]  # device and backend
    every_run: Any
    every_case: Any


def runs_of(op, names=("reference", "triton")):
    """Runs of the backends `names`, those that take any operands the op is defined for."""
    plain = [("cpu", "reference"), *(("cuda", name) for name in names)]
    if INTERPRETED:
        plain = [("cpu", "triton")]
    runs = [pytest.param(*run, marks=ON_GPU if run[0] == "cuda" else ()) for run in plain]
    return OpRuns(
        plain,
        pytest.mark.parametrize(("device", "backend"), runs),
        pytest.mark.parametrize("case", op.cases, ids=lambda case: case.name),
    )
