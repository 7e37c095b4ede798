"""Two launches: the K best of each part of a row, then the K best of these, in order.

A logit is an integer of the same order. The K-th largest is found by halving the range it lies in
and counting, which takes as long for any K; so is the last id among equals of it. Only the K that
are left are brought into order: each counts those before it.

Parts depend on the vocabulary and K alone, so that a row has the same sums in any company.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.errors import BackendError
from engine.kernels.machine import chains
from engine.kernels.operands import NO_TOKEN
from engine.kernels.triton_build import TritonLaunch, chained
from engine.kernels.triton_device import check_device, on_device
from engine.kernels.triton_numbers import LEAST, TINY, finite

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.likeliest_tokens.problem import Problem
    from engine.kernels.op import Kernel

LEAST_PART = 1024  # tokens, so that a row of 20480 is on 20 SMs
MOST_PARTS = 128  # of a row, whose best the second launch has to look through
MOST_PAIRS = 8192  # that are looked through, in the registers of one block
KEYS_PER_WARP = 512  # 16 in the registers of a thread
MOST_WARPS = 16
COLUMNS_PER_WARP = 128  # one load of a thread, and what is below it in the tile is its own too
RANKED = 64  # that a thread block compares all of its choices with at a time
MOST_WIDTH = 512  # the candidates of all parts stay in the registers of a block
NO_KEY = tl.constexpr(-(2**31))  # below that of every logit
NO_PAIR = tl.constexpr(-(2**63))
LAST_ID = tl.constexpr(2**31 - 1)  # less an id it is the id, all bits turned
NONE = tl.constexpr(NO_TOKEN)


@triton.jit
def in_order(bits):
    """Integers of the order of float32 numbers with these bits; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def sum_of(tile):
    """The sum of a tile: of its columns, which a thread has in its registers, then of all."""
    return tl.sum(tl.sum(tile, 0), 0)


@triton.jit
def least_of(tile):
    """The least number of a tile."""
    return tl.min(tl.min(tile, 0), 0)


@triton.jit
def most_of(tile):
    """The largest number of a tile."""
    return tl.max(tl.max(tile, 0), 0)


@triton.jit
def halved(keys, low, high, K):
    """A number in low..high that K keys reach, and no more than that many exceed."""
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without an overflow
        count = sum_of((keys >= middle).to(tl.int32))
        low = tl.where(count >= K, middle, low)
        high = tl.where(count > K, high, tl.where(count == K, middle, middle - 1))
    return low


@triton.jit
def edge_of(keys, low, high, K):
    """The K-th largest key, which is not below `low`; `high` is the largest."""
    upper = keys >> 16  # all there is of a logit that was bfloat16
    first = halved(upper, low >> 16, high >> 16, K)
    bottom = least_of(tl.where(upper >= first, keys, LAST_ID))
    top = most_of(tl.where(upper == first, keys, NO_KEY))
    is_found = sum_of((upper >= first).to(tl.int32)) == K
    return halved(keys, bottom, tl.where(is_found, bottom, top), K)


@triton.jit
def places_of(keys, turned, edge, K):
    """Where each of the K best goes, in no order; the others go to K. `turned` ids are unique."""
    is_above, is_equal = keys > edge, keys == edge
    counts = sum_of(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16))  # two in one
    missing = K - (counts & 0xFFFF)
    last = 0
    if (counts >> 16) > missing:
        equals = tl.where(is_equal, turned, -1)
        last = halved(
            equals, least_of(tl.where(is_equal, turned, LAST_ID)), most_of(equals), missing
        )
    is_chosen = is_above | (is_equal & (turned >= last))
    ones = is_chosen.to(tl.int32)
    columns = tl.sum(ones, 0)
    before = tl.cumsum(columns, 0) - columns
    return tl.where(is_chosen, before[None, :] + tl.cumsum(ones, 0) - 1, K)


@triton.jit
def part_best_kernel(
    logits_ptr,  # [N, horizon, V] float32
    pairs_ptr,  # [R, parts + 1, K] int64: a key and, turned, its token
    edges_ptr,  # [R, parts] int32
    most_ptr, sums_ptr,  # [R, parts] float32
    V, horizon, stride_sequence, stride_depth, num_parts,
    K: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # starts before the launch ahead has ended; a device only
):  # fmt: skip
    """Write the K best of one part of a row, its largest logit and its sum, finite if sound."""
    row, part = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK_COLUMNS)
    lines = tl.arange(0, BLOCK_TOKENS // BLOCK_COLUMNS)
    tokens = part * BLOCK_TOKENS + lines[:, None] * BLOCK_COLUMNS + columns[None, :]
    live = tokens < V
    start = (row // horizon).to(tl.int64) * stride_sequence
    start += (row % horizon).to(tl.int64) * stride_depth
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()

    logits = tl.load(logits_ptr + start + tokens, mask=live, other=float("-inf"))
    most = finite(most_of(logits))
    total = sum_of(tl.exp(logits - most))
    keys = in_order((logits + 0.0).to(tl.int32, bitcast=True))  # -0.0 becomes 0.0, its equal
    keys = tl.where(live, keys, NO_KEY)
    of_columns = tl.max(keys, 0)
    if BLOCK_CHOICES <= BLOCK_COLUMNS:  # K groups reach the least of their best
        groups = tl.reshape(of_columns, [BLOCK_CHOICES, BLOCK_COLUMNS // BLOCK_CHOICES])
        low = tl.min(tl.max(groups, 1), 0)
    else:
        low = least_of(keys)
    edge = edge_of(keys, low, tl.max(of_columns, 0), K)
    turned = tokens ^ LAST_ID
    place = places_of(keys, turned, edge, K)

    at = row.to(tl.int64) * num_parts + part
    # The last of the row's places for parts is room for its choices.
    pairs = (keys.to(tl.int64) << 32) | turned.to(tl.int64)
    tl.store(pairs_ptr + (at + row) * K + place, pairs, mask=place < K)
    tl.store(edges_ptr + at, edge)
    tl.store(most_ptr + at, most)
    tl.store(sums_ptr + at, total)


@triton.jit
def order_best_kernel(
    pairs_ptr,  # [R, parts + 1, K] int64, the last of a row written here
    edges_ptr,  # [R, parts] int32
    most_ptr, sums_ptr,  # [R, parts] float32
    ids_ptr,  # [R, K] int64
    log_probs_ptr,  # [R, K] float32
    num_rows, num_parts,
    K: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, BLOCK_CHOICES: tl.constexpr, BLOCK_RANKED: tl.constexpr,
    BLOCK_SUMS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Write the K best of one row, in order, and how likely they are."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_PARTS)
    at, is_part = row * num_parts + parts, parts < num_parts
    start = row * (num_parts + 1) * K
    lines = tl.arange(0, BLOCK_PAIRS // BLOCK_COLUMNS)
    offsets = lines[:, None] * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    pairs = tl.load(pairs_ptr + start + offsets, mask=offsets < num_parts * K, other=NO_PAIR)
    edges = tl.load(edges_ptr + at, mask=is_part, other=NO_KEY)
    most_of_parts = tl.load(most_ptr + at, mask=is_part, other=LEAST)
    sums = tl.load(sums_ptr + at, mask=is_part, other=0.0)
    num_unsound = 0
    for first in range(0, num_rows * num_parts, BLOCK_SUMS):  # of all rows: one spoils all
        others = first + tl.arange(0, BLOCK_SUMS)
        one = tl.load(sums_ptr + others, mask=others < num_rows * num_parts, other=0.0)
        num_unsound += tl.sum(tl.where(one < float("inf"), 0, 1), 0)

    most = tl.max(most_of_parts, 0)
    total = tl.sum(sums * tl.exp(most_of_parts - most), 0)
    total = finite(tl.log(tl.maximum(total, TINY)) + most)  # LEAST where all are banned
    keys = (pairs >> 32).to(tl.int32)
    edge = edge_of(keys, tl.max(edges, 0), most_of(keys), K)
    place = places_of(keys, (pairs & LAST_ID).to(tl.int32), edge, K)
    room_ptr = pairs_ptr + start + num_parts * K
    tl.store(room_ptr + place, pairs, mask=place < K)
    tl.debug_barrier()  # the block's threads read what others of them wrote

    choices = tl.arange(0, BLOCK_CHOICES)
    own = tl.load(room_ptr + choices, mask=choices < K, other=NO_PAIR)
    rank = tl.zeros([BLOCK_CHOICES], tl.int32)
    for first in range(0, K, BLOCK_RANKED):
        others = first + tl.arange(0, BLOCK_RANKED)
        other = tl.load(room_ptr + others, mask=others < K, other=NO_PAIR)
        rank += tl.sum((other[:, None] > own[None, :]).to(tl.int32), 0)
    logits = in_order((own >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    ids = tl.where(num_unsound == 0, (own ^ LAST_ID) & LAST_ID, NONE)
    tl.store(ids_ptr + row * K + rank, ids, mask=choices < K)
    tl.store(log_probs_ptr + row * K + rank, logits - total, mask=choices < K)


def run(problem: Problem) -> None:
    """Write ids and log-probs in two launches."""
    _check(problem)
    device = problem.logits.device
    with on_device(device):
        for one in _launches(problem, is_chained=chains(device)):
            one.start()


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernels of both launches, ready to be compiled."""
    return tuple(one.kernel(arch) for one in _launches(problem, is_chained=True))


def part_size(vocab_size: int, width: int) -> int:
    """Tokens of a part, a power of two that `width` fits into."""
    least = min(LEAST_PART, triton.next_power_of_2(vocab_size))
    choices = triton.next_power_of_2(width)
    most_parts = min(MOST_PARTS, MOST_PAIRS // choices)
    return int(max(least, choices, triton.next_power_of_2(triton.cdiv(vocab_size, most_parts))))


def _launches(problem: Problem, *, is_chained: bool) -> tuple[TritonLaunch, TritonLaunch]:
    logits, K, R = problem.logits, problem.width, problem.num_rows
    V = logits.shape[-1]
    size = part_size(V, K)
    P = triton.cdiv(V, size)
    pairs, edges, most, sums = _room(R, P, K, logits.device)
    shared = {
        "K": K,
        "BLOCK_CHOICES": triton.next_power_of_2(K),
        **chained(is_chained=is_chained),
    }
    strides = (logits.stride(0), logits.stride(1))
    best = (logits, pairs, edges, most, sums, V, logits.shape[1], *strides, P)
    best_meta = {"BLOCK_TOKENS": size, **_threads(size)}
    found = problem.candidates
    order = (pairs, edges, most, sums, found.token_ids, found.log_probs, R, P)
    num_pairs = triton.next_power_of_2(P * K)
    order_meta = {
        "BLOCK_PAIRS": num_pairs,
        "BLOCK_PARTS": triton.next_power_of_2(P),
        "BLOCK_RANKED": min(triton.next_power_of_2(K), RANKED),
        "BLOCK_SUMS": min(triton.next_power_of_2(R * P), LEAST_PART),
        **_threads(num_pairs),
    }
    return (
        TritonLaunch(part_best_kernel, (R, P), best, shared | best_meta),
        TritonLaunch(order_best_kernel, (R,), order, shared | order_meta),
    )


def _room(R: int, P: int, K: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return where the first launch leaves pairs, edges, largest logits and sums."""
    pairs = torch.empty(R, P + 1, K, dtype=torch.int64, device=device)
    edges = torch.empty(R, P, dtype=torch.int32, device=device)
    most, sums = torch.empty(2, R, P, dtype=torch.float32, device=device).unbind()
    return pairs, edges, most, sums


def _threads(size: int) -> dict[str, int]:
    """Return the warps of a block, and the columns of a tile of which each thread has four."""
    num_warps = min(max(size // KEYS_PER_WARP, 1), MOST_WARPS)
    return {"num_warps": num_warps, "BLOCK_COLUMNS": min(num_warps * COLUMNS_PER_WARP, size)}


def _check(problem: Problem) -> None:
    """Refuse what the kernels cannot run."""
    check_device(problem.logits.device)
    if problem.width > MOST_WIDTH:
        raise BackendError(
            f"backend triton: expected a width of at most {MOST_WIDTH}, got {problem.width} "
            "(the candidates of all parts are one block's)"
        )
    if problem.logits.shape[-1] > 1 and problem.logits.stride(-1) != 1:
        raise BackendError(
            "backend triton: expected a contiguous last dim of draft_logits, got strides "
            f"{problem.logits.stride()} (nothing is copied behind the caller's back)"
        )
