"""Latent rows in bytes: values in fp8 with a scale for each 128 of them, rotated dims in bfloat16.

A row of C value dims and R rotated ones, G = ceil(C / 128)::

    bytes    [0, C)             C values, float8_e4m3fn
             [C, C + 4 G)       G scales, float32, of 128 values each (the last of what is left)
             [C + 4 G, ...)     R rotated dims, bfloat16, which are not quantised
    value i = float(byte i) * scale i // 128

656 bytes for C = 512 and R = 64, where bfloat16 takes 1152. A scale is the least power of two that
is not below amax / 448, the largest magnitude of its values over the largest of the format, and
not below 1e-4; so values keep their order, none overflows, and product and sum are exact where a
kernel has them in bfloat16. Zeros are zeros under the least scale, 2^-13. A group that holds NaN or
an infinity is NaN as a whole. `reference` and `triton_split` take any scale, NaN and infinities as
they are; `cuda` within the range of float16 (see the package).

Source: deepseek-ai/FlashMLA README ("FP8 with scale") and tests/quant.py, whose power of two is
rounded up from a logarithm; here it is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ShapeError

GROUP_DIMS = 128  # values that share a scale
SCALE_BYTES, ROPE_BYTES = 4, 2  # of a scale, of a rotated dim
MOST = 448.0  # the largest magnitude of float8_e4m3fn
LEAST_RATIO = 1e-4  # of amax to MOST, below which values share the least scale


def num_groups(value_dim: int) -> int:
    """Scales of a row."""
    return -(-value_dim // GROUP_DIMS)


def fp8_row_bytes(value_dim: int, rope_dim: int) -> int:
    """Bytes of a row of so many value dims and rotated ones."""
    return value_dim + SCALE_BYTES * num_groups(value_dim) + ROPE_BYTES * rope_dim


def quantize_rows(rows: Tensor, value_dim: int) -> Tensor:
    """Return latent rows in bytes.

    Parameters
    ----------
    rows : [..., D], a floating dtype
        Rotated dims follow the value dims; they are rounded to bfloat16.
    value_dim : int
        Leading dims of a row that are its value.

    Returns
    -------
    Tensor
        [..., fp8_row_bytes(value_dim, D - value_dim)] uint8, contiguous.

    Raises
    ------
    ShapeError
        A row is not as wide as its value.
    """
    if not 1 <= value_dim <= rows.shape[-1]:
        raise ShapeError(
            f"value_dim: expected 1..{rows.shape[-1]} (the width of a row), got {value_dim}"
        )
    values = rows[..., :value_dim].float()
    scales = _scales(values)  # [..., G]
    coded = (values / _of_each_value(scales, value_dim)).to(torch.float8_e4m3fn)
    rope = rows[..., value_dim:].to(torch.bfloat16)
    return torch.cat([_as_bytes(part) for part in (coded, scales, rope)], dim=-1)


def dequantize_rows(rows: Tensor, value_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of rows in bytes, multiplied in `dtype` or in float32 if that is wider.

    Parameters
    ----------
    rows : [..., B] uint8
    value_dim : int
        Leading dims of a row that are its value.
    dtype : torch.dtype

    Returns
    -------
    Tensor
        [..., D] of `dtype`, contiguous.

    Raises
    ------
    ShapeError
        B is no width of such a row, or the rows are no bytes.
    """
    begin, end = value_dim, value_dim + SCALE_BYTES * num_groups(value_dim)
    rope_bytes = rows.shape[-1] - end
    if rows.dtype != torch.uint8 or rope_bytes < 0 or rope_bytes % ROPE_BYTES:
        raise ShapeError(
            f"rows: expected uint8 rows of {end} bytes and {ROPE_BYTES} for each rotated dim, got "
            f"{rows.shape[-1]} of {rows.dtype} ({value_dim} values and their scales)"
        )
    exact = torch.promote_types(dtype, torch.float32)
    values = _as_numbers(rows[..., :begin], torch.float8_e4m3fn).to(exact)
    scales = _as_numbers(rows[..., begin:end], torch.float32).to(exact)
    rope = _as_numbers(rows[..., end:], torch.bfloat16)
    values = values * _of_each_value(scales, value_dim)
    return torch.cat((values.to(dtype), rope.to(dtype)), dim=-1)


def _scales(values: Tensor) -> Tensor:
    """Return the scale of every group of values [..., C] float32, [..., G]."""
    firsts = range(0, values.shape[-1], GROUP_DIMS)
    groups = [values[..., first : first + GROUP_DIMS] for first in firsts]
    amax = torch.stack([group.abs().amax(-1) for group in groups], dim=-1)
    ratio = (amax / MOST).clamp_min(LEAST_RATIO)
    mantissa, exponent = torch.frexp(ratio)  # mantissa in [0.5, 1)
    power = torch.ldexp(torch.ones_like(ratio), exponent - (mantissa == 0.5).int())
    return torch.where(amax.isfinite(), power, torch.nan)


def _as_bytes(numbers: Tensor) -> Tensor:
    *leading, last = numbers.shape
    return _flat(numbers).view(torch.uint8).view(*leading, last * numbers.itemsize)


def _as_numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    *leading, last = rows.shape
    return _flat(rows).view(dtype).view(*leading, last // dtype.itemsize)


def _flat(tensor: Tensor) -> Tensor:
    """Return a copy in one dim that begins where every dtype may."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1)


def _of_each_value(scales: Tensor, value_dim: int) -> Tensor:
    return scales.repeat_interleave(GROUP_DIMS, dim=-1)[..., :value_dim]
