"""Device functions the Triton backends of tree attention share, and what a launch must satisfy.

Scores are kept in base 2 (`softmax_scale * log2(e)` is folded into one factor), because exp2 is
the instruction the hardware has. A tile is BLOCK_KEYS consecutive rows of one sequence, committed
ones or the tree's, never both.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from engine.errors import BackendError
from engine.kernels.triton_device import check_multiplied_rows

if TYPE_CHECKING:
    from engine.kernels.tree_attention.problem import Problem

MIN_DIM = 16  # shortest operand of a matrix instruction
BLOCK_TOKENS = 16  # fewest rows of a matrix instruction: trees of up to 16 tokens pad least
BLOCK_KEYS = 32  # a tile of keys, one of values and the queries stay in 99 KB and 255 registers
NUM_WARPS = 8  # four spill at D = 576
NUM_STAGES = 1  # the exhibit loads a tile, uses it, loads the next
# float32 products run in the float32 units, whose operands stand in registers as a whole.
FLOAT32_KEYS, FLOAT32_SCORE_DIMS = 16, 64
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def check(problem: Problem, backend: str) -> None:
    """Refuse what the Triton kernels cannot run."""
    check_multiplied_rows(problem.q, backend)
    for name, size in (("value_dim", problem.value_dim), ("rope_dim", problem.rope_dim)):
        if size < MIN_DIM or size & (size - 1):
            raise BackendError(
                f"backend {backend}: expected {name} to be a power of two of at least {MIN_DIM}, "
                f"got {size} (tiles are powers of two)"
            )


def per_head(problem: Problem) -> dict[str, int]:
    """Sizes of the tiles of the kernels that work on one head at a time, and their warps."""
    wide = problem.q.dtype == torch.float32 and problem.value_dim > FLOAT32_SCORE_DIMS
    return {
        "BLOCK_ROWS": BLOCK_TOKENS,
        "BLOCK_KEYS": FLOAT32_KEYS if wide else BLOCK_KEYS,
        "VALUE_DIM": problem.value_dim,
        "ROPE_DIM": problem.rope_dim,
        "SCORE_DIMS": FLOAT32_SCORE_DIMS if wide else problem.value_dim,
        "READ_ONCE": False,
        "TREE_STAGES": NUM_STAGES,
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
    }


def num_token_blocks(T: int) -> int:
    """Blocks that T tree tokens are cut into."""
    return -(-T // BLOCK_TOKENS)


def tree_rows(problem: Problem) -> tuple[torch.Tensor, int, int]:
    """Tensor the tree's rows lie in and its strides over sequences and rows.

    Where they lie in the pages the tensor is a stand-in that is never read.
    """
    rows = problem.tree_kv
    return (problem.q, 0, 0) if rows is None else (rows, rows.stride(0), rows.stride(1))


@triton.jit
def count(context_len, tree_size, first_token, BLOCK_KEYS: tl.constexpr):
    """Tiles of a sequence, committed and the tree's; none for a block of padding tokens."""
    num_tiles = tl.cdiv(context_len, BLOCK_KEYS) + tl.cdiv(tree_size, BLOCK_KEYS)
    return tl.where(first_token < tree_size, num_tiles, 0)


@triton.jit
def page_offsets(table_ptr, positions, live, stride_page, stride_row, PAGE_SIZE: tl.constexpr):
    """Element offsets (int64) in kv_pages of the rows at `positions` of one sequence."""
    page_ids = tl.load(table_ptr + positions // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    return page_ids * stride_page + (positions % PAGE_SIZE).to(tl.int64) * stride_row


@triton.jit
def page_tile_offsets(
    table_ptr, first_position, lanes, stride_page, stride_row, PAGE_SIZE: tl.constexpr
):
    """Element offsets (int64) of a committed tile that lies in one page: one page id is read."""
    page_id = tl.load(table_ptr + first_position // PAGE_SIZE).to(tl.int64)
    rows = (first_position % PAGE_SIZE + lanes).to(tl.int64)
    return page_id * stride_page + rows * stride_row


@triton.jit
def ancestors(bits_ptr, tokens, token_live, columns, column_live, stride_token):
    """Bool tile [tokens, columns]: bit `column` of the token's words, false where not live."""
    words = tl.load(
        bits_ptr + tokens[:, None].to(tl.int64) * stride_token + (columns // 32)[None, :],
        mask=token_live[:, None] & column_live[None, :],
        other=0,
    )
    return ((words >> (columns % 32)[None, :]) & 1) != 0


@triton.jit
def absorb(scores, values, peak, total, acc):
    """Fold one tile into a running softmax: `scores` base 2, -inf where not visible."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet keeps peak -inf; shifting by 0 keeps its weights at 0.
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def gather_and_absorb(
    q_rows, token_live,  # pointers to the queries [BLOCK_ROWS, 1], read where live
    q_value, q_rope,  # the same queries [BLOCK_ROWS, VALUE_DIM], [BLOCK_ROWS, ROPE_DIM]
    rows_ptr, offsets, live,  # rows at rows_ptr + offsets [BLOCK_KEYS], read where live
    visible,  # [BLOCK_ROWS, BLOCK_KEYS]
    scale,
    peak, total, acc,
    VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, SCORE_DIMS: tl.constexpr,
):  # fmt: skip
    """Fold one tile of rows: gathered as keys, then gathered again as values."""
    value_dims = tl.arange(0, VALUE_DIM)
    rope_dims = VALUE_DIM + tl.arange(0, ROPE_DIM)
    keys_rope = tl.load(
        rows_ptr + offsets[None, :] + rope_dims[:, None], mask=live[None, :], other=0.0
    )
    scores = tl.dot(q_rope, keys_rope, input_precision="ieee")
    if SCORE_DIMS == VALUE_DIM:
        keys = tl.load(
            rows_ptr + offsets[None, :] + value_dims[:, None], mask=live[None, :], other=0.0
        )
        scores = tl.dot(q_value, keys, scores, input_precision="ieee")
    else:
        # Whole rows of float32 do not fit in registers: a few dims at a time.
        for first_dim in range(0, VALUE_DIM, SCORE_DIMS):
            dims = first_dim + tl.arange(0, SCORE_DIMS)
            q_part = tl.load(q_rows + dims[None, :], mask=token_live[:, None], other=0.0)
            keys = tl.load(
                rows_ptr + offsets[None, :] + dims[:, None], mask=live[None, :], other=0.0
            )
            scores = tl.dot(q_part, keys, scores, input_precision="ieee")
    # Rows that are not live may hold NaN: they were loaded as 0 and weigh exp2(-inf) = 0.
    scores = tl.where(visible, scores * scale, -float("inf"))
    values = tl.load(
        rows_ptr + offsets[:, None] + value_dims[None, :], mask=live[:, None], other=0.0
    )
    return absorb(scores, values, peak, total, acc)


@triton.jit
def read_once_and_absorb(
    q_value, q_rope,  # [BLOCK_ROWS, VALUE_DIM], [BLOCK_ROWS, ROPE_DIM]
    rows_ptr, offsets, live,  # rows at rows_ptr + offsets [BLOCK_KEYS], read where live
    visible,  # [BLOCK_ROWS, BLOCK_KEYS]
    scale,
    peak, total, acc,
    VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
):  # fmt: skip
    """Fold one tile of rows, read once: its leading dims are the values and, transposed, keys."""
    value_dims = tl.arange(0, VALUE_DIM)
    rope_dims = VALUE_DIM + tl.arange(0, ROPE_DIM)
    values = tl.load(
        rows_ptr + offsets[:, None] + value_dims[None, :], mask=live[:, None], other=0.0
    )
    keys_rope = tl.load(
        rows_ptr + offsets[None, :] + rope_dims[:, None], mask=live[None, :], other=0.0
    )
    scores = tl.dot(q_value, tl.trans(values), input_precision="ieee")
    scores = tl.dot(q_rope, keys_rope, scores, input_precision="ieee")
    # Rows that are not live may hold NaN: they were loaded as 0 and weigh exp2(-inf) = 0.
    scores = tl.where(visible, scores * scale, -float("inf"))
    return absorb(scores, values, peak, total, acc)


@triton.jit
def walk(
    q_rows,  # pointers to the queries of this program's rows [BLOCK_ROWS, 1]
    tokens,  # [BLOCK_ROWS] the tree token each row belongs to; beyond the tree: padding
    kv_ptr, table_ptr,  # pages of the layer; this sequence's page ids
    tree_ptr,  # this sequence's first tree row where HYBRID, else never read
    bits_ptr,  # this sequence's ancestor words [T, W]
    context_len, tree_size, first_tile, last_tile, scale,
    stride_page, stride_row, stride_tree_row, stride_bits_token,
    PAGE_SIZE: tl.constexpr, HYBRID: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    SCORE_DIMS: tl.constexpr, READ_ONCE: tl.constexpr, TREE_STAGES: tl.constexpr,
):  # fmt: skip
    """Attend the rows to tiles [first_tile, last_tile): the committed ones, then the tree's."""
    token_live = tokens < tree_size
    q_value = tl.load(
        q_rows + tl.arange(0, VALUE_DIM)[None, :], mask=token_live[:, None], other=0.0
    )
    q_rope = tl.load(
        q_rows + VALUE_DIM + tl.arange(0, ROPE_DIM)[None, :], mask=token_live[:, None], other=0.0
    )
    peak = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, VALUE_DIM], tl.float32)
    lanes = tl.arange(0, BLOCK_KEYS)
    context_tiles = tl.cdiv(context_len, BLOCK_KEYS)

    for tile in range(first_tile, tl.minimum(last_tile, context_tiles)):
        positions = tile * BLOCK_KEYS + lanes
        live = positions < context_len
        if PAGE_SIZE % BLOCK_KEYS == 0:  # the tile lies in one page
            offsets = page_tile_offsets(
                table_ptr, tile * BLOCK_KEYS, lanes, stride_page, stride_row, PAGE_SIZE
            )
        else:
            offsets = page_offsets(table_ptr, positions, live, stride_page, stride_row, PAGE_SIZE)
        visible = live[None, :] & token_live[:, None]
        if READ_ONCE:
            peak, total, acc = read_once_and_absorb(
                q_value, q_rope, kv_ptr, offsets, live, visible, scale,
                peak, total, acc, VALUE_DIM, ROPE_DIM,
            )  # fmt: skip
        else:
            peak, total, acc = gather_and_absorb(
                q_rows, token_live, q_value, q_rope, kv_ptr, offsets, live, visible, scale,
                peak, total, acc, VALUE_DIM, ROPE_DIM, SCORE_DIMS,
            )  # fmt: skip

    for tile in tl.range(tl.maximum(first_tile, context_tiles), last_tile, num_stages=TREE_STAGES):
        columns = (tile - context_tiles) * BLOCK_KEYS + lanes
        live = columns < tree_size
        visible = ancestors(bits_ptr, tokens, token_live, columns, live, stride_bits_token)
        if HYBRID:
            rows_ptr = tree_ptr
            offsets = columns.to(tl.int64) * stride_tree_row
        else:
            rows_ptr = kv_ptr
            offsets = page_offsets(
                table_ptr, context_len + columns, live, stride_page, stride_row, PAGE_SIZE
            )
        if READ_ONCE:
            peak, total, acc = read_once_and_absorb(
                q_value, q_rope, rows_ptr, offsets, live, visible, scale,
                peak, total, acc, VALUE_DIM, ROPE_DIM,
            )  # fmt: skip
        else:
            peak, total, acc = gather_and_absorb(
                q_rows, token_live, q_value, q_rope, rows_ptr, offsets, live, visible, scale,
                peak, total, acc, VALUE_DIM, ROPE_DIM, SCORE_DIMS,
            )  # fmt: skip

    # Rows that saw nothing: result 0, lse -inf, without a division by 0 or a logarithm of it. NaN
    # is not 0: what was seen of it stays to be seen.
    seen = total != 0.0
    divisor = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (peak + tl.log2(divisor)) * LN_2, -float("inf"))
    return acc / divisor[:, None], lse
