"""One checked call of attend_window, with room for its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ShapeError
from engine.kernels.operands import check_device, check_tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call; `out` is there to be written."""

    queries: Tensor  # [N, H_kv, G * S, D]
    rows: Tensor  # [N, H_kv, S + slots, 2 * D]
    lengths: Tensor  # [N] int64
    block_size: int  # S
    ring: int
    behind: int
    ahead: int  # of a block no row stands farther ahead than its size
    out: Tensor  # [N * S, H_kv * G * D]


def pose(
    queries: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    block_size: int,
    ring: int,
    behind: int,
    ahead: int | None = None,
) -> Problem:
    """Check the arguments of `attend_window` and allocate what it gives."""
    check_tensor("queries", queries, (None, None, None, None), _DTYPES)
    (N, heads, packed, D), dtype = queries.shape, queries.dtype
    check_tensor("rows", rows, (N, heads, None, 2 * D), (dtype,))
    check_tensor("lengths", lengths, (N,), (torch.int64,))
    slots = rows.shape[2] - block_size
    if block_size < 1 or packed % block_size or slots < 0:
        raise ShapeError(
            f"block_size: expected 1..{rows.shape[2]}, a divisor of {packed} packed queries, got "
            f"{block_size} (rows of a block)"
        )
    ahead = block_size if ahead is None else ahead
    if behind < 1 or ahead < 1:
        raise ShapeError(
            f"behind, ahead: expected at least 1, got {behind} and {ahead} (a row sees itself)"
        )
    if ring < max(slots, behind - 1, 1):
        raise ShapeError(
            f"ring: expected at least {max(slots, behind - 1, 1)}, got {ring} (its {slots} slots, "
            f"and the {behind - 1} rows that are seen behind a row)"
        )
    check_device(queries.device, (rows, lengths))
    out = queries.new_empty(N * block_size, heads * packed // block_size * D)
    return Problem(queries, rows, lengths, block_size, ring, behind, ahead, out)
