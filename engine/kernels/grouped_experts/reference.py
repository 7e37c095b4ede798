"""The definition of grouped experts in PyTorch: one expert after the other, nothing clever.

Sums in float32, in float64 for float64 rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torch.nn import functional

from engine.errors import BackendError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.grouped_experts.problem import Problem

NO_EXPERT = -1


def run(problem: Problem) -> None:
    """Write `out`; the experts that are hit are read back to the host."""
    if problem.num_splits is not None or problem.workspace is not None:
        raise BackendError(
            "num_splits, workspace: expected None, got a value (reference does not split)"
        )
    M, K = problem.expert_ids.shape
    ids = problem.expert_ids.flatten()  # [M * K]
    weights = problem.expert_weights.flatten().unsqueeze(1)  # [M * K, 1]
    _check_ids(problem, ids)
    order = ids.argsort(stable=True)  # pairs expert by expert, those of none first
    counts = (ids - NO_EXPERT).bincount(minlength=1 + problem.num_experts)
    ends = counts.cumsum(0).tolist()

    parts = weights.new_zeros(M * K, problem.x.shape[1])  # [M * K, hidden]
    for expert, (start, end) in enumerate(pairwise(ends)):
        if start < end:
            pairs = order[start:end]
            parts[pairs] = _expert(problem, expert, pairs // K) * weights[pairs]
    problem.out.copy_(parts.view(M, K, -1).sum(1))  # [M, hidden]


def _expert(problem: Problem, expert: int, rows: Tensor) -> Tensor:
    """Map some rows of x by one expert, [len(rows), hidden]."""
    dtype = problem.expert_weights.dtype
    x = problem.x[rows].to(dtype)  # [n, hidden]
    gate = functional.silu(functional.linear(x, problem.gate.of_expert(expert, dtype)))  # [n, I]
    up = functional.linear(x, problem.up.of_expert(expert, dtype))  # [n, I]
    return functional.linear(gate * up, problem.down.of_expert(expert, dtype))  # [n, hidden]


def _check_ids(problem: Problem, ids: Tensor) -> None:
    least, most = (int(one) for one in ids.aminmax())
    if least < NO_EXPERT or most >= problem.num_experts:
        raise ShapeError(
            f"expert_ids: expected {NO_EXPERT} (none) or 0..{problem.num_experts - 1}, got "
            f"{least}..{most}"
        )
