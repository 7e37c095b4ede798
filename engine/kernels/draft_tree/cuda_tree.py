"""The CUDA C++ implementation: one block a sequence, in one launch.

The kernel is `csrc/draft_tree.cu`; see there for the idea. It is compiled once for each number of
slots that a lane keeps of the frontier.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from engine.errors import BackendError
from engine.kernels.cubin import CudaKernel, Launch, compile_cubin
from engine.kernels.machine import arch_of, check_arch
from engine.kernels.op import Binary, Kernel

if TYPE_CHECKING:
    from engine.kernels.draft_tree.problem import Problem

SOURCE = "draft_tree.cu"
ARCHS = (90, 100, 120)
NUM_THREADS = 256
LANES = 32
RANKS_PER_WORD = 3
NODE_BYTES = 2 * 8 + 4 * 4  # two costs; ranks of node and slot, parent, depth
MOST_SHARED_BYTES = 98 * 1024  # that every architecture has, less what is static


class Params(ctypes.Structure):
    """`struct Params` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "log_probs", "candidates", "root_tokens", "root_positions", "token_ids", "positions",
            "parents", "depths", "path_log_probs", "ancestor_bits", "tree_sizes",
        )),
        *((name, ctypes.c_longlong) for name in (
            "log_probs_sequence", "log_probs_depth", "candidates_sequence", "candidates_depth",
        )),
        *((name, ctypes.c_int) for name in ("horizon", "K", "node_budget", "T", "W")),
    )  # fmt: skip


def run(problem: Problem) -> None:
    """Write the trees."""
    device = problem.log_probs.device
    check_arch(device, ARCHS, "tree backend cuda")
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        launch = Launch((len(problem.log_probs), 1, 1), NUM_THREADS, shared_bytes(problem))
        _kernel(device, num_slots(problem)).launch(_params(problem), launch, stream)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem."""
    slots, size = num_slots(problem), shared_bytes(problem)

    def build() -> Binary:
        return Binary(_compiled(slots, arch), size)

    return (Kernel("draft_tree", arch, (SOURCE, slots), build),)


def num_slots(problem: Problem) -> int:
    """Slots of the frontier in the registers of a lane, a power of two."""
    return 1 << (-(-max(problem.node_budget, 1) // LANES) - 1).bit_length()


def shared_bytes(problem: Problem) -> int:
    """Return the shared memory of a block; too much of it is a BackendError."""
    _, horizon, K = problem.log_probs.shape
    words = -(-horizon // RANKS_PER_WORD)
    nodes = (1 + problem.node_budget) * (NODE_BYTES + 4 * words)
    size = nodes + 4 * (horizon + 1) * (K + 1)
    if size > MOST_SHARED_BYTES:
        raise BackendError(
            f"tree backend cuda: expected candidates and nodes of at most {MOST_SHARED_BYTES} "
            f"bytes, got {size} for a horizon of {horizon} and {problem.node_budget} nodes "
            "(shared memory of a block)"
        )
    return size


def _compiled(slots: int, arch: int) -> bytes:
    return compile_cubin(SOURCE, arch=f"sm_{arch}", macros={"SLOTS": slots})


@cache
def _kernel(device: torch.device, slots: int) -> CudaKernel:
    cubin = _compiled(slots, arch_of(device))
    return CudaKernel(cubin, "draft_tree", shared_bytes=MOST_SHARED_BYTES)


def _params(problem: Problem) -> Params:
    trees, (_, horizon, K) = problem.trees, problem.log_probs.shape
    inputs = (
        problem.log_probs,
        problem.token_ids,
        problem.root_tokens,
        problem.root_positions,
    )
    outputs = (
        *(trees.token_ids, trees.positions, trees.parents, trees.depths),
        *(trees.path_log_probs, trees.ancestor_bits, trees.tree_sizes),
    )
    return Params(
        *(one.data_ptr() for one in (*inputs, *outputs)),
        *problem.log_probs.stride()[:2],
        *problem.token_ids.stride()[:2],
        *(horizon, K, problem.node_budget, problem.num_rows, trees.ancestor_bits.shape[-1]),
    )
