"""The definition of mla_rows in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.mla_rows.problem import Problem


def run(problem: Problem) -> None:
    """Write the rows and the queries."""
    C, R = problem.value_dim, problem.rope_dim
    c_kv = functional.rms_norm(problem.kv_a[:, :C], (C,), problem.norm_weight, problem.eps)
    k_rope = rotate(problem.kv_a[:, C:], problem.cos, problem.sin)
    problem.rows.index_copy_(0, problem.slots, torch.cat((c_kv, k_rope), dim=-1))
    angles = (problem.cos.unsqueeze(1), problem.sin.unsqueeze(1))  # of all heads
    problem.out[..., C:] = rotate(problem.queries[..., -R:], *angles)
    absorbed = problem.out[..., :C].transpose(0, 1)  # [H, M, C]
    torch.bmm(problem.queries[..., :-R].transpose(0, 1), problem.up_keys, out=absorbed)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of the last dim by their angles."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)
