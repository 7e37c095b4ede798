"""Two launches: tiles of keys spread over the device, then the parts of every row added.

Where a key stands is counted from the block's first row, as are lengths beyond a ring: 32 bits do.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.errors import BackendError
from engine.kernels.machine import chains, num_sms
from engine.kernels.triton_build import TritonLaunch, chained
from engine.kernels.triton_device import check_multiplied_rows, on_device

if TYPE_CHECKING:
    from engine.kernels.attend_window.problem import Problem
    from engine.kernels.op import Kernel

BLOCK_KEYS = {2: 64, 4: 32}  # by bytes of a number; one tile is all that most programs have
LEAST_ROWS, MOST_ROWS = 16, 64  # packed, of a tile: those of a matrix instruction, and of two warps
MOST_DIMS = 128  # of a head, that tiles of queries, keys and values fit every shared memory with
MOST_SPLITS = 64  # whose parts one program adds at once
NUM_WARPS, MERGE_WARPS = 4, 4
NUM_STAGES = 2  # of a loop that has few turns
MERGE_ROWS, MERGE_INTERPRETED = 1, 16  # of a program; the interpreter pays by the program
COMPILED_SMS = 132  # that a kernel for another machine is cut for; its code is the same


@triton.jit
def load_tile(rows, columns, live, dims, D, stride_row):
    """Load keys and values of columns, [BLOCK_KEYS, BLOCK_DIMS] each, zeros where not live."""
    at = rows + columns.to(tl.int64)[:, None] * stride_row + dims[None, :]
    mask = live[:, None] & (dims < D)[None, :]
    return tl.load(at + D, mask=mask, other=0.0), tl.load(at, mask=mask, other=0.0)


@triton.jit
def place_of(columns, S, last_slot, length, ring):
    """Return where columns stand, counted from the block's first row, and which hold anything."""
    back = last_slot - (columns - S)  # from the last row before the block
    back = tl.where(back < 0, back + ring, back)
    in_block = columns < S
    return tl.where(in_block, columns, -1 - back), in_block | (back < length)


@triton.jit
def absorb(queries, keys, values, steps, places, there, behind, ahead, scale, peak, total, acc):
    """Fold one tile of keys into the sums of the packed rows."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    distance = steps[:, None] - places[None, :]
    seen = there[None, :] & (distance < behind) & (distance > -ahead)
    scores = tl.where(seen, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet keeps peak -inf; shifting by 0 keeps its weights at 0.
    shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def window_kernel(
    queries_ptr,  # [N, H_kv, packed, D]
    rows_ptr,  # [N, H_kv, num_columns, 2 * D]
    lengths_ptr,  # [N] int64
    sums_ptr,  # [N * H_kv, packed, splits, D] float32
    peaks_ptr, totals_ptr,  # [N * H_kv, packed, splits] float32
    heads, packed, D, S, num_columns, ring, behind, ahead, tiles_per_split, scale,
    stride_queries_seq, stride_queries_head, stride_queries_row,
    stride_rows_seq, stride_rows_head, stride_rows_row,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIMS: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # starts before the launch ahead has ended; a device only
):  # fmt: skip
    """Attend a tile of one head's packed rows to the tiles of keys of one split."""
    item, split, num_splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    seq, head = (item // heads).to(tl.int64), (item % heads).to(tl.int64)
    length = tl.load(lengths_ptr + seq)
    last_slot = ((length + ring - 1) % ring).to(tl.int32)
    length = tl.minimum(length, ring).to(tl.int32)
    packed_rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_live = packed_rows < packed
    steps, dims = packed_rows % S, tl.arange(0, BLOCK_DIMS)
    rows = rows_ptr + seq * stride_rows_seq + head * stride_rows_head

    # Rows of the context are there already; the launch ahead writes queries and the block's.
    lanes = tl.arange(0, BLOCK_KEYS)
    first = split * tiles_per_split
    columns = first * BLOCK_KEYS + lanes
    places, there = place_of(columns, S, last_slot, length, ring)
    there = there & (columns < num_columns)
    live, in_block = there & (places > -behind), columns < S
    keys, values = load_tile(rows, columns, live & (columns >= S), dims, D, stride_rows_row)
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    new_keys, new_values = load_tile(rows, columns, live & in_block, dims, D, stride_rows_row)
    keys = tl.where(in_block[:, None], new_keys, keys)
    values = tl.where(in_block[:, None], new_values, values)
    at = queries_ptr + seq * stride_queries_seq + head * stride_queries_head
    at = at + packed_rows.to(tl.int64)[:, None] * stride_queries_row + dims[None, :]
    queries = tl.load(at, mask=row_live[:, None] & (dims < D)[None, :], other=0.0)

    peak = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIMS], tl.float32)
    peak, total, acc = absorb(
        queries, keys, values, steps, places, there, behind, ahead, scale, peak, total, acc
    )  # fmt: skip
    end = tl.minimum(first + tiles_per_split, tl.cdiv(num_columns, BLOCK_KEYS))
    for tile in range(first + 1, end):
        columns = tile * BLOCK_KEYS + lanes
        places, there = place_of(columns, S, last_slot, length, ring)
        there = there & (columns < num_columns)
        live = there & (places > -behind)
        keys, values = load_tile(rows, columns, live, dims, D, stride_rows_row)
        peak, total, acc = absorb(
            queries, keys, values, steps, places, there, behind, ahead, scale, peak, total, acc
        )  # fmt: skip

    part = (item.to(tl.int64) * packed + packed_rows) * num_splits + split
    tl.store(peaks_ptr + part, peak, mask=row_live)
    tl.store(totals_ptr + part, total, mask=row_live)
    mask = row_live[:, None] & (dims < D)[None, :]
    tl.store(sums_ptr + part[:, None] * D + dims[None, :], acc, mask=mask)


@triton.jit
def window_merge_kernel(
    sums_ptr,  # [N * H_kv, packed, splits, D] float32
    peaks_ptr, totals_ptr,  # [N * H_kv, packed, splits] float32
    out_ptr,  # [N * S, H_kv * G * D], contiguous
    heads, packed, D, S, num_splits,
    BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCK_DIMS: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # starts before the launch ahead has ended; a device only
):  # fmt: skip
    """Add the parts of packed rows of a head, and write them where the next product reads them."""
    item = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    splits, dims = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_DIMS)
    stored = (rows < packed)[:, None] & (dims < D)[None, :]
    live = (rows < packed)[:, None] & (splits < num_splits)[None, :]
    part = (item.to(tl.int64) * packed + rows)[:, None] * num_splits + splits[None, :]
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    peaks = tl.load(peaks_ptr + part, mask=live, other=-float("inf"))
    totals = tl.load(totals_ptr + part, mask=live, other=0.0)
    sums = tl.load(
        sums_ptr + part[:, :, None] * D + dims[None, None, :],
        mask=live[:, :, None] & (dims < D)[None, None, :],
        other=0.0,
    )
    # Every row sees itself, so that one of its peaks is a number.
    peak = tl.where(rows < packed, tl.max(peaks, 1), 0.0)
    weights = tl.exp2(peaks - peak[:, None])
    total = tl.where(rows < packed, tl.sum(totals * weights, 1), 1.0)
    mixed = tl.sum(sums * weights[:, :, None], 1) / total[:, None]

    seq, head = item // heads, item % heads
    group = packed // S
    at = (seq * S + rows % S).to(tl.int64) * heads * group + head * group + rows // S
    mixed = mixed.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * D + dims[None, :], mixed, mask=stored)


@dataclass(frozen=True, slots=True)
class Cut:
    """How many programs share the packed rows and the keys of a head."""

    block_keys: int
    block_rows: int
    row_tiles: int
    tiles_per_split: int
    splits: int

    @classmethod
    def of(cls, problem: Problem, sms: int) -> Cut:
        """Give every SM a program if there are keys enough, of as many tiles as that takes."""
        N, heads, packed, _ = problem.queries.shape
        block_keys = BLOCK_KEYS[problem.rows.itemsize]
        block_rows = min(max(triton.next_power_of_2(packed), LEAST_ROWS), MOST_ROWS)
        row_tiles, tiles = -(-packed // block_rows), -(-problem.rows.shape[2] // block_keys)
        most = min(max(sms // (N * heads * row_tiles), 1), MOST_SPLITS)
        per_split = -(-tiles // most)
        return cls(block_keys, block_rows, row_tiles, per_split, -(-tiles // per_split))


def run(problem: Problem) -> None:
    """Write what the rows see in two launches."""
    check_multiplied_rows(problem.queries)
    D = problem.queries.shape[3]
    if D > MOST_DIMS:
        raise BackendError(f"backend triton: expected heads of at most {MOST_DIMS} dims, got {D}")
    device = problem.queries.device
    cut = Cut.of(problem, num_sms(device))
    with on_device(device):
        for one in _launches(problem, cut, is_chained=chains(device)):
            one.start()


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernels of both launches, ready to be compiled."""
    launches = _launches(problem, Cut.of(problem, COMPILED_SMS), is_chained=True)
    return tuple(one.kernel(arch) for one in launches)


def _launches(problem: Problem, cut: Cut, *, is_chained: bool) -> tuple[TritonLaunch, TritonLaunch]:
    one, (N, heads, packed, D) = problem, problem.queries.shape
    num_parts = N * heads * packed * cut.splits
    room = torch.empty(num_parts * (D + 2), dtype=torch.float32, device=one.queries.device)
    sums, peaks, totals = room.split_with_sizes([num_parts * D, num_parts, num_parts])
    block_dims = max(triton.next_power_of_2(D), LEAST_ROWS)
    chain = chained(is_chained=is_chained)
    window = (
        *(one.queries, one.rows, one.lengths, sums, peaks, totals),
        *(heads, packed, D, one.block_size, one.rows.shape[2], one.ring, one.behind, one.ahead),
        *(cut.tiles_per_split, D**-0.5 * math.log2(math.e)),
        *(*one.queries.stride()[:3], *one.rows.stride()[:3]),
    )
    window_meta = {
        "BLOCK_ROWS": cut.block_rows,
        "BLOCK_KEYS": cut.block_keys,
        "BLOCK_DIMS": block_dims,
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
    }
    merge = (sums, peaks, totals, one.out, heads, packed, D, one.block_size, cut.splits)
    merge_meta = {
        "BLOCK_ROWS": MERGE_INTERPRETED if triton.knobs.runtime.interpret else MERGE_ROWS,
        "BLOCK_SPLITS": triton.next_power_of_2(cut.splits),
        "BLOCK_DIMS": block_dims,
        "num_warps": MERGE_WARPS,
    }
    windows = (N * heads, cut.row_tiles, cut.splits)
    merges = (N * heads, triton.cdiv(packed, merge_meta["BLOCK_ROWS"]))
    return (
        TritonLaunch(window_kernel, windows, window, window_meta | chain),
        TritonLaunch(window_merge_kernel, merges, merge, merge_meta | chain),
    )
