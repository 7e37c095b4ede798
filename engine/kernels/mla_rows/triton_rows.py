"""One launch of three kinds of programs, told apart by their number.

First those that absorb: a head, a block of rows and a block of the latent dims. Then one for each
row and head, which rotates, and one more for each row, which makes and stores its latent row.
"""

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
    from engine.kernels.mla_rows.problem import Problem
    from engine.kernels.op import Kernel

NUM_WARPS = 4
BLOCK_ROWS, BLOCK_COLUMNS = 16, 64  # of an absorbing program: as many rows as an instruction has
MIN_INPUTS = 16  # of a matrix instruction


@triton.jit
def rotate_into(source_ptr, target_ptr, cos_ptr, sin_ptr, num_pairs, BLOCK_PAIRS: tl.constexpr):
    """Turn pairs (2i, 2i + 1) of one row; all pointers are at the row's first rotated dim."""
    pairs = tl.arange(0, BLOCK_PAIRS)
    live = pairs < num_pairs
    cos = tl.load(cos_ptr + pairs, mask=live, other=0.0)
    sin = tl.load(sin_ptr + pairs, mask=live, other=0.0)
    even = tl.load(source_ptr + 2 * pairs, mask=live, other=0.0).to(tl.float32)
    odd = tl.load(source_ptr + 2 * pairs + 1, mask=live, other=0.0).to(tl.float32)
    dtype = target_ptr.dtype.element_ty
    tl.store(target_ptr + 2 * pairs, (even * cos - odd * sin).to(dtype), mask=live)
    tl.store(target_ptr + 2 * pairs + 1, (odd * cos + even * sin).to(dtype), mask=live)


@triton.jit
def absorb(
    program,
    queries_ptr,  # [M, H, Q + R]
    keys_ptr,  # [H, Q, C]
    out_ptr,  # [M, H, D]
    M, H, Q, C,
    stride_queries_row, stride_queries_head, stride_keys_head, stride_keys_row,
    stride_out_row, stride_out_head,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Multiply a block of one head's queries by a block of its keys."""
    head = (program % H).to(tl.int64)
    tiles = tl.cdiv(C, BLOCK_COLUMNS)
    columns = (program // H) % tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    rows = ((program // H) // tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    inputs = tl.arange(0, BLOCK_INPUTS)
    keys_at = keys_ptr + head * stride_keys_head + inputs[:, None] * stride_keys_row
    is_key = (inputs < Q)[:, None] & (columns < C)[None, :]
    keys = tl.load(keys_at + columns[None, :], mask=is_key, other=0.0)
    if IS_CHAINED:  # keys are nobody's result
        gdc_wait()
        gdc_launch_dependents()
    queries_at = queries_ptr + rows[:, None] * stride_queries_row + head * stride_queries_head
    is_query = (rows < M)[:, None] & (inputs < Q)[None, :]
    queries = tl.load(queries_at + inputs[None, :], mask=is_query, other=0.0)
    product = tl.dot(queries, keys, input_precision="ieee")
    out_at = out_ptr + rows[:, None] * stride_out_row + head * stride_out_head + columns[None, :]
    is_out = (rows < M)[:, None] & (columns < C)[None, :]
    tl.store(out_at, product.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def rows_kernel(
    kv_a_ptr,  # [M, D]
    norm_ptr,  # [C]
    queries_ptr,  # [M, H, Q + R]
    keys_ptr,  # [H, Q, C]
    cos_ptr, sin_ptr,  # [M, R / 2] float32
    slots_ptr,  # [M] int64
    rows_ptr,  # [S, D]
    out_ptr,  # [M, H, D]
    M, H, Q, C, num_pairs, num_absorbing, eps,
    stride_kv_a, stride_queries_row, stride_queries_head, stride_keys_head, stride_keys_row,
    stride_cos, stride_sin, stride_rows, stride_out_row, stride_out_head,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # starts before the launch ahead has ended; a device only
):  # fmt: skip
    """Absorb, or rotate one head of one row of queries, or make and store its latent row."""
    program = tl.program_id(0)
    if program < num_absorbing:
        absorb(
            program, queries_ptr, keys_ptr, out_ptr, M, H, Q, C,
            stride_queries_row, stride_queries_head, stride_keys_head, stride_keys_row,
            stride_out_row, stride_out_head, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_INPUTS, IS_CHAINED,
        )  # fmt: skip
        return
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = ((program - num_absorbing) // (H + 1)).to(tl.int64)
    head = (program - num_absorbing) % (H + 1)
    cos_ptr += row * stride_cos
    sin_ptr += row * stride_sin
    if head < H:
        source = queries_ptr + row * stride_queries_row + head * stride_queries_head + Q
        target = out_ptr + row * stride_out_row + head * stride_out_head + C
        rotate_into(source, target, cos_ptr, sin_ptr, num_pairs, BLOCK_PAIRS)
    else:
        dims = tl.arange(0, BLOCK_DIMS)
        live = dims < C
        source = kv_a_ptr + row * stride_kv_a
        target = rows_ptr + tl.load(slots_ptr + row) * stride_rows
        values = tl.load(source + dims, mask=live, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 0) / C + eps)
        weights = tl.load(norm_ptr + dims, mask=live, other=0.0).to(tl.float32)
        normed = (values * scale * weights).to(rows_ptr.dtype.element_ty)
        tl.store(target + dims, normed, mask=live)
        rotate_into(source + C, target + C, cos_ptr, sin_ptr, num_pairs, BLOCK_PAIRS)


def run(problem: Problem) -> None:
    """Write rows and queries in one launch."""
    check_rows(problem.kv_a)
    device = problem.kv_a.device
    with on_device(device):
        arguments, meta = _launch(problem)
        M, H, _ = problem.out.shape
        rows_kernel[(_num_absorbing(problem) + M * (H + 1),)](*arguments, **meta)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernel of the launch, ready to be compiled."""
    return (triton_kernel(rows_kernel, *_launch(problem, is_compiled=True), arch),)


def _num_absorbing(problem: Problem) -> int:
    """Programs that absorb."""
    M, H, _ = problem.out.shape
    return H * -(-problem.value_dim // BLOCK_COLUMNS) * -(-M // BLOCK_ROWS)


def _launch(
    problem: Problem, *, is_compiled: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    one, C, R = problem, problem.value_dim, problem.rope_dim
    (M, H, _), Q = one.out.shape, one.up_keys.shape[1]
    is_chained = is_compiled or chains(one.kv_a.device)
    arguments = (
        *(one.kv_a, one.norm_weight, one.queries, one.up_keys, one.cos, one.sin, one.slots),
        *(one.rows, one.out, M, H, Q, C, R // 2, _num_absorbing(one), one.eps),
        *(one.kv_a.stride(0), *one.queries.stride()[:2], *one.up_keys.stride()[:2]),
        *(one.cos.stride(0), one.sin.stride(0), one.rows.stride(0), *one.out.stride()[:2]),
    )
    meta = {
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_COLUMNS": BLOCK_COLUMNS,
        "BLOCK_INPUTS": max(triton.next_power_of_2(Q), MIN_INPUTS),
        "BLOCK_DIMS": triton.next_power_of_2(C),
        "BLOCK_PAIRS": triton.next_power_of_2(R // 2),
        "num_warps": NUM_WARPS,
    }
    return arguments, meta | chained(is_chained=is_chained)
