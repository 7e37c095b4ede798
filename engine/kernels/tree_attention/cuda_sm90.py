"""The CUDA C++ implementation for Hopper: `csrc/tree_attention_sm90.cu` and how it is launched.

One block an SM; the device cuts the work itself, so that a launch depends on shapes only. The
kernel is compiled once for each (rows of a block, page size, where the tree's rows lie).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from engine.errors import BackendError
from engine.kernels.cubin import CudaKernel, Launch, compile_cubin
from engine.kernels.machine import num_sms
from engine.kernels.op import Binary, Kernel
from engine.kernels.operands import room

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.tree_attention.problem import Problem

SOURCE = "tree_attention_sm90.cu"
ARCH = "sm_90a"
CAPABILITY = (9, 0)
VALUE_DIM, ROPE_DIM = 512, 64
MOST_ROWS = 72  # packed rows of a block: what fits beside two tiles in shared memory
ROW_STEP = 8  # the N of the matrix instructions
NUM_THREADS = 512
MERGE_DIMS = 256  # of a block of the merge, a warp for every MERGE_PARTS partial results of its row
MERGE_PARTS, MOST_MERGE_WARPS = 8, 16
KEYS = 64  # rows of a tile
STAGES = 2
NUM_BARRIERS = 23
ALIGNMENT = 8  # elements of a 16-byte copy
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


def run(problem: Problem) -> None:
    """Write `out` and `lse` in two launches, the second queued while the first one ends."""
    check(problem)
    device = problem.q.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        params = _params(problem, *_partial_results(problem))
        attend, merge = _kernels(device, tuple(macros(problem).items()))
        N, T, H, _ = problem.q.shape
        shared = shared_bytes(rows_of_block(problem))
        attend.launch(params, Launch((programs(problem), 1, 1), NUM_THREADS, shared), stream)
        grid = (N * T * H, VALUE_DIM // MERGE_DIMS, 1)
        merge.launch(params, Launch(grid, merge_threads(problem), follows_early=True), stream)


def check(problem: Problem) -> None:
    """Refuse what the kernel cannot run."""
    _check_device(problem)
    _check_rows(problem)
    if problem.num_splits is not None:
        raise BackendError("num_splits: expected None, got a value (cuda cuts the work itself)")
    if not problem.softmax_scale > 0:
        raise BackendError(
            f"backend cuda: expected a softmax_scale above 0, got {problem.softmax_scale} "
            "(hidden scores are -inf before it)"
        )
    operands = {
        "q": problem.q,
        "kv_pages": problem.kv_pages,
        "tree_kv": problem.tree_kv,
        "out": problem.out,
    }
    for name, tensor in operands.items():
        if tensor is not None and not _is_aligned(tensor):
            raise BackendError(
                f"backend cuda: expected {name} to begin at, and step by, multiples of "
                f"{ALIGNMENT} elements (16-byte copies), got strides {tensor.stride()}"
            )


def _check_device(problem: Problem) -> None:
    q = problem.q
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    if capability != CAPABILITY:
        raise BackendError(
            f"backend cuda: expected a GPU of compute capability {CAPABILITY}, got "
            f"{q.device.type} {capability or ''}".rstrip()
        )


def _check_rows(problem: Problem) -> None:
    if problem.q.dtype != torch.bfloat16:
        raise BackendError(f"backend cuda: expected bfloat16 rows, got {problem.q.dtype}")
    if (problem.value_dim, problem.rope_dim) != (VALUE_DIM, ROPE_DIM):
        raise BackendError(
            f"backend cuda: expected value_dim {VALUE_DIM} and rope_dim {ROPE_DIM}, got "
            f"{problem.value_dim} and {problem.rope_dim}"
        )


def _is_aligned(tensor: Tensor) -> bool:
    steps = (
        stride
        for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
        if size > 1
    )
    return tensor.data_ptr() % 16 == 0 and all(step % ALIGNMENT == 0 for step in steps)


def rows_of_block(problem: Problem) -> int:
    """Packed rows of a block: as few blocks as fit, and of equal size."""
    packed = problem.q.shape[1] * problem.q.shape[2]
    blocks = -(-packed // MOST_ROWS)
    return -(-packed // (blocks * ROW_STEP)) * ROW_STEP


def programs(problem: Problem) -> int:
    """Blocks of the launch that reads the rows: one an SM, whatever the lengths."""
    _check_device(problem)
    return num_sms(problem.q.device)


def merge_threads(problem: Problem) -> int:
    """Threads of a block of the merge: the more blocks of rows, the fewer parts a row has."""
    packed = problem.q.shape[1] * problem.q.shape[2]
    parts = programs(problem) * rows_of_block(problem) // packed
    return 32 * min(max(parts // MERGE_PARTS, 1), MOST_MERGE_WARPS)


def shared_bytes(rows: int) -> int:
    """Dynamic shared memory of a block, as the source lays it out."""
    queries = rows * (VALUE_DIM + ROPE_DIM) * 2
    rope_stages = 1 if rows > KEYS else STAGES
    tiles = STAGES * KEYS * VALUE_DIM * 2 + rope_stages * KEYS * ROPE_DIM * 2
    weights = rows // 8 * 1024
    decays_peaks_flag = (2 * rows * 4 + 4 + 7) // 8 * 8
    return queries + tiles + weights + decays_peaks_flag + NUM_BARRIERS * 8


def workspace_size(problem: Problem) -> int:
    """Floats the partial results of a call take, four at most for each block of the launch.

    The values are bfloat16, two in the place of a float.
    """
    slots = 4 * programs(problem) + 2
    return slots * rows_of_block(problem) * (VALUE_DIM // 2 + 1)


def macros(problem: Problem) -> dict[str, int]:
    """What the source is compiled with."""
    rows = rows_of_block(problem)
    return {
        "ROWS": rows,
        "SHARED_BYTES": shared_bytes(rows),
        "PAGE_SIZE": problem.page_size,
        "HYBRID": int(problem.tree_kv is not None),
    }


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem; nothing for rows the kernel does not take."""
    try:
        _check_rows(problem)
    except BackendError:
        return ()
    defined = macros(problem)
    key = tuple(defined.items())

    def attend() -> Binary:
        cubin = compile_cubin(SOURCE, arch=ARCH, macros=defined)
        return Binary(cubin, shared_bytes(defined["ROWS"]))

    def merge() -> Binary:
        return Binary(compile_cubin(SOURCE, arch=ARCH, macros=defined), 0)

    return (Kernel("tree_attention", arch, key, attend), Kernel("merge", arch, key, merge))


@cache
def _kernels(
    device: torch.device, defined: tuple[tuple[str, int], ...]
) -> tuple[CudaKernel, CudaKernel]:
    del device  # kernels are loaded for the current one
    cubin = compile_cubin(SOURCE, arch=ARCH, macros=dict(defined))
    attend = CudaKernel(cubin, "tree_attention", shared_bytes=shared_bytes(dict(defined)["ROWS"]))
    return attend, CudaKernel(cubin, "merge")


def _partial_results(problem: Problem) -> tuple[Tensor, Tensor]:
    size = workspace_size(problem)
    flat = room(problem.workspace, size, problem.q.device, is_aligned=True)
    num_outputs = size // (VALUE_DIM // 2 + 1) * (VALUE_DIM // 2)
    return flat[:num_outputs], flat[num_outputs:]


def _params(problem: Problem, partial_out: Tensor, partial_lse: Tensor) -> Params:
    q, tree = problem.q, problem.tree_kv
    tree_strides = (0, 0) if tree is None else tree.stride()[:2]
    return Params(
        q.data_ptr(), problem.kv_pages.data_ptr(), 0 if tree is None else tree.data_ptr(),
        problem.page_table.data_ptr(), problem.context_lens.data_ptr(),
        problem.tree_sizes.data_ptr(), problem.ancestor_bits.data_ptr(), problem.out.data_ptr(),
        problem.lse.data_ptr(), partial_out.data_ptr(), partial_lse.data_ptr(),
        *q.stride()[:3], *problem.kv_pages.stride()[:2], problem.page_table.stride(0),
        *problem.ancestor_bits.stride()[:2], *tree_strides, *problem.out.stride()[:3],
        *problem.lse.stride(), *q.shape[:3], programs(problem),
        int(problem.context_lens.dtype == torch.int64),
        int(problem.tree_sizes.dtype == torch.int64), problem.softmax_scale * LOG2_E,
    )  # fmt: skip
