"""One program per (sequence, head, block of tokens) that walks all rows by itself.

The shape of the verify kernels that fall to a hundredth of the machine's bandwidth at long
context: N * H * ⌈T / BLOCK_TOKENS⌉ programs whatever the context, each reading every row twice.
Kept as a measured exhibit and as the slow end of the ladder, not as a choice for production.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from engine.kernels.tree_attention import tiles
from engine.kernels.tree_attention.problem import refuse_fp8, refuse_splits
from engine.kernels.triton_device import on_device

if TYPE_CHECKING:
    from engine.kernels.tree_attention.problem import Problem


@triton.jit
def serial_kernel(
    q_ptr,  # [N, T, H, D]
    kv_ptr,  # [P, L, D]
    table_ptr,  # [N, max_pages] int32
    context_ptr,  # [N]
    bits_ptr,  # [N, T, W] int32
    tree_sizes_ptr,  # [N]
    tree_ptr,  # [N, T, D] where HYBRID
    out_ptr,  # [N, T, H, VALUE_DIM]
    lse_ptr,  # [N, T, H] float32
    T, scale,
    stride_q_sequence, stride_q_token, stride_q_head,
    stride_page, stride_row,
    stride_table, stride_bits_sequence, stride_bits_token,
    stride_tree_sequence, stride_tree_row,
    stride_out_sequence, stride_out_token, stride_out_head,
    stride_lse_sequence, stride_lse_token, stride_lse_head,
    PAGE_SIZE: tl.constexpr, HYBRID: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    SCORE_DIMS: tl.constexpr, READ_ONCE: tl.constexpr, TREE_STAGES: tl.constexpr,
):  # fmt: skip
    """Write out and lse of one block of tokens, for one head of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    context_len = tl.load(context_ptr + sequence).to(tl.int32)
    tree_size = tl.load(tree_sizes_ptr + sequence).to(tl.int32)
    num_tiles = tiles.count(context_len, tree_size, tl.program_id(2) * BLOCK_ROWS, BLOCK_KEYS)

    q_rows = q_ptr + sequence * stride_q_sequence + head * stride_q_head
    out, lse = tiles.walk(
        q_rows + tokens[:, None].to(tl.int64) * stride_q_token, tokens,
        kv_ptr, table_ptr + sequence * stride_table, tree_ptr + sequence * stride_tree_sequence,
        bits_ptr + sequence * stride_bits_sequence,
        context_len, tree_size, 0, num_tiles, scale,
        stride_page, stride_row, stride_tree_row, stride_bits_token,
        PAGE_SIZE, HYBRID, BLOCK_ROWS, BLOCK_KEYS, VALUE_DIM, ROPE_DIM,
        SCORE_DIMS, READ_ONCE, TREE_STAGES,
    )  # fmt: skip

    stored = tokens < T
    rows = tokens.to(tl.int64)
    out_rows = out_ptr + sequence * stride_out_sequence + head * stride_out_head
    out_rows += rows[:, None] * stride_out_token + tl.arange(0, VALUE_DIM)[None, :]
    tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=stored[:, None])
    lse_rows = lse_ptr + sequence * stride_lse_sequence + head * stride_lse_head
    tl.store(lse_rows + rows * stride_lse_token, lse, mask=stored)


def run(problem: Problem) -> None:
    """Write `out` and `lse` in one launch."""
    tiles.check(problem, "triton_serial")
    refuse_fp8(problem, "triton_serial")
    refuse_splits(problem, "triton_serial")
    N, T, H, _ = problem.q.shape
    tree, stride_tree_sequence, stride_tree_row = tiles.tree_rows(problem)
    with on_device(problem.q.device):
        serial_kernel[(N, H, tiles.num_token_blocks(T))](
            problem.q, problem.kv_pages, problem.page_table, problem.context_lens,
            problem.ancestor_bits, problem.tree_sizes, tree, problem.out, problem.lse,
            T, problem.softmax_scale * tiles.LOG2_E.value,
            *problem.q.stride()[:3],
            *problem.kv_pages.stride()[:2],
            problem.page_table.stride(0), *problem.ancestor_bits.stride()[:2],
            stride_tree_sequence, stride_tree_row,
            *problem.out.stride()[:3],
            *problem.lse.stride(),
            PAGE_SIZE=problem.page_size, HYBRID=problem.tree_kv is not None,
            **tiles.per_head(problem),
        )  # fmt: skip


def programs(problem: Problem) -> int:
    """Programs of the launch; the context does not enter."""
    N, T, H, _ = problem.q.shape
    return N * H * tiles.num_token_blocks(T)
