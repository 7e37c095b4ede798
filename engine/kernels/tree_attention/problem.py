"""One checked call of tree attention: operands that fit together, with room for the result.

Owns the refusals. Knows no backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import BackendError, ShapeError
from engine.kernels.operands import check_device, check_num_splits, check_tensor
from engine.kernels.tree_attention.fp8_rows import fp8_row_bytes

_LENGTH_DTYPES = (torch.int32, torch.int64)
_ROW_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call, checked; `out` and `lse` are there to be written."""

    q: Tensor  # [N, T, H, D]
    kv_pages: Tensor  # [P, L, D], or [P, L, bytes] uint8 where rows are fp8
    page_table: Tensor  # [N, max_pages] int32
    context_lens: Tensor  # [N]
    ancestor_bits: Tensor  # [N, T, W] int32
    tree_sizes: Tensor  # [N]
    softmax_scale: float
    value_dim: int
    tree_kv: Tensor | None  # [N, T, D or bytes], or None where the tree's rows lie in the pages
    num_splits: int | None
    out: Tensor  # [N, T, H, value_dim]
    lse: Tensor  # [N, T, H]
    workspace: Tensor | None

    @property
    def page_size(self) -> int:
        """Rows of a page, L."""
        return self.kv_pages.shape[1]

    @property
    def is_fp8(self) -> bool:
        """Whether cached rows are bytes, as fp8_rows says; the queries never are."""
        return self.kv_pages.dtype == torch.uint8

    @property
    def rope_dim(self) -> int:
        """Dims of a row that are key but not value."""
        return self.q.shape[3] - self.value_dim

    @property
    def capacity(self) -> int:
        """Most rows a sequence of this call can hold; known without reading a length."""
        tree_rows = 0 if self.tree_kv is None else self.tree_kv.shape[1]
        return self.page_table.shape[1] * self.page_size + tree_rows


def pose(
    q: Tensor,
    kv_pages: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    ancestor_bits: Tensor,
    *,
    tree_sizes: Tensor,
    softmax_scale: float,
    value_dim: int,
    tree_kv: Tensor | None,
    kv_scales: Tensor | None,
    num_splits: int | None,
    out: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
) -> Problem:
    """Check the arguments of `tree_attention` and allocate what the caller left out."""
    _refuse_options(kv_scales, num_splits)
    _check_rows(q, kv_pages, tree_kv, value_dim)
    N, T, H, _ = q.shape
    _check_tables(page_table, context_lens, ancestor_bits, tree_sizes, tree_shape=(N, T))
    out_shape, lse_dtype = (N, T, H, value_dim), _lse_dtype(q.dtype)
    if out is None:
        out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(out_shape[:3], dtype=lse_dtype, device=q.device)
    check_tensor("out", out, out_shape, (q.dtype,))
    check_tensor("lse", lse, out_shape[:3], (lse_dtype,), last_contiguous=False)
    others = (kv_pages, page_table, context_lens, ancestor_bits, tree_sizes, tree_kv, out, lse)
    check_device(q.device, others)
    return Problem(
        q,
        kv_pages,
        page_table,
        context_lens,
        ancestor_bits,
        tree_sizes,
        softmax_scale,
        value_dim,
        tree_kv,
        num_splits,
        out,
        lse,
        workspace,
    )


def refuse_splits(problem: Problem, backend: str) -> None:
    """Refuse the options of splitting backends on behalf of one that does not split."""
    if problem.num_splits is not None or problem.workspace is not None:
        raise BackendError(
            f"num_splits, workspace: expected None, got a value ({backend} does not split)"
        )


def refuse_fp8(problem: Problem, backend: str) -> None:
    """Refuse fp8 rows on behalf of a backend that reads plain ones alone."""
    if problem.is_fp8:
        raise BackendError(
            f"backend {backend}: expected rows of the queries' dtype, got fp8 rows (reference, "
            "triton_split and, on sm_90, cuda read them)"
        )


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _refuse_options(kv_scales: Tensor | None, num_splits: int | None) -> None:
    if kv_scales is not None:
        raise BackendError(
            f"kv_scales: expected None, got a tensor of shape {tuple(kv_scales.shape)} "
            "(the scales of fp8 rows lie in the rows)"
        )
    check_num_splits(num_splits)


def _check_rows(q: Tensor, kv_pages: Tensor, tree_kv: Tensor | None, value_dim: int) -> None:
    """Queries and rows agree in width and dtype."""
    check_tensor("q", q, (None, None, None, None), _ROW_DTYPES)
    N, T, _, D = q.shape
    if not 1 <= value_dim <= D:
        raise ShapeError(f"value_dim: expected 1..{D} (the width of a row), got {value_dim}")
    width, dtypes = D, (q.dtype, torch.uint8)
    if kv_pages.dtype == torch.uint8:
        width = _fp8_width(kv_pages, value_dim, D - value_dim)
    check_tensor("kv_pages", kv_pages, (None, None, width), dtypes)
    if tree_kv is not None:
        check_tensor("tree_kv", tree_kv, (N, T, width), (kv_pages.dtype,))
    if min(q.shape[1:]) < 1 or kv_pages.shape[1] < 1:
        raise ShapeError(
            f"q, kv_pages: expected T, H, D and L of at least 1, got q {tuple(q.shape)} "
            f"and kv_pages {tuple(kv_pages.shape)}"
        )


def _fp8_width(kv_pages: Tensor, value_dim: int, rope_dim: int) -> int:
    """Bytes of a row; pages of another width are refused in the words of the format."""
    width = fp8_row_bytes(value_dim, rope_dim)
    if kv_pages.dim() == 3 and kv_pages.shape[2] != width:
        raise ShapeError(
            f"kv_pages: expected rows of {width} bytes ({value_dim} fp8 values, their scales, "
            f"{rope_dim} bfloat16), got {kv_pages.shape[2]}"
        )
    return width


def _check_tables(
    page_table: Tensor,
    context_lens: Tensor,
    ancestor_bits: Tensor,
    tree_sizes: Tensor,
    *,
    tree_shape: tuple[int, int],
) -> None:
    """Page table, lengths and mask describe the N sequences and T tokens of q."""
    N, T = tree_shape
    check_tensor("page_table", page_table, (N, None), (torch.int32,))
    check_tensor("context_lens", context_lens, (N,), _LENGTH_DTYPES)
    check_tensor("tree_sizes", tree_sizes, (N,), _LENGTH_DTYPES)
    check_tensor("ancestor_bits", ancestor_bits, (N, T, None), (torch.int32,))
    if ancestor_bits.shape[2] * 32 < T:
        raise ShapeError(
            f"ancestor_bits: expected at least {-(-T // 32)} words of 32 bits for {T} tree "
            f"tokens, got {ancestor_bits.shape[2]}"
        )
