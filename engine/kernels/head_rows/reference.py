"""The definition of head_rows in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.head_rows.problem import Problem


def run(problem: Problem) -> None:
    """Write the block's rows and its queries."""
    (N, heads, S, _), D = problem.block.shape, problem.queries.shape[-1]
    queries = _turned(problem, problem.queries, problem.query_norm)
    of_keys = queries.view(N, S, heads, -1, D).permute(0, 2, 3, 1, 4)  # [N, H_kv, G, S, D]
    problem.out.view(of_keys.shape).copy_(of_keys)
    keys = _turned(problem, problem.keys, problem.key_norm)
    rows = torch.cat((problem.values, keys), dim=-1)
    problem.block.copy_(rows.view(N, S, heads, 2 * D).transpose(1, 2))


def _turned(problem: Problem, x: Tensor, norm: Tensor) -> Tensor:
    """Normalise heads [M, heads, D], then turn their pairs (i, i + D / 2)."""
    normed = functional.rms_norm(x, norm.shape, norm, problem.eps)
    cos, sin = problem.cos.unsqueeze(1), problem.sin.unsqueeze(1)  # of all heads
    first, second = normed.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
