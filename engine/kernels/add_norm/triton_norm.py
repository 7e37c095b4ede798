"""One program a row, which holds it in registers between the sum and the norm."""

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
    from engine.kernels.add_norm.problem import Problem
    from engine.kernels.op import Kernel

DIMS_PER_WARP = 512  # 16 numbers a thread
MOST_WARPS = 16


@triton.jit
def norm_kernel(
    x_ptr,  # [M, hidden]
    first_ptr, second_ptr,  # [M, hidden], where there are as many
    weight_ptr,  # [hidden]
    total_ptr, normed_ptr,  # [M, hidden]
    hidden, eps,
    stride_x, stride_first, stride_second, stride_total, stride_normed,
    NUM_ADDENDS: tl.constexpr, BLOCK_DIMS: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # starts before the launch ahead has ended; a device only
):  # fmt: skip
    """Write the sum and the norm of one row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_DIMS)
    live = dims < hidden
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    weights = tl.load(weight_ptr + dims, mask=live, other=0.0).to(tl.float32)
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()

    total = tl.load(x_ptr + row * stride_x + dims, mask=live, other=0.0).to(tl.float32)
    if NUM_ADDENDS > 0:
        added = tl.load(first_ptr + row * stride_first + dims, mask=live, other=0.0)
        added = added.to(tl.float32)
        if NUM_ADDENDS > 1:
            second = tl.load(second_ptr + row * stride_second + dims, mask=live, other=0.0)
            added = (added + second.to(tl.float32)).to(DTYPE).to(tl.float32)
        total = (total + added).to(DTYPE).to(tl.float32)
        tl.store(total_ptr + row * stride_total + dims, total.to(DTYPE), mask=live)
    scale = tl.rsqrt(tl.sum(total * total, 0) / hidden + eps)
    normed = (total * scale * weights).to(DTYPE)
    tl.store(normed_ptr + row * stride_normed + dims, normed, mask=live)


def run(problem: Problem) -> None:
    """Write sums and norms in one launch."""
    check_rows(problem.x)
    device = problem.x.device
    with on_device(device):
        arguments, meta = _launch(problem)
        norm_kernel[(len(problem.x),)](*arguments, **meta)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernel of the launch, ready to be compiled."""
    return (triton_kernel(norm_kernel, *_launch(problem, is_compiled=True), arch),)


def _launch(
    problem: Problem, *, is_compiled: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    one, x = problem, problem.x
    first, second = (*one.addends, x, x)[:2]  # what is not there is never read
    hidden = x.shape[1]
    is_chained = is_compiled or chains(x.device)
    arguments = (
        *(x, first, second, one.norm_weight, one.total, one.normed, hidden, one.eps),
        *(x.stride(0), first.stride(0), second.stride(0)),
        *(one.total.stride(0), one.normed.stride(0)),
    )
    block = triton.next_power_of_2(hidden)
    meta = {
        "NUM_ADDENDS": len(one.addends),
        "BLOCK_DIMS": block,
        "num_warps": min(max(block // DIMS_PER_WARP, 1), MOST_WARPS),
    }
    return arguments, meta | chained(is_chained=is_chained)
