"""The CUDA C++ implementation for int4 experts: its kernels and how they are launched.

Where experts have few tokens, those of `cuda_int4_few`; here the four of `csrc/grouped_experts.cu`;
see there for the idea. Grids and memory follow from shapes alone. A kernel is compiled once for
each number of tokens of a tile.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from engine.errors import BackendError
from engine.kernels.cubin import CudaKernel, Launch, compile_cubin
from engine.kernels.grouped_experts import cuda_int4_few
from engine.kernels.grouped_experts.cuda_operands import (
    GROUP,
    INPUTS,
    check,
    check_rows,
    projections,
    scale_of,
)
from engine.kernels.machine import arch_of
from engine.kernels.op import Binary, Kernel
from engine.kernels.operands import room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from engine.kernels.grouped_experts.problem import Problem

SOURCE = "grouped_experts.cu"
NARROW_ARCHS = (120,)  # 99 KB of shared memory, others have 227
PREPARE_WARPS = 8
COMBINE_THREADS, COMBINE_DIMS = 128, 4  # dims of a thread
ROWS = 16  # of the matrix instruction
TOKEN_BYTES = INPUTS * 2  # of a token in a turn
TILE_BYTES = ROWS * (INPUTS // 2 + INPUTS // GROUP * 2)  # packed values and scales of a turn
INT32_BYTES = 4
ALIGNMENT = 4  # numbers of 4 bytes: parts of the workspace begin at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """How the kernels cut a problem; the fields are macros of the source."""

    tokens: int  # of a tile
    splits: int  # warps that share the inputs of gate_up
    wide: int  # warps beside each other in outputs
    row_tiles: int  # of such a warp, 8 outputs each
    stages: int
    down_warps: int = 4
    down_row_tiles: int = 2  # of 16 outputs, of a turn
    down_turns: int = 7  # of a warp, each of a whole row of inputs
    down_stages: int = 3

    @property
    def outputs(self) -> int:
        """Outputs of a block of gate_up."""
        return 8 * self.wide * self.row_tiles

    @property
    def down_outputs(self) -> int:
        """Outputs of a block of down."""
        return self.down_warps * self.down_turns * self.down_row_tiles * ROWS

    @property
    def shared_bytes(self) -> int:
        """Of a block of gate_up: a ring for each split."""
        tokens = self.tokens * (TOKEN_BYTES + INPUTS // GROUP * 4)
        return self.splits * self.stages * (tokens + self.wide * self.row_tiles * TILE_BYTES)

    def down_shared_bytes(self, inner: int) -> int:
        """Of a block of down: what goes in of all its tokens, and a ring for each warp."""
        ring = self.down_stages * self.down_row_tiles * TILE_BYTES
        return self.tokens * (inner * 2 + inner // GROUP * 4) + self.down_warps * ring

    @property
    def macros(self) -> dict[str, int]:
        """What the source is compiled with."""
        return {name.upper(): getattr(self, name) for name in self.__dataclass_fields__}


FEW = Cut(tokens=8, splits=2, wide=2, row_tiles=2, stages=2)
MANY = Cut(tokens=16, splits=1, wide=4, row_tiles=2, stages=2, down_turns=4)


class Params(ctypes.Structure):
    """`struct Params` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "x", "ids", "weights", "gate", "up", "down", "gate_scale", "up_scale", "down_scale",
            "order", "tiles", "ordered_x", "begins", "h", "parts", "out",
        )),
        *((name, ctypes.c_longlong) for name in (
            "x_row", "ids_row", "ids_choice", "weights_row", "weights_choice", "out_row",
            "gate_expert", "gate_row", "gate_scale_expert", "gate_scale_row",
            "up_expert", "up_row", "up_scale_expert", "up_scale_row",
            "down_expert", "down_row", "down_scale_expert", "down_scale_row",
        )),
        *((name, ctypes.c_int) for name in (
            "M", "K", "E", "hidden", "inner", "num_tiles", "wide_ids",
        )),
    )  # fmt: skip


def run(problem: Problem) -> None:
    """Write `out` in a few launches, each but the first queued while the one before ends."""
    check(problem)
    device = problem.x.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        if cuda_int4_few.serves(problem):
            cuda_int4_few.run(problem, stream)
            return
        cut = cut_of(problem, arch_of(device))
        queue(problem, cut, _kernels(device, cut, problem.inner), stream)


def queue(
    problem: Problem, cut: Cut, kernels: Sequence[CudaKernel], stream: torch.cuda.Stream
) -> None:
    """Queue the launches on memory that is held until the last one is queued."""
    memory = room(problem.workspace, sum(_sizes(problem, cut)), problem.x.device, is_aligned=True)
    params = _params(problem, cut, memory)
    for kernel, launch in zip(kernels, launches(problem, cut), strict=True):
        kernel.launch(params, launch, stream)


def cut_of(problem: Problem, arch: int) -> Cut:
    """Choose tiles that hold twice the mean number of tokens of an expert: most experts are one."""
    is_few = 2 * problem.num_pairs <= MANY.tokens * problem.num_experts
    return FEW if is_few or arch in NARROW_ARCHS else MANY


def num_tiles(problem: Problem, cut: Cut) -> int:
    """Most tiles any routing makes: one that is not full is the last one of its expert."""
    P, E = problem.num_pairs, problem.num_experts
    return (P + min(P, E) * (cut.tokens - 1)) // cut.tokens


def launches(problem: Problem, cut: Cut) -> tuple[Launch, ...]:
    """Return the launches of prepare, gate_up, down and combine."""
    M, hidden = problem.x.shape
    tiles, inner = num_tiles(problem, cut), problem.inner
    return (
        Launch((-(-problem.num_experts // PREPARE_WARPS), 1, 1), 32 * PREPARE_WARPS),
        Launch(
            (inner // cut.outputs, tiles, 1),
            32 * cut.splits * cut.wide,
            cut.shared_bytes,
            follows_early=True,
        ),
        Launch(
            (-(-hidden // cut.down_outputs), tiles, 1),
            32 * cut.down_warps,
            cut.down_shared_bytes(inner),
            follows_early=True,
        ),
        Launch(
            (-(-hidden // (COMBINE_THREADS * COMBINE_DIMS)), M, 1),
            COMBINE_THREADS,
            follows_early=True,
        ),
    )


def programs(problem: Problem) -> int:
    """Blocks of the launch that reads gate and up."""
    if cuda_int4_few.serves(problem):
        return cuda_int4_few.launches(problem)[1].grid[0]
    x, y, z = launches(problem, cut_of(problem, arch_of(problem.x.device)))[1].grid
    return x * y * z


def workspace_size(problem: Problem) -> int:
    """Numbers of 4 bytes that a call needs for results on their way."""
    if cuda_int4_few.serves(problem):
        return cuda_int4_few.workspace_size(problem)
    return sum(_sizes(problem, cut_of(problem, arch_of(problem.x.device))))


def _sizes(problem: Problem, cut: Cut) -> tuple[int, ...]:
    """Of order, tiles, the ordered rows, their sums, h and parts, in numbers of 4 bytes."""
    (M, hidden), P = problem.x.shape, problem.num_pairs
    rows, sums = M * hidden // 2, M * hidden // GROUP
    sizes = (P, 3 * num_tiles(problem, cut), rows, sums, P * problem.inner // 2, P * hidden)
    return tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem; nothing for weights the kernels do not take."""
    try:
        check_rows(problem)
    except BackendError:
        return ()
    if cuda_int4_few.serves(problem):
        return cuda_int4_few.kernels(problem, arch)
    cut = cut_of(problem, arch)
    shared = {"gate_up": cut.shared_bytes, "down": cut.down_shared_bytes(problem.inner)}

    def kernel(name: str) -> Kernel:
        def build() -> Binary:
            cubin = compile_cubin(SOURCE, arch=f"sm_{arch}", macros=cut.macros)
            return Binary(cubin, shared.get(name, 0))

        return Kernel(name, arch, (SOURCE, cut), build)

    return tuple(map(kernel, ("prepare", "gate_up", "down", "combine")))


@cache
def _kernels(device: torch.device, cut: Cut, inner: int) -> tuple[CudaKernel, ...]:
    cubin = compile_cubin(SOURCE, arch=f"sm_{arch_of(device)}", macros=cut.macros)
    return (
        CudaKernel(cubin, "prepare"),
        CudaKernel(cubin, "gate_up", shared_bytes=cut.shared_bytes),
        CudaKernel(cubin, "down", shared_bytes=cut.down_shared_bytes(inner)),
        CudaKernel(cubin, "combine"),
    )


def _params(problem: Problem, cut: Cut, memory: Tensor) -> Params:
    """Return addresses, which hold no tensor: the caller keeps `memory`."""
    ids, weights = problem.expert_ids, problem.expert_weights
    stored = [projection for _, projection in projections(problem)]
    return Params(
        *(one.data_ptr() for one in (problem.x, ids, weights)),
        *(one.values.data_ptr() for one in stored),
        *(scale_of(one).data_ptr() for one in stored),
        *(part.data_ptr() for part in torch.split(memory, list(_sizes(problem, cut)))),
        problem.out.data_ptr(),
        problem.x.stride(0), *ids.stride(), *weights.stride(), problem.out.stride(0),
        *(
            step
            for one in stored
            for step in (*one.values.stride()[:2], *scale_of(one).stride()[:2])
        ),
        *problem.x.shape[:1], ids.shape[1], problem.num_experts, problem.x.shape[1],
        problem.inner, num_tiles(problem, cut), int(ids.dtype == torch.int64),
    )  # fmt: skip
