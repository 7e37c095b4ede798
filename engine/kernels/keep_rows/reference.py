"""The definition of keep_rows in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from engine.kernels.keep_rows.problem import Problem


def run(problem: Problem) -> None:
    """Write the rows at their places."""
    one, wide = problem, problem.cos.dtype
    normed = functional.rms_norm(one.keys.to(wide), one.key_norm.shape, eps=one.eps)
    first, second = (normed * one.key_norm.to(wide)).chunk(2, dim=-1)
    cos, sin = one.cos.unsqueeze(1), one.sin.unsqueeze(1)  # of all heads
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    new = torch.cat((one.values, turned.to(one.keys.dtype)), dim=-1)  # [M, H_kv, 2 * D]
    one.rows.index_copy_(0, one.places, new.flatten(0, 1))
