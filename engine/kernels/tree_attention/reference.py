"""The definition of tree attention in PyTorch: one sequence at a time, nothing clever.

Sums in float32, in float64 for float64 queries. Rows in fp8 are numbers of that dtype first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.errors import ShapeError
from engine.kernels.tree_attention.fp8_rows import dequantize_rows
from engine.kernels.tree_attention.problem import refuse_splits

if TYPE_CHECKING:
    from engine.kernels.tree_attention.problem import Problem


def run(problem: Problem) -> None:
    """Write `out` and `lse` of every sequence."""
    refuse_splits(problem, "reference")
    lengths = zip(problem.context_lens.tolist(), problem.tree_sizes.tolist(), strict=True)
    for sequence, (context_len, tree_size) in enumerate(lengths):
        _check_lengths(problem, sequence, context_len, tree_size)
        _attend(problem, sequence, context_len, tree_size)


def _attend(problem: Problem, sequence: int, context_len: int, tree_size: int) -> None:
    T, H, D = problem.q.shape[1:]
    rows = _rows(problem, sequence, context_len, tree_size)  # [S + tree_size, D]
    visible = torch.ones(T, len(rows), dtype=torch.bool, device=rows.device)  # [T, S + tree_size]
    bits = problem.ancestor_bits[sequence]
    visible[:, context_len:] = unpack_bits(bits, tree_size)
    visible[tree_size:] = False

    q = problem.q[sequence].to(rows.dtype)
    q = q.masked_fill(~visible.any(1)[:, None, None], 0.0)  # padding may hold NaN
    scores = q.reshape(T * H, D) @ rows.T * problem.softmax_scale  # [T * H, S + tree_size]
    scores = scores.masked_fill(~visible.repeat_interleave(H, 0), -torch.inf)
    lse = scores.logsumexp(1)  # [T * H], -inf where nothing is visible
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]).exp()
    out = weights @ rows[:, : problem.value_dim]  # [T * H, value_dim]

    problem.out[sequence] = out.view(T, H, -1).to(problem.out.dtype)
    problem.lse[sequence] = lse.view(T, H)


def _rows(problem: Problem, sequence: int, context_len: int, tree_size: int) -> Tensor:
    """Committed rows, then the tree's: `[context_len + tree_size, D]` in the dtype of the sums."""
    num_paged = context_len + (tree_size if problem.tree_kv is None else 0)
    num_pages = -(-num_paged // problem.page_size)
    page_ids = problem.page_table[sequence, :num_pages].long()
    rows = problem.kv_pages[page_ids].flatten(0, 1)[:num_paged]
    if problem.tree_kv is not None:
        rows = torch.cat([rows, problem.tree_kv[sequence, :tree_size]])
    if problem.is_fp8:
        return dequantize_rows(rows, problem.value_dim, problem.lse.dtype)
    return rows.to(problem.lse.dtype)


def unpack_bits(bits: Tensor, num_columns: int) -> Tensor:
    """Unpack ancestor words `[T, W]` int32 into a bool mask `[T, num_columns]`."""
    columns = torch.arange(num_columns, device=bits.device)
    return (bits[:, columns // 32] >> (columns % 32)) & 1 != 0


def _check_lengths(problem: Problem, sequence: int, context_len: int, tree_size: int) -> None:
    T = problem.q.shape[1]
    if context_len < 0 or not 1 <= tree_size <= T:
        raise ShapeError(
            f"lengths of sequence {sequence}: expected a context of at least 0 and a tree of "
            f"1..{T}, got {context_len} and {tree_size}"
        )
    num_paged = context_len + (tree_size if problem.tree_kv is None else 0)
    if num_paged > problem.page_table.shape[1] * problem.page_size:
        raise ShapeError(
            f"page_table: expected room for {num_paged} rows of sequence {sequence}, "
            f"got {problem.page_table.shape[1]} pages of {problem.page_size}"
        )
