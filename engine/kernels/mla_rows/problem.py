"""One checked call of mla_rows."""

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
    """Operands of one call; `rows` and `out` are there to be written."""

    kv_a: Tensor  # [M, D]
    norm_weight: Tensor  # [C]
    queries: Tensor  # [M, H, Q + R]
    up_keys: Tensor  # [H, Q, C]
    cos: Tensor  # [M, R / 2]
    sin: Tensor
    slots: Tensor  # [M] int64
    eps: float
    rows: Tensor  # [S, D]
    out: Tensor  # [M, H, D]

    @property
    def value_dim(self) -> int:
        """Dims of a row that are normalised, C."""
        return self.norm_weight.shape[0]

    @property
    def rope_dim(self) -> int:
        """Dims of a row that are rotated, R."""
        return self.kv_a.shape[1] - self.value_dim


def pose(
    kv_a: Tensor,
    norm_weight: Tensor,
    queries: Tensor,
    up_keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    *,
    eps: float,
    rows: Tensor,
    out: Tensor,
) -> Problem:
    """Check the arguments of `mla_rows`."""
    check_tensor("kv_a", kv_a, (None, None), _DTYPES)
    (M, D), dtype = kv_a.shape, kv_a.dtype
    check_tensor("norm_weight", norm_weight, (None,), (dtype,))
    rope_dim = D - norm_weight.shape[0]
    if rope_dim < 2 or rope_dim % 2:
        raise ShapeError(
            f"norm_weight: expected an even number of dims less than the {D} of a row, got "
            f"{norm_weight.shape[0]} (what is not normalised is rotated in pairs)"
        )
    check_tensor("queries", queries, (M, None, None), (dtype,))
    H, width = queries.shape[1:]
    if width < rope_dim:
        raise ShapeError(f"queries: expected at least {rope_dim} dims, got {width} (rotated ones)")
    check_tensor("up_keys", up_keys, (H, width - rope_dim, D - rope_dim), (dtype,))
    sums = torch.promote_types(dtype, torch.float32)
    for name, angles in (("cos", cos), ("sin", sin)):
        check_tensor(name, angles, (M, rope_dim // 2), (sums,))
    check_tensor("slots", slots, (M,), (torch.int64,))
    check_tensor("rows", rows, (None, D), (dtype,))
    check_tensor("out", out, (M, H, D), (dtype,))
    check_device(kv_a.device, (norm_weight, queries, up_keys, cos, sin, slots, rows, out))
    return Problem(kv_a, norm_weight, queries, up_keys, cos, sin, slots, eps, rows, out)
