"""Experts on their tokens in four launches whose grids do not depend on the routing.

::

    order     pairs (row, choice) by expert, and tiles of at most BLOCK_TOKENS pairs of one expert
    gate_up   h = silu(gate x) * up x       one program a tile, a block of I, a part of hidden
    down      part = weight * (down h)      one program a tile and a block of hidden
    combine   y = sum of a row's parts, in the order of its choices

Weights are the rows of the matrix instruction and tokens its columns, of which it has as few as
eight: an expert with one token is not padded to a tile of 64. The tiles of an expert with more
tokens than one holds follow each other in the grid, so that they share what the first one read.
The number of tiles is bounded by M, K and E alone; programs beyond the last tile find nothing to
do. Packed weights become numbers in registers.

Nothing is added atomically: parts of `hidden` are float32 and summed by `down` in their order, so
results repeat to the bit. Beside the weights this moves about
M * K * (2 * hidden + I * itemsize) * 4 bytes of results on their way.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from engine.errors import BackendError
from engine.kernels.machine import INTERPRETER_ARCH, arch_of, num_sms
from engine.kernels.operands import room
from engine.kernels.triton_build import triton_kernel
from engine.kernels.triton_device import check_multiplied_rows, on_device

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.grouped_experts.problem import Problem, Projection
    from engine.kernels.op import Kernel

# Columns of a tile: the fewest a matrix instruction has, and the most that leave the sums of both
# projections in registers. A tile is twice as wide as the mean number of tokens an expert gets,
# so that most experts are one tile.
FEWEST_TOKENS, MOST_TOKENS = 8, 64
NARROW_MOST_TOKENS, FLOAT32_MOST_TOKENS = 32, 16  # on sm_120, in float32: more spill
BLOCK_OUT = 64  # rows of a tile: those of four warps' matrix instruction
PLAIN_INPUTS, PACKED_INPUTS, FLOAT32_INPUTS = 64, 128, 32  # inputs of a tile; 64 bytes of a row
MIN_INPUTS = 16  # of a matrix instruction
NUM_WARPS = 4
STAGES, NARROW_STAGES, FLOAT32_STAGES = 4, 3, 1
NARROW_ARCHS = (120,)  # 99 KB of shared memory, others have 227
ARCH_SMS = {90: 132, 100: 148, 120: 188}  # of H200, B200 and RTX PRO 6000: for what is compiled
PROGRAMS_PER_SM = 2  # that gate_up aims at when it divides `hidden`
MOST_DEFAULT_SPLITS = 8
MIN_SPLIT_INPUTS = 512  # below this a part costs more in merging than it saves
BLOCK_PAIRS = 1024  # ids an ordering program looks at in one go
MIN_BINS = 128  # of a histogram: one for each thread
BLOCK_TILES = 128  # entries of the tile table written in one go
COMBINED_DIMS = 512
INTERPRETED_ROWS = 64  # of a combining program; the interpreter pays by program, a device has one
INT32_BYTES = 4
ALIGNMENT = 4  # numbers of 4 bytes: parts of the workspace begin at multiples of 16 bytes


@triton.jit
def load_ids(ids_ptr, pairs, K, E, num_pairs, stride_row, stride_choice):
    """Expert of each pair, -1 where it has none."""
    at = (pairs // K).to(tl.int64) * stride_row + (pairs % K).to(tl.int64) * stride_choice
    ids = tl.load(ids_ptr + at, mask=pairs < num_pairs, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@triton.jit
def order_kernel(
    ids_ptr,  # [M, K] int32 or int64
    order_ptr,  # [num_pairs] int32: pairs by expert
    tiles_ptr,  # [3, num_tiles] int32: expert (-1: none), first and last entry of order
    K, E, num_pairs, num_tiles,
    stride_row, stride_choice,
    BLOCK_TOKENS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Write the pairs of one expert in their order, and the tiles they are cut into.

    Every program counts all ids for itself, so that none waits for another.
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        ids = load_ids(ids_ptr, first + lanes, K, E, num_pairs, stride_row, stride_choice)
        counts += tl.histogram(tl.maximum(ids, 0), BINS, mask=ids >= 0)
    own = tl.sum(tl.where(bins == expert, counts, 0))
    start = tl.sum(tl.where(bins < expert, counts, 0))
    blocks = (counts + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    first_tile = tl.sum(tl.where(bins < expert, blocks, 0))
    own_tiles = tl.cdiv(own, BLOCK_TOKENS)

    rank = start
    if own > 0:
        for first in range(0, num_pairs, BLOCK):
            pairs = first + lanes
            ids = load_ids(ids_ptr, pairs, K, E, num_pairs, stride_row, stride_choice)
            is_own = (ids == expert).to(tl.int32)
            places = rank + tl.cumsum(is_own, 0) - 1
            tl.store(order_ptr + places, pairs, mask=is_own != 0)
            rank += tl.sum(is_own)

    tile_lanes = tl.arange(0, BLOCK_TILES)
    for first in range(0, own_tiles, BLOCK_TILES):
        at = first + tile_lanes
        entries = tiles_ptr + first_tile + at
        begin = start + at * BLOCK_TOKENS
        end = tl.minimum(begin + BLOCK_TOKENS, start + own)
        tl.store(entries, tl.zeros([BLOCK_TILES], tl.int32) + expert, mask=at < own_tiles)
        tl.store(entries + num_tiles, begin, mask=at < own_tiles)
        tl.store(entries + 2 * num_tiles, end, mask=at < own_tiles)
    if expert == E - 1:  # what no expert fills
        for first in range(first_tile + own_tiles, num_tiles, BLOCK_TILES):
            at = first + tile_lanes
            tl.store(tiles_ptr + at, tl.full([BLOCK_TILES], -1, tl.int32), mask=at < num_tiles)


@triton.jit
def load_weights(
    values_ptr,  # this expert's rows; words of eight inputs where GROUP
    scale_ptr,  # this expert's scales where GROUP, else never read
    rows, first_input, width,
    stride_values, stride_scale,
    BLOCK_OUT: tl.constexpr, BLOCK_INPUTS: tl.constexpr, GROUP: tl.constexpr,
    IS_WHOLE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Tile [BLOCK_OUT, BLOCK_INPUTS] of an expert's weights in DTYPE, 0 beyond the width."""
    rows = rows[:, None].to(tl.int64)
    if GROUP == 0:
        inputs = first_input + tl.arange(0, BLOCK_INPUTS)
        values = values_ptr + rows * stride_values + inputs[None, :]
        if IS_WHOLE:
            return tl.load(values)
        else:  # noqa: RET505 - the branches are chosen when compiled
            return tl.load(values, mask=(inputs < width)[None, :], other=0.0)
    else:
        words_at = first_input // 8 + tl.arange(0, BLOCK_INPUTS // 8)
        groups = first_input // GROUP + tl.arange(0, BLOCK_INPUTS // GROUP)
        words_ptr = values_ptr + rows * stride_values + words_at[None, :]
        scales_ptr = scale_ptr + rows * stride_scale + groups[None, :]
        if IS_WHOLE:
            words, scales = tl.load(words_ptr), tl.load(scales_ptr)
        else:
            words = tl.load(words_ptr, mask=(words_at * 8 < width)[None, :], other=0)
            scales = tl.load(scales_ptr, mask=(groups * GROUP < width)[None, :], other=0.0)
        nibbles = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 0xF
        # 2**23 + n as float32 is the bits of 2**23 with n in the lowest ones: no conversion.
        numbers = (nibbles | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        numbers = tl.reshape(numbers, [BLOCK_OUT, BLOCK_INPUTS // GROUP, GROUP])
        product = numbers * scales.to(tl.float32)[:, :, None]
        if scales.dtype == tl.bfloat16 and tl.bfloat16 != DTYPE:
            # To the nearest by hand: Triton's interpreter would cut the bits off.
            bits = product.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            product = bits.to(tl.float32, bitcast=True)
        elif scales.dtype == tl.float16:
            product = product.to(tl.float16)
        return tl.reshape(product.to(DTYPE), [BLOCK_OUT, BLOCK_INPUTS])


@triton.jit
def gate_up_kernel(
    x_ptr,  # [M, hidden]
    order_ptr, tiles_ptr,  # as order_kernel wrote them
    gate_ptr, gate_scale_ptr,  # [E, I, hidden] as stored
    up_ptr, up_scale_ptr,
    h_ptr,  # [num_pairs, I] of x's dtype in the order of order; IS_SPLIT: see below
    K, num_tiles, hidden, inner, num_splits,
    plane,  # num_pairs * I
    stride_x,
    stride_gate_expert, stride_gate_row, stride_gate_scale_expert, stride_gate_scale_row,
    stride_up_expert, stride_up_row, stride_up_scale_expert, stride_up_scale_row,
    IS_SPLIT: tl.constexpr,  # h is [num_splits, 2, num_pairs, I] float32: gate and up apart
    GROUP: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Write one block of h, or of its parts, for the tokens of one tile."""
    tile, split = tl.program_id(0), tl.program_id(2)
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    slots = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, BLOCK_TOKENS)
    live = slots < tl.load(tiles_ptr + 2 * num_tiles + tile)
    rows = tl.load(order_ptr + slots, mask=live, other=0) // K
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    weight_rows = tl.minimum(outs, inner - 1)  # what is beyond is worked on and not stored
    inputs = tl.arange(0, BLOCK_INPUTS)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    x_rows = x_ptr + rows[None, :].to(tl.int64) * stride_x
    gate_ptr += expert * stride_gate_expert
    gate_scale_ptr += expert * stride_gate_scale_expert
    up_ptr += expert * stride_up_expert
    up_scale_ptr += expert * stride_up_scale_expert
    steps = tl.cdiv(tl.cdiv(hidden, BLOCK_INPUTS), num_splits)
    begin = split * steps * BLOCK_INPUTS
    end = tl.minimum(begin + steps * BLOCK_INPUTS, hidden)

    gate = tl.zeros([BLOCK_OUT, BLOCK_TOKENS], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_TOKENS], tl.float32)
    for first in range(begin, end, BLOCK_INPUTS):
        at = first + inputs
        seen = live[None, :] if IS_WHOLE else live[None, :] & (at < hidden)[:, None]
        x = tl.load(x_rows + at[:, None], mask=seen, other=0.0)
        weights = load_weights(
            gate_ptr, gate_scale_ptr, weight_rows, first, hidden,
            stride_gate_row, stride_gate_scale_row, BLOCK_OUT, BLOCK_INPUTS, GROUP, IS_WHOLE,
            DTYPE,
        )  # fmt: skip
        gate = tl.dot(weights, x, gate, input_precision="ieee")
        weights = load_weights(
            up_ptr, up_scale_ptr, weight_rows, first, hidden,
            stride_up_row, stride_up_scale_row, BLOCK_OUT, BLOCK_INPUTS, GROUP, IS_WHOLE,
            DTYPE,
        )  # fmt: skip
        up = tl.dot(weights, x, up, input_precision="ieee")

    stored = live[None, :] & (outs < inner)[:, None]
    h_at = slots[None, :].to(tl.int64) * inner + outs[:, None]
    if IS_SPLIT:
        part = h_ptr + 2 * split.to(tl.int64) * plane + h_at
        tl.store(part, gate, mask=stored)
        tl.store(part + plane, up, mask=stored)
    else:
        h = gate * tl.sigmoid(gate) * up
        tl.store(h_ptr + h_at, h.to(h_ptr.dtype.element_ty), mask=stored)


@triton.jit
def merge_splits(
    h_rows, seen, plane, num_splits, BLOCK_INPUTS: tl.constexpr, BLOCK_TOKENS: tl.constexpr
):
    """Tile [BLOCK_INPUTS, BLOCK_TOKENS] of h from the parts of gate and up, in their order."""
    gate = tl.zeros([BLOCK_INPUTS, BLOCK_TOKENS], tl.float32)
    up = tl.zeros([BLOCK_INPUTS, BLOCK_TOKENS], tl.float32)
    for split in range(num_splits):
        part = h_rows + 2 * split * plane
        gate += tl.load(part, mask=seen, other=0.0)
        up += tl.load(part + plane, mask=seen, other=0.0)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def down_kernel(
    h_ptr,  # as gate_up_kernel wrote it
    order_ptr, tiles_ptr,
    weights_ptr,  # [M, K] float32
    down_ptr, down_scale_ptr,  # [E, hidden, I] as stored
    parts_ptr,  # [num_pairs, hidden] float32, by pair
    rows_ptr,  # never read: of the dtype that h is rounded to
    K, num_tiles, hidden, inner, num_splits,
    plane,  # num_pairs * I
    stride_weights_row, stride_weights_choice,
    stride_down_expert, stride_down_row, stride_down_scale_expert, stride_down_scale_row,
    IS_SPLIT: tl.constexpr, GROUP: tl.constexpr, IS_WHOLE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Write one block of the weighted results of the pairs of one tile."""
    tile = tl.program_id(0)
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    slots = tl.load(tiles_ptr + num_tiles + tile) + tl.arange(0, BLOCK_TOKENS)
    live = slots < tl.load(tiles_ptr + 2 * num_tiles + tile)
    pairs = tl.load(order_ptr + slots, mask=live, other=0).to(tl.int64)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    weight_rows = tl.minimum(outs, hidden - 1)
    inputs = tl.arange(0, BLOCK_INPUTS)
    DTYPE: tl.constexpr = rows_ptr.dtype.element_ty
    h_rows = h_ptr + slots[None, :].to(tl.int64) * inner
    down_ptr += expert * stride_down_expert
    down_scale_ptr += expert * stride_down_scale_expert

    acc = tl.zeros([BLOCK_OUT, BLOCK_TOKENS], tl.float32)
    for first in range(0, inner, BLOCK_INPUTS):
        at = first + inputs
        seen = live[None, :] if IS_WHOLE else live[None, :] & (at < inner)[:, None]
        if IS_SPLIT:
            h = merge_splits(
                h_rows + at[:, None], seen, plane, num_splits, BLOCK_INPUTS, BLOCK_TOKENS
            ).to(DTYPE)
        else:
            h = tl.load(h_rows + at[:, None], mask=seen, other=0.0)
        weights = load_weights(
            down_ptr, down_scale_ptr, weight_rows, first, inner,
            stride_down_row, stride_down_scale_row, BLOCK_OUT, BLOCK_INPUTS, GROUP, IS_WHOLE,
            DTYPE,
        )  # fmt: skip
        acc = tl.dot(weights, h, acc, input_precision="ieee")

    choice = pairs // K * stride_weights_row + pairs % K * stride_weights_choice
    factor = tl.load(weights_ptr + choice, mask=live, other=0.0)
    stored = live[None, :] & (outs < hidden)[:, None]
    tl.store(
        parts_ptr + pairs[None, :] * hidden + outs[:, None], acc * factor[None, :], mask=stored
    )


@triton.jit
def combine_kernel(
    parts_ptr,  # [num_pairs, hidden] float32, whatever where a pair has no expert
    ids_ptr,  # [M, K]
    out_ptr,  # [M, hidden]
    M, K, E, hidden,
    stride_row, stride_choice, stride_out,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIMS: tl.constexpr,
):  # fmt: skip
    """Sum the parts of some rows over their choices."""
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    dims = tl.program_id(1) * BLOCK_DIMS + tl.arange(0, BLOCK_DIMS)
    stored = (rows < M)[:, None] & (dims < hidden)[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIMS], tl.float32)
    for choice in range(K):
        pairs = rows * K + choice
        ids = load_ids(ids_ptr, pairs, K, E, M * K, stride_row, stride_choice)
        parts = parts_ptr + pairs[:, None] * hidden + dims[None, :]
        acc += tl.load(parts, mask=stored & (ids >= 0)[:, None], other=0.0)
    out = out_ptr + rows[:, None] * stride_out + dims[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=stored)


@dataclass(frozen=True, slots=True)
class Layout:
    """What of a call follows from its shapes, its dtypes and the machine, whatever the routing."""

    block_tokens: int
    num_tiles: int
    num_splits: int
    sizes: tuple[int, int, int, int]  # of order, tiles, h and parts, in numbers of 4 bytes

    @property
    def is_split(self) -> bool:
        """Whether gate_up leaves parts for down to sum."""
        return self.num_splits > 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: what `kernel[grid](*arguments, **meta)` takes."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    meta: dict[str, Any]


def run(problem: Problem) -> None:
    """Write `out` in four launches."""
    _check(problem)
    device = problem.x.device
    with on_device(device):
        for launch in launches(problem, arch_of(device), num_sms(device)):
            launch.kernel[launch.grid](*launch.arguments, **launch.meta)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernels of the launches, ready to be compiled."""
    found = launches(problem, arch, ARCH_SMS[arch])
    return tuple(triton_kernel(one.kernel, one.arguments, one.meta, arch) for one in found)


def programs(problem: Problem) -> int:
    """Programs of the launch that reads gate and up."""
    plan = _layout_here(problem)
    return plan.num_tiles * -(-problem.inner // BLOCK_OUT) * plan.num_splits


def workspace_size(problem: Problem) -> int:
    """Numbers of 4 bytes that a call needs for results on their way."""
    return sum(_layout_here(problem).sizes)


def layout(problem: Problem, arch: int, sms: int) -> Layout:
    """Choose the tiles of a call, and how often `hidden` is divided.

    A function of shapes, dtypes and the number of SMs, so that it is the same for every step of a
    captured graph and needs nothing from the device.
    """
    M, hidden = problem.x.shape
    P, E = problem.num_pairs, problem.num_experts
    most_tokens = NARROW_MOST_TOKENS if arch in NARROW_ARCHS else MOST_TOKENS
    if problem.x.dtype == torch.float32:
        most_tokens = FLOAT32_MOST_TOKENS
    block_tokens = min(_block_tokens(M, 2 * P / E), most_tokens)
    # A tile that is not full is the last one of its expert.
    num_tiles = (P + min(P, E) * (block_tokens - 1)) // block_tokens
    columns = -(-problem.inner // BLOCK_OUT)
    filling = PROGRAMS_PER_SM * sms // (num_tiles * columns)
    chosen = max(1, min(filling, hidden // MIN_SPLIT_INPUTS, MOST_DEFAULT_SPLITS))
    num_splits = problem.num_splits or chosen
    h_bytes = P * problem.inner * (problem.x.itemsize if num_splits == 1 else 2 * INT32_BYTES)
    numbers = (P, 3 * num_tiles, num_splits * -(-h_bytes // INT32_BYTES), P * hidden)
    order, tiles, h, parts = (-(-size // ALIGNMENT) * ALIGNMENT for size in numbers)
    return Layout(block_tokens, num_tiles, num_splits, (order, tiles, h, parts))


def _layout_here(problem: Problem) -> Layout:
    device = problem.x.device
    return layout(problem, arch_of(device), num_sms(device))


def launches(problem: Problem, arch: int, sms: int) -> tuple[Launch, ...]:
    """Return the launches of a call on an architecture (90 is sm_90), in their order."""
    plan = layout(problem, arch, sms)
    order, tiles, h, parts = _workspace(problem, plan)
    K, E, P = problem.expert_ids.shape[1], problem.num_experts, problem.num_pairs
    ids, sizes = problem.expert_ids, (*problem.x.shape, problem.inner)
    M, hidden, inner = sizes
    gate, up, down = (_operands(one) for one in (problem.gate, problem.up, problem.down))
    common = (K, plan.num_tiles, hidden, inner, plan.num_splits, P * inner)
    bins = max(MIN_BINS, triton.next_power_of_2(E))
    block_pairs = min(BLOCK_PAIRS, max(MIN_BINS, triton.next_power_of_2(P)))
    rows = 1 if arch != INTERPRETER_ARCH else INTERPRETED_ROWS
    dims = min(COMBINED_DIMS, triton.next_power_of_2(hidden))
    return (
        Launch(
            order_kernel,
            (E,),
            (ids, order, tiles, K, E, P, plan.num_tiles, *ids.stride()),
            {
                "BLOCK_TOKENS": plan.block_tokens,
                "BINS": bins,
                "BLOCK": block_pairs,
                "BLOCK_TILES": BLOCK_TILES,
                "num_warps": NUM_WARPS,
            },
        ),
        Launch(
            gate_up_kernel,
            (plan.num_tiles, -(-inner // BLOCK_OUT), plan.num_splits),
            (
                *(problem.x, order, tiles, *gate.tensors, *up.tensors, h, *common),
                *(problem.x.stride(0), *gate.strides, *up.strides),
            ),
            _meta(problem, plan, problem.gate, hidden, arch),
        ),
        Launch(
            down_kernel,
            (plan.num_tiles, -(-hidden // BLOCK_OUT)),
            (
                *(h, order, tiles, problem.expert_weights, *down.tensors, parts, problem.x),
                *(*common, *problem.expert_weights.stride(), *down.strides),
            ),
            _meta(problem, plan, problem.down, inner, arch),
        ),
        Launch(
            combine_kernel,
            (-(-M // rows), -(-hidden // dims)),
            (parts, ids, problem.out, M, K, E, hidden, *ids.stride(), problem.out.stride(0)),
            {"BLOCK_ROWS": rows, "BLOCK_DIMS": dims, "num_warps": NUM_WARPS},
        ),
    )


def _block_tokens(num_rows: int, wanted: float) -> int:
    """Columns of a tile: room for all rows, if these are few, or about as many as wanted."""
    if num_rows <= FEWEST_TOKENS:
        return FEWEST_TOKENS
    size = 2 * FEWEST_TOKENS
    while size < wanted and size < MOST_TOKENS:
        size *= 2
    return size


def _meta(
    problem: Problem, plan: Layout, projection: Projection, width: int, arch: int
) -> dict[str, Any]:
    """Sizes of the tiles of a kernel that reads a projection of `width` inputs."""
    group, is_float32 = projection.group_size, problem.x.dtype == torch.float32
    most = FLOAT32_INPUTS if is_float32 else PACKED_INPUTS if group else PLAIN_INPUTS
    inputs = max(MIN_INPUTS, group, min(most, triton.next_power_of_2(width)))
    stages = NARROW_STAGES if arch in NARROW_ARCHS else STAGES
    return {
        "IS_SPLIT": plan.is_split,
        "GROUP": group,
        "IS_WHOLE": width % inputs == 0,
        "BLOCK_TOKENS": plan.block_tokens,
        "BLOCK_OUT": BLOCK_OUT,
        "BLOCK_INPUTS": inputs,
        "num_warps": NUM_WARPS,
        "num_stages": FLOAT32_STAGES if is_float32 else stages,
    }


@dataclass(frozen=True, slots=True)
class _Operands:
    """A projection as kernels take it; without scales the values stand in, never read."""

    tensors: tuple[Tensor, Tensor]
    strides: tuple[int, int, int, int]


def _operands(projection: Projection) -> _Operands:
    values, scale = projection.values, projection.scale
    if scale is None:
        return _Operands((values, values), (values.stride(0), values.stride(1), 0, 0))
    strides = (values.stride(0), values.stride(1), scale.stride(0), scale.stride(1))
    return _Operands((values, scale), strides)


def _workspace(problem: Problem, plan: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for order, tiles, h and parts, in the caller's workspace if there is one."""
    flat = room(problem.workspace, sum(plan.sizes), problem.x.device)
    order, tiles, h, parts = torch.split(flat, list(plan.sizes))
    rounded = h if plan.is_split else h.view(problem.x.dtype)
    return order.view(torch.int32), tiles.view(torch.int32), rounded, parts


def _check(problem: Problem) -> None:
    """Refuse what the kernels cannot run."""
    check_multiplied_rows(problem.x)
    for one in (problem.gate, problem.up, problem.down):
        group = one.group_size
        if one.scale is not None and (not 0 < group <= PACKED_INPUTS or group & (group - 1)):
            stored = f"{one.values.dtype} with blocks of {one.block}"
            raise BackendError(
                "backend triton: expected plain weights or int4 ones in groups of a power of two "
                f"up to {PACKED_INPUTS}, got {stored} (tiles are powers of two)"
            )
    if problem.gate.group_size != problem.up.group_size:
        raise BackendError(
            f"backend triton: expected groups of one size in gate and up, got "
            f"{problem.gate.group_size} and {problem.up.group_size} (they share a tile)"
        )
