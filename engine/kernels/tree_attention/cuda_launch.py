"""The CUDA C++ implementations: how their kernels are launched.

`cuda` takes the kernel made for the device, `cuda_mma` the one that runs on any of them (see
`cuda_cuts`). One block an SM; the device cuts the work itself, so that a launch depends on shapes
only. A kernel is compiled once for each (rows of a block, page size, where the tree's rows lie, one
sequence or several).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from engine.errors import BackendError
from engine.kernels.cubin import CudaKernel, Launch, compile_cubin
from engine.kernels.machine import arch_of, check_arch, num_sms
from engine.kernels.op import Binary, Kernel
from engine.kernels.operands import COPY_BYTES, is_copyable, room
from engine.kernels.tensor_maps import MAP_BYTES, WORD_BYTES, box_map
from engine.kernels.tree_attention.cuda_cuts import (
    HOPPER,
    LEAST_BOX_ROWS,
    ROPE_DIM,
    VALUE_DIM,
    Cut,
    box_rows,
    fastest,
    of_bytes,
    portable,
)
from engine.kernels.tree_attention.problem import refuse_fp8

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.tree_attention.problem import Problem

ARCHS = (90, 100, 120)
CHOICES = {"cuda": fastest, "cuda_mma": portable}  # the kernel each backend takes
MERGE_DIMS = 256  # of a block of the merge, a warp for every MERGE_PARTS partial results of its row
MERGE_PARTS = 8
LEAST_MERGE_WARPS, MOST_MERGE_WARPS = 2, 16
ROW_WARPS = 4  # of a block of the wide kernel's merge
ROW_FLOATS = 2  # beside the values of a row of a partial result: peak and total, or log-sum-exp
MAP_ALIGNMENT = 64
LOG2_E = 1.4426950408889634


class Params(ctypes.Structure):
    """`struct Params` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "kv_pages", "tree_kv", "page_table", "context_lens", "tree_sizes",
            "ancestor_bits", "out", "lse", "partial_out", "partial_lse",
        )),
        *((name, ctypes.c_longlong) for name in (
            "q_sequence", "q_token", "q_head", "page", "page_row", "table_sequence",
            "bits_sequence", "bits_token", "tree_sequence", "tree_row", "out_sequence",
            "out_token", "out_head", "lse_sequence", "lse_token", "lse_head",
        )),
        *((name, ctypes.c_int) for name in (
            "N", "T", "H", "num_blocks", "wide_context", "wide_tree",
        )),
        ("scale", ctypes.c_float),
    )  # fmt: skip


class BoxParams(ctypes.Structure):
    """What a kernel that reads boxes is given; the merge reads the first part of it."""

    _fields_ = (
        ("params", Params),
        ("before_rows", ctypes.c_ubyte * (-ctypes.sizeof(Params) % MAP_ALIGNMENT)),
        ("rows", ctypes.c_ubyte * MAP_BYTES),
    )


def run(name: str, problem: Problem) -> None:
    """Write `out` and `lse` in one launch, or in two: one that merges is queued early."""
    check(name, problem)
    device = problem.q.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        cut = cut_of(name, problem, arch_of(device))
        partial = _partial_results(name, problem)  # held until the last launch is queued
        params = _arguments(problem, cut, partial)
        attend, merge = _kernels(device, cut, tuple(macros(problem, cut).items()))
        grid = (num_sms(device), 1, 1)
        attend.launch(
            params,
            Launch(grid, cut.num_threads, cut.shared_bytes, is_cooperative=cut.merges_inside),
            stream,
        )
        if merge is not None:
            merge.launch(params, _merge_launch(problem, cut), stream)


def check(name: str, problem: Problem) -> None:
    """Refuse what the kernels cannot run."""
    check_arch(problem.q.device, ARCHS, f"backend {name}")
    _check_rows(name, problem)
    if not _reads(name, problem, arch_of(problem.q.device)):
        refuse_fp8(problem, name)
    if problem.num_splits is not None:
        raise BackendError(f"num_splits: expected None, got a value ({name} cuts the work itself)")
    if not problem.softmax_scale > 0:
        raise BackendError(
            f"backend {name}: expected a softmax_scale above 0, got {problem.softmax_scale} "
            "(hidden scores are -inf before it)"
        )
    operands = {
        "q": problem.q,
        "kv_pages": problem.kv_pages,
        "tree_kv": problem.tree_kv,
        "out": problem.out,
    }
    for operand, tensor in operands.items():
        if tensor is not None and not is_copyable(tensor):
            raise BackendError(
                f"backend {name}: expected {operand} to begin at, and step by, multiples of "
                f"{COPY_BYTES} bytes (of a copy), got strides {tensor.stride()} of {tensor.dtype}"
            )


def _reads(name: str, problem: Problem, arch: int) -> bool:
    """Whether a backend reads such rows on an architecture."""
    return not problem.is_fp8 or (name == "cuda" and arch == HOPPER)


def _check_rows(name: str, problem: Problem) -> None:
    if problem.q.dtype != torch.bfloat16:
        raise BackendError(f"backend {name}: expected bfloat16 queries, got {problem.q.dtype}")
    if (problem.value_dim, problem.rope_dim) != (VALUE_DIM, ROPE_DIM):
        raise BackendError(
            f"backend {name}: expected value_dim {VALUE_DIM} and rope_dim {ROPE_DIM}, got "
            f"{problem.value_dim} and {problem.rope_dim}"
        )


def cut_of(name: str, problem: Problem, arch: int) -> Cut:
    """Return the kernel a backend takes for a problem, a function of shapes alone."""
    N, T, H, _ = problem.q.shape
    if problem.is_fp8:
        return of_bytes(N, T * H)
    return CHOICES[name](N, T * H, arch)


def programs(name: str, problem: Problem) -> int:
    """Blocks of the launch that reads the rows: one an SM, whatever the lengths."""
    check_arch(problem.q.device, ARCHS, f"backend {name}")
    return num_sms(problem.q.device)


def _merge_launch(problem: Problem, cut: Cut) -> Launch:
    """Return the launch of the merge: the more rows, the fewer parts, and so warps, a row has."""
    N, T, H, _ = problem.q.shape
    if cut.reads_boxes:  # a warp half a row
        return Launch((-(-2 * N * T * H // ROW_WARPS), 1, 1), 32 * ROW_WARPS, follows_early=True)
    items = N * -(-T * H // cut.rows)
    parts = num_sms(problem.q.device) // items
    warps = min(max(parts // MERGE_PARTS, LEAST_MERGE_WARPS), MOST_MERGE_WARPS)
    grid = (N * T * H, VALUE_DIM // MERGE_DIMS, 1)
    return Launch(grid, 32 * warps, warps * MERGE_DIMS * 4, follows_early=True)


def workspace_size(name: str, problem: Problem) -> int:
    """Floats the partial results of a call take, four at most for each block of the launch.

    The values are bfloat16, two in the place of a float.
    """
    slots = 4 * programs(name, problem) + 2
    rows = cut_of(name, problem, arch_of(problem.q.device)).rows
    return slots * rows * (VALUE_DIM // 2 + ROW_FLOATS)


def macros(problem: Problem, cut: Cut) -> dict[str, int]:
    """What the source is compiled with."""
    return {
        "ROWS": cut.rows,
        "SHARED_BYTES": cut.shared_bytes,
        "MERGE_INSIDE": int(cut.merges_inside),
        "ONE": int(cut.is_alone),
        "PAGE_SIZE": problem.page_size,
        "HYBRID": int(problem.tree_kv is not None),
    }


def kernels(name: str, problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem; nothing for rows the kernels do not take."""
    try:
        _check_rows(name, problem)
    except BackendError:
        return ()
    if not _reads(name, problem, arch):
        return ()
    cut = cut_of(name, problem, arch)
    defined, target = macros(problem, cut), cut.arch_name(arch)
    key = (cut.source, *defined.items())

    def attend() -> Binary:
        return Binary(compile_cubin(cut.source, arch=target, macros=defined), cut.shared_bytes)

    def merge() -> Binary:
        return Binary(compile_cubin(cut.source, arch=target, macros=defined), 0)

    first = Kernel(cut.kernel, arch, key, attend)
    return (first,) if cut.merges_inside else (first, Kernel("merge", arch, key, merge))


@cache
def _kernels(
    device: torch.device, cut: Cut, defined: tuple[tuple[str, int], ...]
) -> tuple[CudaKernel, CudaKernel | None]:
    target = cut.arch_name(arch_of(device))  # kernels are loaded for the current device
    cubin = compile_cubin(cut.source, arch=target, macros=dict(defined))
    attend = CudaKernel(cubin, cut.kernel, shared_bytes=cut.shared_bytes)
    return attend, None if cut.merges_inside else CudaKernel(cubin, "merge")


def _partial_results(name: str, problem: Problem) -> tuple[Tensor, Tensor]:
    size = workspace_size(name, problem)
    flat = room(problem.workspace, size, problem.q.device, is_aligned=True)
    num_outputs = size // (VALUE_DIM // 2 + ROW_FLOATS) * (VALUE_DIM // 2)
    return flat[:num_outputs], flat[num_outputs:]


def _arguments(problem: Problem, cut: Cut, partial: tuple[Tensor, Tensor]) -> Params | BoxParams:
    params = _params(problem, *partial)
    if not cut.reads_boxes:
        return params
    rows = box_rows(problem.page_size)
    if rows < LEAST_BOX_ROWS:
        return BoxParams(params=params)
    pages = problem.kv_pages
    page_step, row_step, _ = (step * pages.itemsize for step in pages.stride())
    sizes = (pages.shape[2] * pages.itemsize // WORD_BYTES, pages.shape[1], pages.shape[0])
    steps = (row_step, page_step if len(pages) > 1 else sizes[1] * row_step)
    encoded = box_map(pages.data_ptr(), sizes, steps, rows)
    return BoxParams(params=params, rows=(ctypes.c_ubyte * MAP_BYTES).from_buffer_copy(encoded))


def _params(problem: Problem, partial_out: Tensor, partial_lse: Tensor) -> Params:
    q, tree = problem.q, problem.tree_kv
    page_strides = _row_strides(problem.kv_pages)
    tree_strides = (0, 0) if tree is None else _row_strides(tree)
    return Params(
        q.data_ptr(), problem.kv_pages.data_ptr(), 0 if tree is None else tree.data_ptr(),
        problem.page_table.data_ptr(), problem.context_lens.data_ptr(),
        problem.tree_sizes.data_ptr(), problem.ancestor_bits.data_ptr(), problem.out.data_ptr(),
        problem.lse.data_ptr(), partial_out.data_ptr(), partial_lse.data_ptr(),
        *q.stride()[:3], *page_strides, problem.page_table.stride(0),
        *problem.ancestor_bits.stride()[:2], *tree_strides, *problem.out.stride()[:3],
        *problem.lse.stride(), *q.shape[:3], num_sms(q.device),
        int(problem.context_lens.dtype == torch.int64),
        int(problem.tree_sizes.dtype == torch.int64), problem.softmax_scale * LOG2_E,
    )  # fmt: skip


def _row_strides(rows: Tensor) -> tuple[int, ...]:
    """Steps of cached rows in pairs of bytes, as the sources count them."""
    return tuple(step * rows.itemsize // 2 for step in rows.stride()[:2])
