"""The definition of skinny_linear in PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.skinny_linear.problem import Problem


def run(problem: Problem) -> None:
    """Write `out`."""
    if problem.gates_out:
        H, M, N = problem.out.shape
        whole = problem.weight.new_empty(H, M, 2 * N)
        run(replace(problem, gates_out=False, out=whole))
        problem.out.copy_(_gated(whole))
        return
    x, weight, out = _activated(problem), problem.weight.transpose(1, 2), problem.out
    if out.dtype != weight.dtype:
        if len(weight) == 1 and weight.device.type == "cuda":
            # Products of sixteen-bit numbers are exact in float32: nothing is widened first.
            out[0].copy_(torch.ops.aten.mm.dtype(x[0], weight[0], out.dtype))
            return
        x, weight = x.to(out.dtype), weight.to(out.dtype)
    if len(weight) == 1:
        torch.mm(x[0], weight[0], out=out[0])
    else:
        torch.bmm(x, weight, out=out)


def _activated(problem: Problem) -> Tensor:
    """Return what is multiplied, of the weight's dtype."""
    x, norm_weight = problem.x.to(problem.weight.dtype), problem.norm_weight
    if norm_weight is not None:
        return functional.rms_norm(x, norm_weight.shape, norm_weight, problem.eps)
    if problem.is_gated:
        return _gated(x)
    return x


def _gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
