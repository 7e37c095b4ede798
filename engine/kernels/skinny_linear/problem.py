"""One checked call of skinny_linear, with room for its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ShapeError
from engine.kernels.operands import check_device, check_tensor

MOST_ROWS = 32  # that `cuda` takes: with more a product is no longer the reading of its weights
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call, each with a dim of heads; `out` is there to be written."""

    x: Tensor  # [H, M, inputs], twice as wide where gated
    weight: Tensor  # [H, N, inputs]
    norm_weight: Tensor | None  # [inputs]
    eps: float
    is_gated: bool
    gates_out: bool
    out: Tensor  # [H, M, N], half as wide where the product is gated

    @property
    def inputs(self) -> int:
        """Numbers a product sums over."""
        return self.weight.shape[-1]


def pose(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None,
    eps: float,
    is_gated: bool,
    gates_out: bool,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Problem:
    """Check the arguments of `skinny_linear` and allocate the result if it was left out."""
    if x.dim() != weight.dim() or x.dim() not in (2, 3):
        raise ShapeError(
            f"x, weight: expected both of 2 dims or both of 3, got {list(x.shape)} and "
            f"{list(weight.shape)} (heads are the first of three)"
        )
    if (is_gated or gates_out) and norm_weight is not None:
        raise ShapeError("norm_weight: expected None beside a gate, got a tensor")
    has_heads = x.dim() == 3
    if not has_heads:
        x, weight = x.unsqueeze(0), weight.unsqueeze(0)
    check_tensor("weight", weight, (None, None, None), _DTYPES)
    (H, N, inputs), dtype = weight.shape, weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    width = 2 * inputs if is_gated else inputs
    check_tensor("x", x, (H, None, width), (dtype, wide) if is_gated else (dtype,))
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (inputs,), (dtype,))
    if gates_out and N % 2:
        raise ShapeError(f"weight: expected an even number of outputs, got {N} (gate and up)")
    shape = (H, x.shape[1], N // 2 if gates_out else N)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype or dtype, device=x.device)
    elif not has_heads and out.dim() == 2:
        out = out.unsqueeze(0)
    check_tensor("out", out, shape, (out_dtype,) if out_dtype else (dtype, wide))
    if out.dtype not in (dtype, wide):
        raise ShapeError(f"out_dtype: expected {dtype} or {wide}, got {out.dtype}")
    check_device(x.device, (weight, norm_weight, out))
    return Problem(x, weight, norm_weight, eps, is_gated, gates_out, out)
