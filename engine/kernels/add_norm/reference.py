"""The definition of add_norm in PyTorch."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from engine.kernels.add_norm.problem import Problem


def run(problem: Problem) -> None:
    """Write the sum, if there is something to add, and its norm."""
    weight, total = problem.norm_weight, problem.total
    if problem.addends:
        total.copy_(problem.x + reduce(add, problem.addends))
    problem.normed.copy_(functional.rms_norm(total, weight.shape, weight, problem.eps))
