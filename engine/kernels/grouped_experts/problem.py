"""One checked call of grouped experts: operands that fit together, with room for the result.

Owns the refusals and what a stored projection means. Knows no backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ShapeError
from engine.kernels.operands import check_device, check_num_splits, check_tensor

INT4_PER_WORD = 8  # an int32 holds eight 4-bit values, the first in its lowest bits
INT4_ZERO = 8  # what stands for zero in them
_ROW_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ID_DTYPES = (torch.int32, torch.int64)
FP8_DTYPE = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Projection:
    """The weights of one projection of all experts, as they are stored."""

    values: Tensor  # [E, out, in] of the rows' dtype or float8_e4m3fn; [E, out, in / 8] int32
    scale: Tensor | None  # [E, ⌈out / block rows⌉, ⌈in / block columns⌉]; None for plain numbers
    block: tuple[int, int] | None  # outputs and inputs that share a scale

    @property
    def group_size(self) -> int:
        """Inputs of an output that share a scale in int4, 0 where nothing is packed."""
        is_packed = self.values.dtype == torch.int32 and self.block is not None
        return self.block[1] if is_packed and self.block is not None else 0

    def of_expert(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the weights of one expert as plain numbers, [out, in]; a product is rounded once.

        The rounding is to the scale's dtype, as the packages that write such checkpoints do.
        """
        values = self.values[expert]
        if self.scale is None or self.block is None:
            return values.to(dtype)
        scale, (rows, columns) = self.scale[expert], self.block
        if self.group_size:
            shifts = torch.arange(0, 32, 32 // INT4_PER_WORD, dtype=torch.int32)
            nibbles = (values.unsqueeze(-1) >> shifts.to(values.device)) & 0xF  # [out, in / 8, 8]
            values = (nibbles - INT4_ZERO).flatten(-2)  # [out, in]
        out, width = values.shape
        spread = scale.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :width]
        return (values.to(scale.dtype) * spread).to(dtype)


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call, checked; `out` is there to be written."""

    x: Tensor  # [M, hidden]
    expert_ids: Tensor  # [M, K]
    expert_weights: Tensor  # [M, K]
    gate: Projection  # [E, I, hidden]
    up: Projection  # [E, I, hidden]
    down: Projection  # [E, hidden, I]
    num_splits: int | None
    out: Tensor  # [M, hidden]
    workspace: Tensor | None

    @property
    def num_experts(self) -> int:
        """Experts there are weights of, E."""
        return self.gate.values.shape[0]

    @property
    def inner(self) -> int:
        """Width between the projections, I."""
        return self.gate.values.shape[1]

    @property
    def num_pairs(self) -> int:
        """Pairs of a row and a choice of it, M * K."""
        return self.expert_ids.numel()


def pose(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    block: tuple[int, int] | None,
    num_splits: int | None,
    out: Tensor | None,
    workspace: Tensor | None,
) -> Problem:
    """Check the arguments of `grouped_experts` and allocate the result if it was left out."""
    check_num_splits(num_splits)
    check_tensor("x", x, (None, None), _ROW_DTYPES)
    check_tensor("expert_ids", expert_ids, (len(x), None), _ID_DTYPES, last_contiguous=False)
    K, sums = expert_ids.shape[1], torch.promote_types(x.dtype, torch.float32)
    check_tensor("expert_weights", expert_weights, (len(x), K), (sums,), last_contiguous=False)
    check_tensor("gate", gate, (None, None, None), (x.dtype, torch.int32, FP8_DTYPE))
    E, I, _ = gate.shape  # noqa: E741 - the width's letter
    hidden = x.shape[1]
    if min(E, K, I, hidden) < 1:
        raise ShapeError(
            f"x, expert_ids, gate: expected E, K and widths of at least 1, got {list(x.shape)}, "
            f"{list(expert_ids.shape)} and {list(gate.shape)}"
        )
    stored = (x.dtype, gate.dtype)
    wide = _projection("gate", gate, gate_scale, (E, I, hidden), block, stored)
    beside = _projection("up", up, up_scale, (E, I, hidden), block, stored)
    narrow = _projection("down", down, down_scale, (E, hidden, I), block, stored)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_tensor("out", out, tuple(x.shape), (x.dtype,))
    scales = (gate_scale, up_scale, down_scale)
    check_device(x.device, (expert_ids, expert_weights, gate, up, down, *scales, out))
    return Problem(x, expert_ids, expert_weights, wide, beside, narrow, num_splits, out, workspace)


def _projection(
    name: str,
    values: Tensor,
    scale: Tensor | None,
    shape: tuple[int, int, int],
    block: tuple[int, int] | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Projection:
    """Check one projection of logical `shape`; `dtypes` are the rows' and that of the weights."""
    E, outputs, width = shape
    rows_dtype, stored = dtypes
    packed = (E, outputs, -(-width // INT4_PER_WORD)) if stored == torch.int32 else shape
    check_tensor(name, values, packed, (stored,))
    if stored == rows_dtype:
        if scale is not None or block is not None:
            raise ShapeError(f"{name}_scale, block: expected None beside plain {stored} weights")
        return Projection(values, None, None)
    if scale is None:
        raise ShapeError(f"{name}_scale: expected a tensor beside {stored} weights, got None")
    if stored == FP8_DTYPE:
        if block is None or min(block) < 1:
            raise ShapeError(f"block: expected the sizes of an fp8 scale's block, got {block}")
        scales = (E, -(-outputs // block[0]), -(-width // block[1]))
        check_tensor(f"{name}_scale", scale, scales, (torch.float32,))
        return Projection(values, scale, block)
    if block is not None:
        raise ShapeError(f"block: expected None beside int4 weights, got {block} (groups say it)")
    check_tensor(f"{name}_scale", scale, (E, outputs, None), _SCALE_DTYPES)
    group_size, rest = divmod(width, max(scale.shape[2], 1))
    is_whole = scale.shape[2] and not rest and not group_size % INT4_PER_WORD
    if not is_whole or not group_size:
        raise ShapeError(
            f"{name}_scale: expected groups of whole words of {INT4_PER_WORD} inputs that divide "
            f"{width} inputs, got {scale.shape[2]} groups"
        )
    return Projection(values, scale, (1, group_size))
