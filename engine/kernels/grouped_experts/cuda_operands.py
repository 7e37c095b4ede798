"""What the CUDA kernels of grouped experts take, and the refusal of anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.errors import BackendError
from engine.kernels.machine import check_arch
from engine.kernels.operands import COPY_BYTES, is_copyable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from engine.kernels.grouped_experts.problem import Problem, Projection

ARCHS = (90, 100, 120)
GROUP = 32  # inputs that share a scale
INPUTS = 256  # of a turn of the kernels' loops
MOST_EXPERTS = 1024


def check(problem: Problem) -> None:
    """Refuse what the kernels cannot run."""
    x = problem.x
    check_arch(x.device, ARCHS, "moe backend cuda")
    check_rows(problem)
    operands = {"x": x, "out": problem.out}
    for name, projection in projections(problem):
        operands |= {name: projection.values, f"{name}_scale": scale_of(projection)}
    for name, tensor in operands.items():
        if not is_copyable(tensor):
            raise BackendError(
                f"moe backend cuda: expected {name} to begin at, and step by, multiples of "
                f"{COPY_BYTES} bytes (its copies), got strides {tensor.stride()}"
            )


def check_rows(problem: Problem) -> None:
    """Refuse dtypes and sizes that the kernels do not take."""
    if problem.x.dtype != torch.bfloat16:
        raise BackendError(f"moe backend cuda: expected bfloat16 rows, got {problem.x.dtype}")
    for name, projection in projections(problem):
        found = projection.group_size, None if projection.scale is None else projection.scale.dtype
        if found != (GROUP, torch.bfloat16):
            raise BackendError(
                f"moe backend cuda: expected {name} in int4 with bfloat16 scales of {GROUP} "
                f"inputs, got groups of {found[0]} with scales of {found[1]}"
            )
    widths = problem.x.shape[1], problem.inner
    if any(width % INPUTS for width in widths):
        raise BackendError(
            f"moe backend cuda: expected hidden and inner to be multiples of {INPUTS}, got "
            f"{widths[0]} and {widths[1]}"
        )
    if problem.num_experts > MOST_EXPERTS:
        raise BackendError(
            f"moe backend cuda: expected at most {MOST_EXPERTS} experts, got {problem.num_experts}"
        )
    if problem.num_splits is not None:
        raise BackendError("num_splits: expected None, got a value (cuda cuts the work itself)")


def projections(problem: Problem) -> Iterator[tuple[str, Projection]]:
    """Return gate, up and down with their names."""
    yield from (("gate", problem.gate), ("up", problem.up), ("down", problem.down))


def scale_of(projection: Projection) -> Tensor:
    """Return the scales, which must be there."""
    if projection.scale is None:
        raise BackendError("moe backend cuda: expected scales beside the weights, got None")
    return projection.scale
