"""One program a row and head, and one more a row for its latent row."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from engine.errors import BackendError
from engine.kernels.triton_build import triton_kernel

if TYPE_CHECKING:
    from engine.kernels.mla_rows.problem import Problem
    from engine.kernels.op import Kernel

NUM_WARPS = 1  # the widest work is a row of 512 numbers, and most programs have 64
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
def rows_kernel(
    kv_a_ptr,  # [M, D]
    norm_ptr,  # [C]
    queries_ptr,  # [M, H, Q], at the first rotated dim of the first head
    cos_ptr, sin_ptr,  # [M, R / 2] float32
    slots_ptr,  # [M] int64
    rows_ptr,  # [S, D]
    out_ptr,  # [M, H, D]
    C, num_pairs, H, eps,
    stride_kv_a, stride_queries_row, stride_queries_head, stride_cos, stride_sin,
    stride_rows, stride_out_row, stride_out_head,
    BLOCK_DIMS: tl.constexpr, BLOCK_PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate one head of one row of queries, or make and store its latent row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos_ptr += row * stride_cos
    sin_ptr += row * stride_sin
    if head < H:
        source = queries_ptr + row * stride_queries_row + head * stride_queries_head
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
    _check(problem)
    device = problem.kv_a.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        arguments, meta = _launch(problem)
        M, H, _ = problem.out.shape
        rows_kernel[(M, H + 1)](*arguments, **meta)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernel of the launch, ready to be compiled."""
    return (triton_kernel(rows_kernel, *_launch(problem), arch),)


def _launch(problem: Problem) -> tuple[tuple[Any, ...], dict[str, Any]]:
    one, C, R = problem, problem.value_dim, problem.rope_dim
    rotated = one.queries[..., -R:]
    arguments = (
        *(one.kv_a, one.norm_weight, rotated, one.cos, one.sin, one.slots, one.rows, one.out),
        *(C, R // 2, one.out.shape[1], one.eps, one.kv_a.stride(0)),
        *(rotated.stride(0), rotated.stride(1), one.cos.stride(0), one.sin.stride(0)),
        *(one.rows.stride(0), one.out.stride(0), one.out.stride(1)),
    )
    return arguments, {
        "BLOCK_DIMS": triton.next_power_of_2(C),
        "BLOCK_PAIRS": triton.next_power_of_2(R // 2),
        "num_warps": NUM_WARPS,
    }


def _check(problem: Problem) -> None:
    """Refuse what the kernel cannot run."""
    device = problem.kv_a.device.type
    if device != "cuda" and not triton.knobs.runtime.interpret:
        raise BackendError(
            f"backend triton: expected CUDA tensors, got {device} ones (on a CPU it runs in "
            "Triton's interpreter only, chosen by TRITON_INTERPRET=1 before Triton is imported)"
        )
    if problem.kv_a.dtype not in _DTYPES:
        raise BackendError(
            f"backend triton: expected bfloat16, float16 or float32 rows, got {problem.kv_a.dtype}"
        )
