"""One checked call of head_rows, with room for its result."""

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
    """Operands of one call; `block` and `out` are there to be written."""

    queries: Tensor  # [N * S, H, D]
    keys: Tensor  # [N * S, H_kv, D]
    values: Tensor
    query_norm: Tensor  # [D]
    key_norm: Tensor
    cos: Tensor  # [N * S, D / 2]
    sin: Tensor
    eps: float
    block: Tensor  # [N, H_kv, S, 2 * D]
    out: Tensor  # [N, H_kv, G * S, D]


def pose(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    block: Tensor,
) -> Problem:
    """Check the arguments of `head_rows` and allocate what it gives."""
    check_tensor("queries", queries, (None, None, None), _DTYPES)
    (M, H, D), dtype = queries.shape, queries.dtype
    if D < 2 or D % 2:
        raise ShapeError(f"queries: expected an even number of dims, got {D} (turned in pairs)")
    check_tensor("block", block, (None, None, None, 2 * D), (dtype,))
    N, heads, S, _ = block.shape
    if N * S != M or not heads or H % heads:
        raise ShapeError(
            f"block: expected {M} rows and a divisor of {H} heads, got {N} * {S} rows and {heads} "
            "heads (those of the queries)"
        )
    for name, new in (("keys", keys), ("values", values)):
        check_tensor(name, new, (M, heads, D), (dtype,))
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        check_tensor(name, norm, (D,), (dtype,))
    sums = torch.promote_types(dtype, torch.float32)
    for name, angles in (("cos", cos), ("sin", sin)):
        check_tensor(name, angles, (M, D // 2), (sums,))
    check_device(queries.device, (keys, values, query_norm, key_norm, cos, sin, block))
    out = queries.new_empty(N, heads, H // heads * S, D)
    return Problem(queries, keys, values, query_norm, key_norm, cos, sin, eps, block, out)
