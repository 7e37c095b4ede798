"""The CUDA C++ implementation for int4 experts of few tokens each: its three kernels.

They are those of `csrc/grouped_experts_few.cu`; see there for the idea. Grids and memory follow
from shapes and machine alone.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from engine.errors import BackendError
from engine.kernels.cubin import CudaKernel, Launch, compile_cubin
from engine.kernels.grouped_experts.cuda_operands import GROUP, INPUTS, projections, scale_of
from engine.kernels.machine import arch_of, num_sms
from engine.kernels.op import Binary, Kernel
from engine.kernels.operands import room
from engine.kernels.tensor_maps import MAP_BYTES, expert_step, tensor_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.kernels.grouped_experts.problem import Problem

SOURCE = "grouped_experts_few.cu"
WARPS, STAGES, TOKENS = 4, 2, 4  # of a block, of a warp's ring, of a tile
ROWS = 32  # outputs of a turn of a warp
WIDE_ROWS, NARROW_ROWS = 16, 32  # of a box of gate or up, of one of down
TURN_BYTES = ROWS * (INPUTS // 2 + INPUTS // GROUP * 2)  # packed values and scales
TOKEN_BYTES = INPUTS * 2 + INPUTS // GROUP * 16 + 16  # columns, where sums begin, the unit
SUMS_BYTES = 2 * (WARPS - 1) * 4 * 32 * 4
BARRIER_BYTES = 8
LEAST_HIDDEN = WARPS * INPUTS  # every warp of a block has inputs
PAIRS_AN_EXPERT = 2  # at most, in the mean over all experts
PREPARE_WARPS = 8
COMBINE_THREADS, COMBINE_DIMS = 128, 4  # dims of a thread
MOST_ON_SM = 3  # blocks of experts, of which all must run at once
SM_BYTES = {90: 228 << 10, 100: 228 << 10, 120: 100 << 10}  # shared memory
BLOCK_BYTES = 1 << 10  # that a block has beside what it asks for
RECORD = 8  # numbers of a tile in the table
FILLER_BYTES = 24  # behind the numbers: the source's struct is a multiple of 64 bytes
INT32_BYTES = 4
ALIGNMENT = 4  # numbers of 4 bytes: parts of the workspace begin at multiples of 16 bytes


class Params(ctypes.Structure):
    """`struct Params` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_ubyte * MAP_BYTES) for name in ("gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in (
            "x", "ids", "weights", "gate_scale", "up_scale", "down_scale",
            "tiles", "done", "integers", "h", "parts", "out",
        )),
        *((name, ctypes.c_longlong) for name in (
            "x_row", "ids_row", "ids_choice", "weights_row", "weights_choice", "out_row",
            "gate_scale_expert", "gate_scale_row", "up_scale_expert", "up_scale_row",
            "down_scale_expert", "down_scale_row",
        )),
        *((name, ctypes.c_int) for name in (
            "M", "K", "E", "hidden", "inner", "wide_ids", "most_tiles",
            "gate_step", "up_step", "down_step",
        )),
        ("filler", ctypes.c_ubyte * FILLER_BYTES),
    )  # fmt: skip


class Launched(Protocol):
    """A kernel, or what stands for one."""

    def launch(self, params: ctypes.Structure, launch: Launch, stream: torch.cuda.Stream) -> None:
        """Queue one launch."""


def serves(problem: Problem) -> bool:
    """Whether tiles of four tokens hold those of most experts: twice the mean number."""
    is_few = problem.num_pairs <= PAIRS_AN_EXPERT * problem.num_experts
    return is_few and problem.x.shape[1] >= LEAST_HIDDEN


def run(problem: Problem, stream: torch.cuda.Stream) -> None:
    """Write `out` in three launches; the operands have been checked."""
    rows = (WIDE_ROWS, WIDE_ROWS, NARROW_ROWS)
    stored = (projection.values for _, projection in projections(problem))
    maps = tuple(tensor_map(one, size) for one, size in zip(stored, rows, strict=True))
    queue(problem, maps, _kernels(problem.x.device, problem.inner), stream)


def queue(
    problem: Problem,
    maps: Sequence[bytes],
    kernels: Sequence[Launched],
    stream: torch.cuda.Stream,
) -> None:
    """Queue the launches on memory that is held until the last one is queued."""
    memory = room(problem.workspace, sum(_sizes(problem)), problem.x.device, is_aligned=True)
    params = _params(problem, maps, memory)
    for kernel, launch in zip(kernels, launches(problem), strict=True):
        kernel.launch(params, launch, stream)


def num_tiles(problem: Problem) -> int:
    """Most tiles any routing makes: one that is not full is the last one of its expert."""
    P, E = problem.num_pairs, problem.num_experts
    return (P + min(P, E) * (TOKENS - 1)) // TOKENS


def shared_bytes(inner: int) -> int:
    """Of a block of experts: rings, sums of the warps, barriers, what goes into down."""
    stage = TURN_BYTES + TOKENS * TOKEN_BYTES + BARRIER_BYTES
    return WARPS * STAGES * stage + SUMS_BYTES + inner // INPUTS * TOKENS * TOKEN_BYTES


def blocks_on_sm(inner: int, arch: int) -> int:
    """Blocks of experts that an SM has room for, and at least one."""
    return max(1, min(MOST_ON_SM, SM_BYTES[arch] // (shared_bytes(inner) + BLOCK_BYTES)))


def launches(problem: Problem) -> tuple[Launch, ...]:
    """Return the launches of prepare, experts and combine."""
    (M, hidden), inner, device = problem.x.shape, problem.inner, problem.x.device
    table = -(-problem.num_experts // PREPARE_WARPS)
    pieces = -(-M * (hidden // INPUTS) // PREPARE_WARPS)
    at_once = num_sms(device) * blocks_on_sm(inner, arch_of(device) or min(SM_BYTES))
    return (
        Launch((table + pieces, 1, 1), 32 * PREPARE_WARPS),
        Launch((at_once, 1, 1), 32 * WARPS, shared_bytes(inner), follows_early=True),
        Launch(
            (-(-hidden // (COMBINE_THREADS * COMBINE_DIMS)), M, 1),
            COMBINE_THREADS,
            follows_early=True,
        ),
    )


def workspace_size(problem: Problem) -> int:
    """Numbers of 4 bytes that a call needs for results on their way."""
    return sum(_sizes(problem))


def _sizes(problem: Problem) -> tuple[int, ...]:
    """Of the table, what is done, the rows as integers, h and parts, in numbers of 4 bytes."""
    (M, hidden), P, tiles = problem.x.shape, problem.num_pairs, num_tiles(problem)
    integers = M * (hidden // INPUTS) * TOKEN_BYTES // INT32_BYTES
    sizes = ((1 + tiles) * RECORD, tiles, integers, P * problem.inner, P * hidden)
    return tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem that is served."""
    shared = {"experts": shared_bytes(problem.inner)}

    def kernel(name: str) -> Kernel:
        def build() -> Binary:
            cubin = compile_cubin(SOURCE, arch=f"sm_{arch}", macros={})
            return Binary(cubin, shared.get(name, 0))

        return Kernel(name, arch, (SOURCE, shared.get(name, 0)), build)

    return tuple(map(kernel, ("prepare", "experts", "combine")))


@cache
def _kernels(device: torch.device, inner: int) -> tuple[CudaKernel, ...]:
    """Return the kernels of a device, on whose SMs the blocks of one must all fit."""
    arch = arch_of(device)
    cubin = compile_cubin(SOURCE, arch=f"sm_{arch}", macros={})
    shared, wanted = shared_bytes(inner), blocks_on_sm(inner, arch)
    experts = CudaKernel(cubin, "experts", shared_bytes=shared, is_mostly_shared=True)
    fitting = experts.blocks_on_sm(32 * WARPS, shared)
    if fitting < wanted:
        raise BackendError(
            f"moe backend cuda: expected an SM to run {wanted} blocks with {shared} bytes of "
            f"shared memory at once (they wait for each other), got {fitting}"
        )
    prepare, combine = (
        CudaKernel(cubin, name, is_mostly_shared=True) for name in ("prepare", "combine")
    )
    return prepare, experts, combine


def _params(problem: Problem, maps: Sequence[bytes], memory: Tensor) -> Params:
    """Return addresses, which hold no tensor: the caller keeps `memory`."""
    ids, weights = problem.expert_ids, problem.expert_weights
    stored = [projection for _, projection in projections(problem)]
    return Params(
        *((ctypes.c_ubyte * MAP_BYTES).from_buffer_copy(one) for one in maps),
        *(one.data_ptr() for one in (problem.x, ids, weights)),
        *(scale_of(one).data_ptr() for one in stored),
        *(part.data_ptr() for part in torch.split(memory, list(_sizes(problem)))),
        problem.out.data_ptr(),
        problem.x.stride(0), *ids.stride(), *weights.stride(), problem.out.stride(0),
        *(step for one in stored for step in scale_of(one).stride()[:2]),
        *problem.x.shape[:1], ids.shape[1], problem.num_experts, problem.x.shape[1],
        problem.inner, int(ids.dtype == torch.int64), num_tiles(problem),
        *(expert_step(one.values) for one in stored),
    )  # fmt: skip
