"""The CUDA C++ implementation for Hopper: its two kernels and how they are launched.

Few packed rows go to `csrc/tree_attention_sm90.cu`, many to `csrc/tree_attention_sm90_wide.cu`; see
there for why. One block an SM; the device cuts the work itself, so that a launch depends on shapes
only. A kernel is compiled once for each (rows of a block, page size, where the tree's rows lie).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from engine.errors import BackendError
from engine.kernels.cubin import CudaKernel, Launch, compile_cubin
from engine.kernels.machine import num_sms
from engine.kernels.op import Binary, Kernel
from engine.kernels.operands import is_copyable, room

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.tree_attention.problem import Problem

ARCH = "sm_90a"
CAPABILITY = (9, 0)
VALUE_DIM, ROPE_DIM = 512, 64
KEYS = 64  # rows of a tile
MOST_NARROW_ROWS = 216  # packed rows of a sequence from which on the wide kernel is faster
ROW_STEP = 8  # packed rows of the narrow kernel: the N of the matrix instructions
BARRIER_BYTES = 8
MERGE_DIMS = 256  # of a block of the merge, a warp for every MERGE_PARTS partial results of its row
MERGE_PARTS = 8
LEAST_MERGE_WARPS, MOST_MERGE_WARPS = 2, 16
ALIGNMENT = 8  # elements of a 16-byte copy
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Cut:
    """A kernel and how it cuts a problem."""

    source: str
    rows: int  # packed rows of a block
    num_threads: int
    shared_bytes: int  # dynamic, of a block, as the source lays it out


WIDE_CHUNKS = 9 + 2 * 8 + 1 + 2  # of 64 x 64: queries, two tiles, rope, weights of two warpgroups
WIDE = Cut(
    "tree_attention_sm90_wide.cu",
    rows=64,
    num_threads=384,
    shared_bytes=WIDE_CHUNKS * KEYS * 64 * 2 + 2 * (2 * 64 + 4) * 4 + 14 * BARRIER_BYTES,
)


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
        cut = cut_of(problem)
        attend, merge = _kernels(device, cut, tuple(macros(problem).items()))
        launch = Launch((programs(problem), 1, 1), cut.num_threads, cut.shared_bytes)
        attend.launch(params, launch, stream)
        merge.launch(params, merge_launch(problem), stream)


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
        if tensor is not None and not is_copyable(tensor):
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


def cut_of(problem: Problem) -> Cut:
    """Return the kernel for a problem's packed rows, a function of shapes alone."""
    packed = problem.q.shape[1] * problem.q.shape[2]
    return WIDE if packed > MOST_NARROW_ROWS else narrow(packed)


def narrow(packed: int) -> Cut:
    """Return the kernel for few rows: as few blocks of rows as fit, and of equal size."""
    blocks = -(-packed // 72)
    rows = -(-packed // (blocks * ROW_STEP)) * ROW_STEP
    queries = rows * (VALUE_DIM + ROPE_DIM) * 2
    rope_stages = 1 if rows > KEYS else 2
    tiles = 2 * KEYS * VALUE_DIM * 2 + rope_stages * KEYS * ROPE_DIM * 2
    weights = rows // 8 * 1024
    decays_peaks_flag = (2 * rows * 4 + 4 + 7) // 8 * 8
    shared_bytes = queries + tiles + weights + decays_peaks_flag + 23 * BARRIER_BYTES
    return Cut("tree_attention_sm90.cu", rows, 512, shared_bytes)


def programs(problem: Problem) -> int:
    """Blocks of the launch that reads the rows: one an SM, whatever the lengths."""
    _check_device(problem)
    return num_sms(problem.q.device)


def merge_launch(problem: Problem) -> Launch:
    """Return the launch of the merge: the more rows, the fewer parts, and so warps, a row has."""
    N, T, H, _ = problem.q.shape
    items = N * -(-T * H // cut_of(problem).rows)
    parts = programs(problem) // items
    warps = min(max(parts // MERGE_PARTS, LEAST_MERGE_WARPS), MOST_MERGE_WARPS)
    grid = (N * T * H, VALUE_DIM // MERGE_DIMS, 1)
    return Launch(grid, 32 * warps, warps * MERGE_DIMS * 4, follows_early=True)


def workspace_size(problem: Problem) -> int:
    """Floats the partial results of a call take, four at most for each block of the launch.

    The values are bfloat16, two in the place of a float.
    """
    slots = 4 * programs(problem) + 2
    return slots * cut_of(problem).rows * (VALUE_DIM // 2 + 1)


def macros(problem: Problem) -> dict[str, int]:
    """What the source is compiled with."""
    cut = cut_of(problem)
    rows = {} if cut is WIDE else {"ROWS": cut.rows}
    return rows | {
        "SHARED_BYTES": cut.shared_bytes,
        "PAGE_SIZE": problem.page_size,
        "HYBRID": int(problem.tree_kv is not None),
    }


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem; nothing for rows the kernel does not take."""
    try:
        _check_rows(problem)
    except BackendError:
        return ()
    cut, defined = cut_of(problem), macros(problem)
    key = (cut.source, *defined.items())

    def attend() -> Binary:
        return Binary(compile_cubin(cut.source, arch=ARCH, macros=defined), cut.shared_bytes)

    def merge() -> Binary:
        return Binary(compile_cubin(cut.source, arch=ARCH, macros=defined), 0)

    return (Kernel("tree_attention", arch, key, attend), Kernel("merge", arch, key, merge))


@cache
def _kernels(
    device: torch.device, cut: Cut, defined: tuple[tuple[str, int], ...]
) -> tuple[CudaKernel, CudaKernel]:
    del device  # kernels are loaded for the current one
    cubin = compile_cubin(cut.source, arch=ARCH, macros=dict(defined))
    attend = CudaKernel(cubin, "tree_attention", shared_bytes=cut.shared_bytes)
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
