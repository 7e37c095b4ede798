"""One program a key head of a row."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.head_rows.triton_rows import NUM_WARPS, turn_into
from engine.kernels.machine import chains
from engine.kernels.triton_build import chained, triton_kernel
from engine.kernels.triton_device import check_rows, on_device

if TYPE_CHECKING:
    from engine.kernels.keep_rows.problem import Problem
    from engine.kernels.op import Kernel


@triton.jit
def keep_kernel(
    keys_ptr, values_ptr,  # [M, H_kv, D]
    norm_ptr,  # [D]
    cos_ptr, sin_ptr,  # [M, D / 2] float32
    rows_ptr,  # [R, 2 * D]
    places_ptr,  # [M * H_kv] int64
    num_pairs, eps,
    stride_keys_row, stride_keys_head, stride_values_row, stride_values_head,
    stride_cos, stride_sin, stride_row,
    BLOCK_PAIRS: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # starts before the launch ahead has ended; a device only
):  # fmt: skip
    """Store one key head of one row with its values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, 2 * BLOCK_PAIRS)
    live = dims < 2 * num_pairs
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    target = rows_ptr + tl.load(places_ptr + row * tl.num_programs(1) + head) * stride_row
    source = values_ptr + row * stride_values_row + head * stride_values_head
    tl.store(target + dims, tl.load(source + dims, mask=live), mask=live)
    turn_into(
        keys_ptr + row * stride_keys_row + head * stride_keys_head, norm_ptr,
        target + 2 * num_pairs, cos_ptr + row * stride_cos, sin_ptr + row * stride_sin,
        num_pairs, eps, BLOCK_PAIRS,
    )  # fmt: skip


def run(problem: Problem) -> None:
    """Write the rows in one launch."""
    check_rows(problem.keys)
    with on_device(problem.keys.device):
        arguments, meta = _launch(problem, is_chained=chains(problem.keys.device))
        keep_kernel[problem.keys.shape[:2]](*arguments, **meta)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernel of the launch, ready to be compiled."""
    return (triton_kernel(keep_kernel, *_launch(problem, is_chained=True), arch),)


def _launch(problem: Problem, *, is_chained: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    one, num_pairs = problem, problem.keys.shape[2] // 2
    arguments = (
        *(one.keys, one.values, one.key_norm, one.cos, one.sin, one.rows, one.places),
        *(num_pairs, one.eps, *one.keys.stride()[:2], *one.values.stride()[:2]),
        *(one.cos.stride(0), one.sin.stride(0), one.rows.stride(0)),
    )
    meta = {
        "BLOCK_PAIRS": triton.next_power_of_2(num_pairs),
        "num_warps": NUM_WARPS,
    }
    return arguments, meta | chained(is_chained=is_chained)
