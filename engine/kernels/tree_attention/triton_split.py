"""The rows of a sequence divided over programs; a second kernel merges the partial results.

Tree tokens and heads are packed into rows that share one read of the cache; see triton_parts.
Tiles of committed rows carry no mask but the last one, which is worked on by itself.
Each (sequence, block of packed rows) is worked on by `num_splits` programs. A program takes an
equal run of tiles, committed and tree tiles counted alike, so that short and long sequences of
one launch need no plan from the host; programs beyond a short sequence's last tile find nothing
to do. Partial results are float32 and merged in a fixed order, so results repeat to the bit.

Costs 2 * num_splits * N * T * H * (value_dim + 1) * 4 bytes of traffic for the partial results.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from engine.errors import BackendError
from engine.kernels.machine import arch_of, num_sms
from engine.kernels.operands import room
from engine.kernels.tree_attention import tiles, triton_parts
from engine.kernels.tree_attention.fp8_rows import GROUP_DIMS, SCALE_BYTES
from engine.kernels.triton_device import on_device

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.tree_attention.problem import Problem

# Rows and keys of a tile of packed rows, dims read at a time, stages of the loops over the prefix
# and over the tree, warps, and how many programs an SM holds at D = 576 in bf16. Measured on an
# H200: few rows are fastest in short tiles, which read the cache several times through L2 but hide
# each other's latency, in the lowest ones where there is little to read; many rows in tall ones.
# Cards with 99 KB get the narrow ones, the largest that do not spill there.
LOW_TILES = {
    "BLOCK_ROWS": 16,
    "BLOCK_KEYS": 64,
    "PART_DIMS": 128,
    "TREE_STAGES": 2,
    "num_warps": 4,
    "num_stages": 2,
}
SHORT_TILES = LOW_TILES | {"BLOCK_ROWS": 32}
TALL_TILES = LOW_TILES | {"BLOCK_ROWS": 64, "TREE_STAGES": 1, "num_warps": 8}
NARROW_TILES = {
    "BLOCK_ROWS": 32,
    "BLOCK_KEYS": 32,
    "PART_DIMS": 512,
    "TREE_STAGES": 2,
    "num_warps": 8,
    "num_stages": 3,
}
FP8_TILES = SHORT_TILES | {"num_warps": 8}  # four spill on sm_100
SHORT_ROWS = 96  # most packed rows for short tiles
LOW_TOKENS = 16384  # rows the page tables have room for, below which tiles are low
SHORT_PROGRAMS_PER_SM, TALL_PROGRAMS_PER_SM = 2, 1
WIDE_ARCHS = (90, 100)  # 227 KB of shared memory
TALL_ARCHS = (90,)  # on sm_100 they ask for 344 KB
MIN_SPLIT_ROWS = 2 * tiles.BLOCK_KEYS  # below this a split costs more in merging than it saves
PROGRAM_TILES = 4  # that fit in the time a program takes besides its tiles
MOST_WAVES = 16  # of programs over the device: more cost more than they even out
MERGE_WARPS = 4
# Dims of a merging program, more programs than SMs also for few rows, and the partial rows it has
# in flight: few splits, and many.
MERGE_FEW, MERGE_MANY = (128, 32), (64, 128)
FEW_SPLITS = 32


@triton.jit
def split_kernel(
    q_ptr,  # [N, T, H, D]
    kv_ptr,  # [P, L, D], or bytes where IS_FP8
    table_ptr,  # [N, max_pages] int32
    context_ptr,  # [N]
    bits_ptr,  # [N, T, W] int32
    tree_sizes_ptr,  # [N]
    tree_ptr,  # [N, T, D or bytes] where HYBRID
    partial_out_ptr,  # [num_splits, N, T, H, VALUE_DIM] float32, 0 where lse is -inf
    partial_lse_ptr,  # [num_splits, N, T, H] float32
    N, T, H, num_splits, scale,
    stride_q_sequence, stride_q_token, stride_q_head,
    stride_page, stride_row,
    stride_table, stride_bits_sequence, stride_bits_token,
    stride_tree_sequence, stride_tree_row,
    PAGE_SIZE: tl.constexpr, HYBRID: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    SCORE_DIMS: tl.constexpr, READ_ONCE: tl.constexpr, TREE_STAGES: tl.constexpr,
    PART_DIMS: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Write the partial result of one split, for one block of rows of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * BLOCK_ROWS
    packed = first_row + tl.arange(0, BLOCK_ROWS)  # row = token * H + head
    tokens, heads = packed // H, packed % H
    split = tl.program_id(2)
    context_len = tl.load(context_ptr + sequence).to(tl.int32)
    tree_size = tl.load(tree_sizes_ptr + sequence).to(tl.int32)
    num_tiles = tiles.count(context_len, tree_size, first_row // H, BLOCK_KEYS)
    tiles_per_split = tl.cdiv(num_tiles, num_splits)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)

    q_rows = q_ptr + sequence * stride_q_sequence
    q_rows += tokens[:, None].to(tl.int64) * stride_q_token
    q_rows += heads[:, None].to(tl.int64) * stride_q_head
    kv_rows = table_ptr + sequence * stride_table
    tree_rows = tree_ptr + sequence * stride_tree_sequence
    bits = bits_ptr + sequence * stride_bits_sequence
    if READ_ONCE:
        out, lse = triton_parts.walk_once(
            q_rows, tokens, kv_ptr, kv_rows, tree_rows, bits,
            context_len, tree_size, first_tile, last_tile, scale,
            stride_page, stride_row, stride_tree_row, stride_bits_token,
            PAGE_SIZE, HYBRID, BLOCK_ROWS, BLOCK_KEYS, VALUE_DIM, ROPE_DIM, TREE_STAGES,
            PART_DIMS, IS_FP8,
        )  # fmt: skip
    else:
        whole, lse = tiles.walk(
            q_rows, tokens, kv_ptr, kv_rows, tree_rows, bits,
            context_len, tree_size, first_tile, last_tile, scale,
            stride_page, stride_row, stride_tree_row, stride_bits_token,
            PAGE_SIZE, HYBRID, BLOCK_ROWS, BLOCK_KEYS, VALUE_DIM, ROPE_DIM,
            SCORE_DIMS, READ_ONCE, TREE_STAGES,
        )  # fmt: skip
        out = (whole,)

    stored = tokens < T
    rows = (split * N + sequence) * T * H + packed
    out_rows = partial_out_ptr + rows[:, None] * VALUE_DIM + tl.arange(0, PART_DIMS)[None, :]
    for part in tl.static_range(VALUE_DIM // PART_DIMS):
        tl.store(out_rows + part * PART_DIMS, out[part], mask=stored[:, None])
    tl.store(partial_lse_ptr + rows, lse, mask=stored)


@triton.jit
def merge_kernel(
    partial_out_ptr,  # [num_splits, rows, VALUE_DIM] float32, rows = N * T * H
    partial_lse_ptr,  # [num_splits, rows] float32
    out_ptr,  # [N, T, H, VALUE_DIM]
    lse_ptr,  # [N, T, H] float32
    T, H, num_rows, num_splits,
    stride_out_sequence, stride_out_token, stride_out_head,
    stride_lse_sequence, stride_lse_token, stride_lse_head,
    VALUE_DIM: tl.constexpr, BLOCK_DIMS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Write out and lse of a block of rows: partial results weighted by exp(their lse - lse)."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rows = rows.to(tl.int64)
    stored = rows < num_rows
    dims = tl.program_id(1) * BLOCK_DIMS + tl.arange(0, BLOCK_DIMS)
    peak = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIMS], tl.float32)

    for first_split in range(0, num_splits, BLOCK_SPLITS):
        splits = first_split + tl.arange(0, BLOCK_SPLITS)
        live = (splits < num_splits)[None, :] & stored[:, None]
        partial_rows = splits[None, :].to(tl.int64) * num_rows + rows[:, None]
        partial_lse = tl.load(partial_lse_ptr + partial_rows, mask=live, other=-float("inf"))
        partial_out = tl.load(
            partial_out_ptr + partial_rows[:, :, None] * VALUE_DIM + dims[None, None, :],
            mask=live[:, :, None],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(partial_lse, 1))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2((partial_lse - shift[:, None]) * tiles.LOG2_E)
        decay = tl.exp2((peak - shift) * tiles.LOG2_E)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * partial_out, 1)
        peak = new_peak

    seen = total != 0.0  # true of NaN
    divisor = tl.where(seen, total, 1.0)
    lse = tl.where(seen, peak + tl.log2(divisor) * tiles.LN_2, -float("inf"))
    head, token, sequence = rows % H, rows // H % T, rows // H // T
    out_rows = sequence * stride_out_sequence + token * stride_out_token + head * stride_out_head
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_rows[:, None] + dims[None, :], out, mask=stored[:, None])
    lse_rows = sequence * stride_lse_sequence + token * stride_lse_token + head * stride_lse_head
    tl.store(lse_ptr + lse_rows, lse, mask=stored & (tl.program_id(1) == 0))


def run(problem: Problem) -> None:
    """Write `out` and `lse` in two launches."""
    check(problem)
    num_splits = problem.num_splits or choose_num_splits(problem)
    partial_out, partial_lse = _partial_results(problem, num_splits)
    with on_device(problem.q.device):
        _launch_split(problem, partial_out, partial_lse, num_splits)
        _launch_merge(problem, partial_out, partial_lse, num_splits)


def check(problem: Problem) -> None:
    """Refuse what the kernels cannot run."""
    tiles.check(problem, "triton_split")
    if not problem.is_fp8:
        return
    if not packed(problem, arch_of(problem.q.device))["READ_ONCE"]:
        raise BackendError(
            f"backend triton_split: expected bfloat16 or float16 queries beside fp8 rows of "
            f"{problem.value_dim} values, got {problem.q.dtype} (rows are read once)"
        )
    for name, rows in (("kv_pages", problem.kv_pages), ("tree_kv", problem.tree_kv)):
        if rows is not None and (rows.data_ptr() % SCALE_BYTES or has_odd_steps(rows)):
            raise BackendError(
                f"backend triton_split: expected {name} to begin at, and step by, multiples of "
                f"{SCALE_BYTES} bytes (of a scale), got strides {rows.stride()}"
            )


def has_odd_steps(rows: Tensor) -> bool:
    """Whether rows of bytes do not all begin where a scale may."""
    return any(step % SCALE_BYTES for step in rows.stride()[:-1])


def choose_num_splits(problem: Problem) -> int:
    """Splits that end first if every sequence fills its page table, none under MIN_SPLIT_ROWS rows.

    A function of N, H, T, the capacity of the page table and the number of SMs, so that it is the
    same for every step of a captured graph and needs no length from the device.
    """
    arch = arch_of(problem.q.device)
    per_sm = TALL_PROGRAMS_PER_SM if _is_tall(problem, arch) else SHORT_PROGRAMS_PER_SM
    num_tiles = -(-problem.capacity // packed(problem, arch)["BLOCK_KEYS"])
    items = len(problem.q) * num_row_blocks(problem)
    most = max(problem.capacity // MIN_SPLIT_ROWS, 1)
    return _fastest_num_splits(items, num_tiles, most, per_sm * num_sms(problem.q.device))


@cache
def _fastest_num_splits(items: int, num_tiles: int, most: int, slots: int) -> int:
    def time(num_splits: int) -> int:  # in tiles
        waves = -(-items * num_splits // slots)
        return waves * (-(-num_tiles // num_splits) + PROGRAM_TILES)

    return min(range(1, min(most, -(-MOST_WAVES * slots // items)) + 1), key=time)


def programs(problem: Problem) -> int:
    """Programs of the launch that reads the rows."""
    num_splits = problem.num_splits or choose_num_splits(problem)
    return len(problem.q) * num_row_blocks(problem) * num_splits


def workspace_size(problem: Problem, num_splits: int) -> int:
    """Floats the partial results of a call take."""
    N, T, H, _ = problem.q.shape
    return num_splits * N * T * H * (problem.value_dim + 1)


def packed(problem: Problem, arch: int) -> dict[str, int]:
    """Sizes of the tiles of packed rows on an architecture (90 is sm_90), warps and stages."""
    sizes = tiles.per_head(problem) | {"PART_DIMS": problem.value_dim, "IS_FP8": problem.is_fp8}
    if sizes["SCORE_DIMS"] < problem.value_dim:
        return sizes  # rows too wide to be held while they are keys and values
    chosen = _wide_tiles(problem, arch) if arch in WIDE_ARCHS else NARROW_TILES
    most = min(chosen["PART_DIMS"], GROUP_DIMS) if problem.is_fp8 else chosen["PART_DIMS"]
    part_dims = min(most, problem.value_dim)
    return sizes | chosen | {"READ_ONCE": True, "PART_DIMS": part_dims}


def _wide_tiles(problem: Problem, arch: int) -> dict[str, int]:
    N, T, H, _ = problem.q.shape
    if problem.is_fp8:
        return FP8_TILES
    if _is_tall(problem, arch):
        return TALL_TILES
    has_few_rows = LOW_TILES["BLOCK_ROWS"] >= T * H
    return LOW_TILES if has_few_rows or N * problem.capacity < LOW_TOKENS else SHORT_TILES


def _is_tall(problem: Problem, arch: int) -> bool:
    _, T, H, _ = problem.q.shape
    return arch in TALL_ARCHS and T * H > SHORT_ROWS and not problem.is_fp8


def merge_tiles(problem: Problem, num_splits: int) -> dict[str, int]:
    """Sizes of the tiles of the merge.

    On a device a row has a program of its own, or several; the interpreter pays by the program.
    """
    dims, splits = MERGE_FEW if num_splits <= FEW_SPLITS else MERGE_MANY
    return {
        "VALUE_DIM": problem.value_dim,
        "BLOCK_DIMS": min(dims, problem.value_dim),
        "BLOCK_ROWS": 1 if problem.q.device.type == "cuda" else 16,
        "BLOCK_SPLITS": splits,
        "num_warps": MERGE_WARPS,
    }


def num_row_blocks(problem: Problem) -> int:
    """Blocks that the packed rows of a sequence are cut into."""
    _, T, H, _ = problem.q.shape
    return -(-T * H // packed(problem, arch_of(problem.q.device))["BLOCK_ROWS"])


def _partial_results(problem: Problem, num_splits: int) -> tuple[Tensor, Tensor]:
    """Room for partial out and lse, in the caller's workspace if there is one."""
    size, reason = workspace_size(problem, num_splits), f" ({num_splits} splits)"
    flat = room(problem.workspace, size, problem.q.device, reason=reason)
    num_outputs = num_splits * problem.out.numel()
    return flat[:num_outputs], flat[num_outputs:]


def _launch_split(
    problem: Problem, partial_out: Tensor, partial_lse: Tensor, num_splits: int
) -> None:
    N, T, H, _ = problem.q.shape
    tree, stride_tree_sequence, stride_tree_row = tiles.tree_rows(problem)
    split_kernel[(N, num_row_blocks(problem), num_splits)](
        problem.q, problem.kv_pages, problem.page_table, problem.context_lens,
        problem.ancestor_bits, problem.tree_sizes, tree, partial_out, partial_lse,
        N, T, H, num_splits, problem.softmax_scale * tiles.LOG2_E.value,
        *problem.q.stride()[:3],
        *problem.kv_pages.stride()[:2],
        problem.page_table.stride(0), *problem.ancestor_bits.stride()[:2],
        stride_tree_sequence, stride_tree_row,
        PAGE_SIZE=problem.page_size, HYBRID=problem.tree_kv is not None,
        **packed(problem, arch_of(problem.q.device)),
    )  # fmt: skip


def _launch_merge(
    problem: Problem, partial_out: Tensor, partial_lse: Tensor, num_splits: int
) -> None:
    N, T, H, _ = problem.q.shape
    tile = merge_tiles(problem, num_splits)
    grid = (-(-N * T * H // tile["BLOCK_ROWS"]), problem.value_dim // tile["BLOCK_DIMS"])
    merge_kernel[grid](
        partial_out, partial_lse, problem.out, problem.lse,
        T, H, N * T * H, num_splits,
        *problem.out.stride()[:3], *problem.lse.stride(),
        **tile,
    )  # fmt: skip
