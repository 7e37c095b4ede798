"""One program a head of a row: a query head, or a key head with its values."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.machine import chains
from engine.kernels.triton_build import chained, triton_kernel
from engine.kernels.triton_device import check_rows, on_device

if TYPE_CHECKING:
    from engine.kernels.head_rows.problem import Problem
    from engine.kernels.op import Kernel

NUM_WARPS = 1  # a head has a few hundred numbers at most


@triton.jit
def turn_into(
    source_ptr, norm_ptr, target_ptr, cos_ptr, sin_ptr, num_pairs, eps, BLOCK_PAIRS: tl.constexpr
):
    """Normalise one head and turn its pairs; all pointers are at the first dim."""
    pairs = tl.arange(0, BLOCK_PAIRS)
    live = pairs < num_pairs
    cos = tl.load(cos_ptr + pairs, mask=live, other=0.0)
    sin = tl.load(sin_ptr + pairs, mask=live, other=0.0)
    first = tl.load(source_ptr + pairs, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + num_pairs + pairs, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, 0) / (2 * num_pairs) + eps)
    first *= scale * tl.load(norm_ptr + pairs, mask=live, other=0.0).to(tl.float32)
    second *= scale * tl.load(norm_ptr + num_pairs + pairs, mask=live, other=0.0).to(tl.float32)
    dtype = target_ptr.dtype.element_ty
    tl.store(target_ptr + pairs, (first * cos - second * sin).to(dtype), mask=live)
    tl.store(target_ptr + num_pairs + pairs, (second * cos + first * sin).to(dtype), mask=live)


@triton.jit
def rows_kernel(
    queries_ptr,  # [N * S, H, D]
    keys_ptr, values_ptr,  # [N * S, H_kv, D]
    query_norm_ptr, key_norm_ptr,  # [D]
    cos_ptr, sin_ptr,  # [N * S, D / 2] float32
    block_ptr,  # [N, H_kv, S, 2 * D]
    out_ptr,  # [N, H_kv, G * S, D], contiguous
    S, heads, group, num_pairs, eps,
    stride_queries_row, stride_queries_head, stride_keys_row, stride_keys_head,
    stride_values_row, stride_values_head, stride_cos, stride_sin,
    stride_block_seq, stride_block_head, stride_block_row,
    BLOCK_PAIRS: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # starts before the launch ahead has ended; a device only
):  # fmt: skip
    """Make one query head of one row, or store one key head of it with its values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    seq, step = row // S, row % S
    cos_ptr += row * stride_cos
    sin_ptr += row * stride_sin
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if head < heads * group:
        source = queries_ptr + row * stride_queries_row + head * stride_queries_head
        target = out_ptr + ((seq * heads * group + head) * S + step) * 2 * num_pairs
        turn_into(
            source, query_norm_ptr, target, cos_ptr, sin_ptr, num_pairs, eps, BLOCK_PAIRS
        )  # fmt: skip
    else:
        head -= heads * group
        target = block_ptr + seq * stride_block_seq + head * stride_block_head
        target += step * stride_block_row
        dims = tl.arange(0, 2 * BLOCK_PAIRS)
        live = dims < 2 * num_pairs
        source = values_ptr + row * stride_values_row + head * stride_values_head
        tl.store(target + dims, tl.load(source + dims, mask=live), mask=live)
        source = keys_ptr + row * stride_keys_row + head * stride_keys_head
        turn_into(
            source, key_norm_ptr, target + 2 * num_pairs, cos_ptr, sin_ptr, num_pairs, eps,
            BLOCK_PAIRS,
        )  # fmt: skip


def run(problem: Problem) -> None:
    """Write rows and queries in one launch."""
    check_rows(problem.queries)
    device = problem.queries.device
    with on_device(device):
        arguments, meta = _launch(problem)
        M, H, _ = problem.queries.shape
        rows_kernel[(M, H + problem.block.shape[1])](*arguments, **meta)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernel of the launch, ready to be compiled."""
    return (triton_kernel(rows_kernel, *_launch(problem, is_compiled=True), arch),)


def _launch(
    problem: Problem, *, is_compiled: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    one = problem
    (_, heads, S, _), (_, H, D) = one.block.shape, one.queries.shape
    is_chained = is_compiled or chains(one.queries.device)
    arguments = (
        *(one.queries, one.keys, one.values, one.query_norm, one.key_norm, one.cos, one.sin),
        *(one.block, one.out, S, heads, H // heads, D // 2, one.eps),
        *(*one.queries.stride()[:2], *one.keys.stride()[:2], *one.values.stride()[:2]),
        *(one.cos.stride(0), one.sin.stride(0), *one.block.stride()[:3]),
    )
    meta = {
        "BLOCK_PAIRS": triton.next_power_of_2(D // 2),
        "num_warps": NUM_WARPS,
    }
    return arguments, meta | chained(is_chained=is_chained)
