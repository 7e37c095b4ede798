"""One checked call of keep_rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.errors import ShapeError
from engine.kernels.operands import check_device, check_tensor

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call; of `rows` those at `places` are there to be written."""

    keys: Tensor  # [M, H_kv, D]
    values: Tensor
    key_norm: Tensor  # [D]
    cos: Tensor  # [M, D / 2]
    sin: Tensor
    eps: float
    rows: Tensor  # [R, 2 * D]
    places: Tensor  # [M * H_kv] int64


def pose(
    keys: Tensor,
    values: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    rows: Tensor,
    places: Tensor,
) -> Problem:
    """Check the arguments of `keep_rows`."""
    check_tensor("keys", keys, (None, None, None), _DTYPES)
    (M, heads, D), dtype = keys.shape, keys.dtype
    if D < 2 or D % 2:
        raise ShapeError(f"keys: expected an even number of dims, got {D} (turned in pairs)")
    check_tensor("values", values, (M, heads, D), (dtype,))
    check_tensor("key_norm", key_norm, (D,), (dtype,))
    sums = torch.promote_types(dtype, torch.float32)
    for name, angles in (("cos", cos), ("sin", sin)):
        check_tensor(name, angles, (M, D // 2), (sums,))
    check_tensor("rows", rows, (None, 2 * D), (dtype,))
    check_tensor("places", places, (M * heads,), (torch.int64,))
    check_device(keys.device, (values, key_norm, cos, sin, rows, places))
    return Problem(keys, values, key_norm, cos, sin, eps, rows, places)
