"""The CUDA C++ implementation: how its kernel is cut, compiled and launched.

The kernel is `csrc/skinny_linear.cu`; see there for the idea. The cut follows from shapes alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from engine.errors import BackendError
from engine.kernels.cubin import CudaKernel, Launch, compile_cubin
from engine.kernels.machine import arch_of
from engine.kernels.op import Binary, Kernel
from engine.kernels.operands import COPY_BYTES
from engine.kernels.skinny_linear.problem import MOST_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.skinny_linear.problem import Problem

SOURCE = "skinny_linear.cu"
NAME = "skinny_linear"
ARCHS = (90, 100, 120)
COLUMNS = 8  # tokens of the matrix instruction
ROWS = 16  # outputs of it
TURN_INPUTS = 32  # of a warp in a turn
WIDE_OUTPUTS = 4096  # from which on a block takes twice the outputs: half of the tokens' traffic
FEW_BLOCKS = 264  # two an SM: with as many, eight warps of each fill an SM's registers
MOST_WARPS, LEAST_WARPS = 8, 4


@dataclass(frozen=True, slots=True)
class Cut:
    """How the kernel cuts a problem, and its variant; the fields are macros of the source."""

    tokens: int
    warps: int
    row_tiles: int
    norm: int
    gated: int
    float_x: int
    float_out: int

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
        return ROWS * self.row_tiles

    @property
    def macros(self) -> dict[str, int]:
        """What the source is compiled with."""
        return {name.upper(): value for name, value in asdict(self).items()}


class Params(ctypes.Structure):
    """`struct Params` of the source, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "norm", "out")),
        *((name, ctypes.c_longlong) for name in (
            "x_head", "x_row", "weight_head", "weight_row", "out_head", "out_row",
        )),
        *((name, ctypes.c_int) for name in ("M", "N", "inputs")),
        ("eps", ctypes.c_float),
    )  # fmt: skip


def run(problem: Problem) -> None:
    """Write `out` in one launch, queued while the one ahead of it ends."""
    run_cut(problem, cut_of(problem))


def run_cut(problem: Problem, cut: Cut) -> None:
    """Write `out` by the kernel of a chosen cut."""
    check(problem)
    device = problem.x.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        _kernel(device, cut).launch(_params(problem), launch(problem, cut), stream)


def check(problem: Problem) -> None:
    """Refuse what the kernel cannot run."""
    arch = arch_of(problem.x.device)
    if arch not in ARCHS:
        raise BackendError(
            f"linear backend cuda: expected a GPU of one of the architectures {ARCHS}, got "
            f"{problem.x.device.type} {arch or ''}".rstrip()
        )
    _check_sizes(problem)
    operands = {"x": problem.x, "weight": problem.weight, "norm_weight": problem.norm_weight}
    for name, tensor in operands.items():
        if tensor is not None and not _is_aligned(tensor):
            raise BackendError(
                f"linear backend cuda: expected {name} to begin at, and step by, multiples of "
                f"{COPY_BYTES} bytes (its loads), got strides {tensor.stride()}"
            )


def _check_sizes(problem: Problem) -> None:
    rows = problem.x.shape[1]
    if problem.weight.dtype != torch.bfloat16:
        raise BackendError(
            f"linear backend cuda: expected bfloat16 weights, got {problem.weight.dtype}"
        )
    if rows > MOST_ROWS:
        raise BackendError(f"linear backend cuda: expected at most {MOST_ROWS} rows, got {rows}")
    if problem.inputs % TURN_INPUTS:
        raise BackendError(
            f"linear backend cuda: expected inputs in multiples of {TURN_INPUTS}, got "
            f"{problem.inputs}"
        )


def _is_aligned(tensor: Tensor) -> bool:
    steps = (
        stride * tensor.itemsize
        for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
        if size > 1
    )
    return tensor.data_ptr() % COPY_BYTES == 0 and all(step % COPY_BYTES == 0 for step in steps)


def cut_of(problem: Problem) -> Cut:
    """Choose the cut of a problem: the fewer blocks, and the more inputs, the more warps."""
    H, M, N = problem.out.shape
    row_tiles = 2 if N >= WIDE_OUTPUTS else 1
    blocks = H * -(-N // (ROWS * row_tiles))
    warps = MOST_WARPS if blocks <= FEW_BLOCKS else LEAST_WARPS
    while warps > 1 and 2 * warps * TURN_INPUTS > problem.inputs:  # two turns each
        warps //= 2
    return Cut(
        tokens=-(-M // COLUMNS) * COLUMNS,
        warps=warps,
        row_tiles=row_tiles,
        norm=int(problem.norm_weight is not None),
        gated=int(problem.is_gated),
        float_x=int(problem.x.dtype == torch.float32),
        float_out=int(problem.out.dtype == torch.float32),
    )


def launch(problem: Problem, cut: Cut) -> Launch:
    """Return the launch: a block for its outputs, for every head."""
    H, _, N = problem.out.shape
    return Launch((-(-N // cut.outputs), H, 1), 32 * cut.warps, follows_early=True)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem; nothing for operands the kernel does not take."""
    try:
        _check_sizes(problem)
    except BackendError:
        return ()
    cut = cut_of(problem)

    def build() -> Binary:
        return Binary(compile_cubin(SOURCE, arch=f"sm_{arch}", macros=cut.macros), 0)

    return (Kernel(NAME, arch, (SOURCE, cut), build),)


@cache
def _kernel(device: torch.device, cut: Cut) -> CudaKernel:
    return CudaKernel(compile_cubin(SOURCE, arch=f"sm_{arch_of(device)}", macros=cut.macros), NAME)


def _params(problem: Problem) -> Params:
    x, weight, norm_weight, out = problem.x, problem.weight, problem.norm_weight, problem.out
    return Params(
        *(x.data_ptr(), weight.data_ptr()),
        None if norm_weight is None else norm_weight.data_ptr(),
        out.data_ptr(),
        *(step for one in (x, weight, out) for step in one.stride()[:2]),
        *(x.shape[1], weight.shape[1], problem.inputs),
        problem.eps,
    )
