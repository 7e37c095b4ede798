"""One checked call of add_norm, with room for its results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ShapeError
from engine.kernels.operands import check_device, check_tensor

MOST_ADDENDS = 2
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call; `total` and `normed` are there to be written."""

    x: Tensor  # [M, hidden]
    addends: tuple[Tensor, ...]  # [M, hidden] each
    norm_weight: Tensor  # [hidden]
    eps: float
    total: Tensor  # [M, hidden]; x itself where nothing is added
    normed: Tensor  # [M, hidden]


def pose(x: Tensor, addends: tuple[Tensor, ...], norm_weight: Tensor, *, eps: float) -> Problem:
    """Check the arguments of `add_norm` and allocate what it gives."""
    check_tensor("x", x, (None, None), _DTYPES)
    M, hidden = x.shape
    if len(addends) > MOST_ADDENDS:
        raise ShapeError(f"addends: expected at most {MOST_ADDENDS}, got {len(addends)}")
    if hidden < 1:
        raise ShapeError("x: expected rows of at least one number, got none (a mean of them)")
    for addend in addends:
        check_tensor("addend", addend, (M, hidden), (x.dtype,))
    check_tensor("norm_weight", norm_weight, (hidden,), (x.dtype,))
    check_device(x.device, (*addends, norm_weight))
    total = x.new_empty(M, hidden) if addends else x
    return Problem(x, addends, norm_weight, eps, total, x.new_empty(M, hidden))
