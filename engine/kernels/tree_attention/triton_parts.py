"""The walk of `triton_split`: a tile of rows is read once, in parts of its dims.

The leading dims of a tile serve as values and, transposed, as keys, while the next tile loads. Read
in parts, a tile is copied by threads that hold few rows' addresses each.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
# ruff: noqa: RUF005
# Triton ships no types, and its kernels are typed by their launch; of tuples it knows sums alone.

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.tree_attention import tiles


@triton.jit
def load_parts(rows, live, NUM_PARTS: tl.constexpr, PART_DIMS: tl.constexpr):
    """Load the leading dims of rows, pointers [num_rows, 1], as tiles of PART_DIMS dims."""
    parts = ()
    for part in tl.static_range(NUM_PARTS):
        part_rows = rows + (part * PART_DIMS + tl.arange(0, PART_DIMS))[None, :]
        if live is None:
            parts = parts + (tl.load(part_rows),)
        else:
            parts = parts + (tl.load(part_rows, mask=live, other=0),)
    return parts


@triton.jit
def load_rows(
    rows,  # pointers [num_rows, 1] to numbers, or to bytes where IS_FP8; see fp8_rows
    live,  # [num_rows, 1], or None where all are
    dtype: tl.constexpr,
    NUM_PARTS: tl.constexpr, PART_DIMS: tl.constexpr, ROPE_DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    """Load rows as parts of their value dims and the rotated ones."""
    VALUE_DIM: tl.constexpr = NUM_PARTS * PART_DIMS
    rope_dims = tl.arange(0, ROPE_DIM)[None, :]
    if IS_FP8:  # a part has one scale
        coded = load_parts(rows, live, NUM_PARTS, PART_DIMS)
        scales = (rows + VALUE_DIM).to(tl.pointer_type(tl.float32))
        parts = ()
        for part in tl.static_range(NUM_PARTS):
            if live is None:
                scale = tl.load(scales + part)
            else:
                scale = tl.load(scales + part, mask=live, other=0.0)
            numbers = coded[part].to(tl.float8e4nv, bitcast=True).to(tl.float32)
            parts = parts + ((numbers * scale).to(dtype),)
        # Two bytes as a bfloat16 are the upper half of a float32.
        halves = (rows + VALUE_DIM + 4 * NUM_PARTS).to(tl.pointer_type(tl.uint16)) + rope_dims
        bits = tl.load(halves) if live is None else tl.load(halves, mask=live, other=0)
        rope = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(dtype)
    else:
        parts = load_parts(rows, live, NUM_PARTS, PART_DIMS)
        rope_rows = rows + VALUE_DIM + rope_dims
        rope = tl.load(rope_rows) if live is None else tl.load(rope_rows, mask=live, other=0.0)
    return parts, rope


@triton.jit
def absorb_tile(
    q_values, q_rope,  # parts of [BLOCK_ROWS, PART_DIMS]; [BLOCK_ROWS, ROPE_DIM]
    values, rope,  # parts of [BLOCK_KEYS, PART_DIMS]; [BLOCK_KEYS, ROPE_DIM]
    hidden,  # [BLOCK_ROWS, BLOCK_KEYS] 0, or -inf where not visible
    scale,
    peak, total, acc,  # acc: parts of [BLOCK_ROWS, PART_DIMS]
    NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """Fold one tile of rows: its leading dims are the values and, transposed, the keys."""
    scores = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
    for part in tl.static_range(NUM_PARTS):
        scores = tl.dot(q_values[part], tl.trans(values[part]), scores, input_precision="ieee")
    scores = scores * scale + hidden
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet keeps peak -inf; shifting by 0 keeps its weights at 0.
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(rope.dtype)
    new_acc = ()
    for part in tl.static_range(NUM_PARTS):
        scaled = acc[part] * decay[:, None]
        new_acc = new_acc + (tl.dot(weights, values[part], scaled, input_precision="ieee"),)
    return new_peak, total, new_acc


@triton.jit
def walk_once(
    q_rows, tokens,
    kv_ptr, table_ptr, tree_ptr, bits_ptr,
    context_len, tree_size, first_tile, last_tile, scale,
    stride_page, stride_row, stride_tree_row, stride_bits_token,
    PAGE_SIZE: tl.constexpr, HYBRID: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    TREE_STAGES: tl.constexpr, PART_DIMS: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Attend the rows to whole committed tiles, to the cut one and to the tree's; see tiles.walk.

    Rows of padding tokens go along as zeros, so that no tile has to mask them, and end as -inf.
    The result is in parts of PART_DIMS dims.
    """
    NUM_PARTS: tl.constexpr = VALUE_DIM // PART_DIMS
    rope_dims = VALUE_DIM + tl.arange(0, ROPE_DIM)
    token_live = tokens < tree_size
    q_values = load_parts(q_rows, token_live[:, None], NUM_PARTS, PART_DIMS)
    q_rope = tl.load(q_rows + rope_dims[None, :], mask=token_live[:, None], other=0.0)
    peak = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = ()
    for _ in tl.static_range(NUM_PARTS):
        acc = acc + (tl.zeros([BLOCK_ROWS, PART_DIMS], tl.float32),)
    lanes = tl.arange(0, BLOCK_KEYS)
    whole_tiles = context_len // BLOCK_KEYS
    context_tiles = tl.cdiv(context_len, BLOCK_KEYS)

    for tile in range(first_tile, tl.minimum(last_tile, whole_tiles)):
        if PAGE_SIZE % BLOCK_KEYS == 0:  # the tile lies in one page
            offsets = tiles.page_tile_offsets(
                table_ptr, tile * BLOCK_KEYS, lanes, stride_page, stride_row, PAGE_SIZE
            )
        else:
            offsets = tiles.page_offsets(
                table_ptr, tile * BLOCK_KEYS + lanes, lanes < BLOCK_KEYS,
                stride_page, stride_row, PAGE_SIZE,
            )  # fmt: skip
        values, rope = load_rows(
            kv_ptr + offsets[:, None], None, q_rope.dtype, NUM_PARTS, PART_DIMS, ROPE_DIM, IS_FP8
        )
        peak, total, acc = absorb_tile(
            q_values, q_rope, values, rope, 0.0, scale, peak, total, acc, NUM_PARTS
        )

    # What is left: a committed tile cut by the end of the context, and the tree's.
    for tile in tl.range(tl.maximum(first_tile, whole_tiles), last_tile, num_stages=TREE_STAGES):
        in_tree = tile >= context_tiles
        columns = (tile - tl.where(in_tree, context_tiles, 0)) * BLOCK_KEYS + lanes
        live = columns < tl.where(in_tree, tree_size, context_len)
        # One load a word of a row's bits, not one a column.
        words = (tile - context_tiles) * (BLOCK_KEYS // 32) + tl.arange(0, BLOCK_KEYS // 32)
        bits = tl.load(
            bits_ptr + tokens[:, None].to(tl.int64) * stride_bits_token + words[None, :],
            mask=(token_live & in_tree)[:, None] & (words * 32 < tree_size)[None, :],
            other=-1,
        )
        seen = (bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        visible = (tl.reshape(seen, [BLOCK_ROWS, BLOCK_KEYS]) != 0) & live[None, :]
        positions = columns + tl.where(in_tree, context_len, 0)
        paged = live & (not in_tree) if HYBRID else live
        offsets = tiles.page_offsets(
            table_ptr, positions, paged, stride_page, stride_row, PAGE_SIZE
        )
        rows = (kv_ptr + offsets)[:, None]
        if HYBRID:
            beside = tree_ptr + columns.to(tl.int64) * stride_tree_row
            rows = tl.where(in_tree, beside[:, None], rows)
        values, rope = load_rows(
            rows, live[:, None], q_rope.dtype, NUM_PARTS, PART_DIMS, ROPE_DIM, IS_FP8
        )
        hidden = tl.where(visible, 0.0, -float("inf"))
        peak, total, acc = absorb_tile(
            q_values, q_rope, values, rope, hidden, scale, peak, total, acc, NUM_PARTS
        )

    # Rows that saw nothing: result 0, lse -inf. NaN is not 0: what was seen of it stays to be seen.
    seen = token_live & (total != 0.0)
    divisor = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (peak + tl.log2(divisor)) * tiles.LN_2, -float("inf"))
    out = ()
    for part in tl.static_range(NUM_PARTS):
        out = out + (tl.where(seen[:, None], acc[part] / divisor[:, None], 0.0),)
    return out, lse
