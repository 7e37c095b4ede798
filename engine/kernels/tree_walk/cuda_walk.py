"""The CUDA C++ implementation: one block a sequence, in one launch; see `csrc/walk_tree.cu`."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from engine.kernels.cubin import CudaKernel, Launch, compile_cubin
from engine.kernels.machine import arch_of, check_arch
from engine.kernels.op import Binary, Kernel

if TYPE_CHECKING:
    from engine.kernels.tree_walk.problem import Problem

SOURCE = "walk_tree.cu"
ARCHS = (90, 100, 120)
NUM_THREADS = 128
NODE_BYTES = 2 * 4  # the next node, a place in the path


class Params(ctypes.Structure):
    """`struct Params` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "target_tokens", "token_ids", "parents", "tree_sizes", "slots", "num_accepted", "path",
            "tokens", "sources",
        )),
        ("target_sequence", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("T", "width")),
    )  # fmt: skip


def run(problem: Problem) -> None:
    """Write the walks."""
    device = problem.target_tokens.device
    check_arch(device, ARCHS, "walk backend cuda")
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        grid = (len(problem.target_tokens), 1, 1)
        launch = Launch(grid, NUM_THREADS, _shared_bytes(problem))
        _kernel(device).launch(_params(problem), launch, stream)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem."""
    size = _shared_bytes(problem)

    def build() -> Binary:
        return Binary(_compiled(arch), size)

    return (Kernel("walk_tree", arch, SOURCE, build),)


def _shared_bytes(problem: Problem) -> int:
    return NODE_BYTES * problem.num_rows


def _compiled(arch: int) -> bytes:
    return compile_cubin(SOURCE, arch=f"sm_{arch}", macros={})


@cache
def _kernel(device: torch.device) -> CudaKernel:
    return CudaKernel(_compiled(arch_of(device)), "walk_tree")


def _params(problem: Problem) -> Params:
    walk = problem.walk
    inputs = (
        *(problem.target_tokens, problem.token_ids, problem.parents),
        *(problem.tree_sizes, problem.slots),
    )
    outputs = (walk.num_accepted, walk.path, walk.tokens, walk.sources)
    return Params(
        *(one.data_ptr() for one in (*inputs, *outputs)),
        *(problem.target_tokens.stride(0), problem.num_rows, problem.width),
    )
