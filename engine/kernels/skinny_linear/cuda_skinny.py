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
from engine.kernels.machine import arch_of, check_arch
from engine.kernels.op import Binary, Kernel
from engine.kernels.operands import COPY_BYTES, is_copyable
from engine.kernels.skinny_linear.problem import MOST_ROWS

if TYPE_CHECKING:
    from engine.kernels.skinny_linear.problem import Problem

SOURCE = "skinny_linear.cu"
NAME = "skinny_linear"
ARCHS = (90, 100, 120)
COLUMNS = 8  # tokens of the matrix instruction
LEAST_INPUTS = 32  # that inputs are a multiple of
TURN_INPUTS = 64  # of a warp in a turn
ROW_BYTES = 2 * TURN_INPUTS
LEAST_STAGES = 2  # of a ring: one is read while the next is filled
FEW_INPUTS = 1024  # up to which a warp has few turns, whatever its block is
FEW_OUTPUTS, MANY_OUTPUTS = 1024, 16384  # up to which a block has 8, and 16, of them
LOW_TOKENS, WAVE_OUTPUTS = 8, 4096  # up to, and beyond, which three blocks of an SM are faster
NARROW_ARCHS = (120,)
SHARED_BYTES, NARROW_SHARED_BYTES = (
    227 * 1024 - 1024,
    99 * 1024 - 1024,
)  # of a block, less its scales
READY_BYTES, NARROW_READY_BYTES = 98304, 49152  # of tokens that are gated


@dataclass(frozen=True, slots=True)
class Cut:
    """How the kernel cuts a problem, and its variant; the fields are macros of the source."""

    tokens: int
    warps: int
    rows: int  # of the weight, of a block
    stages: int
    chunk: int  # inputs of tokens that are made ready at a time; 0 where they come as they are
    norm: int
    gated: int
    gates: int
    float_x: int
    float_out: int

    @property
    def shared_bytes(self) -> int:
        """Of a block: tokens made ready and a ring for each warp, or the sums of the warps."""
        ready = self.chunk * 2 * self.tokens
        stage = ROW_BYTES * (self.rows + (0 if self.chunk else self.tokens))
        sums = self.warps * self.tokens * (self.rows + self.norm) * 4
        return max(ready + self.warps * self.stages * stage, sums)

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
    run_cut(problem, cut_of(problem, arch_of(problem.x.device)))


def run_cut(problem: Problem, cut: Cut) -> None:
    """Write `out` by the kernel of a chosen cut."""
    check(problem)
    device = problem.x.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        _kernel(device, cut).launch(_params(problem), launch(problem, cut), stream)


def check(problem: Problem) -> None:
    """Refuse what the kernel cannot run."""
    check_arch(problem.x.device, ARCHS, "linear backend cuda")
    _check_sizes(problem)
    operands = {"x": problem.x, "weight": problem.weight, "norm_weight": problem.norm_weight}
    for name, tensor in operands.items():
        if tensor is not None and not is_copyable(tensor):
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
    if problem.inputs % LEAST_INPUTS:
        raise BackendError(
            f"linear backend cuda: expected inputs in multiples of {LEAST_INPUTS}, got "
            f"{problem.inputs}"
        )


def cut_of(problem: Problem, arch: int) -> Cut:
    """Choose the cut of a problem: what an H200 was fastest with at 9 rows of a rank's products."""
    outputs = problem.weight.shape[0] * problem.weight.shape[1]
    tokens = problem.x.shape[1]
    if problem.is_gated:
        warps, rows, stages = 8, 32, 3
    elif problem.norm_weight is not None:
        warps, rows, stages = 16, 16, 3
    elif problem.inputs <= FEW_INPUTS:
        warps, rows, stages = 4, 16, 3
    elif outputs <= FEW_OUTPUTS:
        warps, rows, stages = 16, 8, 3
    else:
        is_low = problem.gates_out and outputs > WAVE_OUTPUTS and tokens <= LOW_TOKENS
        warps, rows, stages = 8, 16 if outputs <= MANY_OUTPUTS else 32, 3 if is_low else 4
    return cut_with(problem, arch, warps=warps, rows=rows, stages=stages)


def cut_with(problem: Problem, arch: int, *, warps: int, rows: int, stages: int) -> Cut:
    """Return the cut with these warps, outputs and stages of a block, or as many as fit."""
    tokens = -(-problem.out.shape[1] // COLUMNS) * COLUMNS
    is_narrow, step = arch in NARROW_ARCHS, warps * TURN_INPUTS
    fit = (NARROW_READY_BYTES if is_narrow else READY_BYTES) // (2 * tokens * step)
    chunk = min(-(-problem.inputs // step), max(fit, 1)) * step if problem.is_gated else 0
    cut = Cut(
        tokens=tokens,
        warps=warps,
        rows=rows,
        stages=stages,
        chunk=chunk,
        norm=int(problem.norm_weight is not None),
        gated=int(problem.is_gated),
        gates=int(problem.gates_out),
        float_x=int(problem.x.dtype == torch.float32),
        float_out=int(problem.out.dtype == torch.float32),
    )
    if cut.shared_bytes <= (NARROW_SHARED_BYTES if is_narrow else SHARED_BYTES):
        return cut
    if stages > LEAST_STAGES:
        return cut_with(problem, arch, warps=warps, rows=rows, stages=stages - 1)
    return cut_with(problem, arch, warps=warps // 2, rows=rows, stages=stages)


def launch(problem: Problem, cut: Cut) -> Launch:
    """Return the launch: a block for its outputs, for every head."""
    H, _, N = problem.out.shape
    grid = (-(-N // (cut.rows // 2 if cut.gates else cut.rows)), H, 1)
    return Launch(grid, 32 * cut.warps, cut.shared_bytes, follows_early=True)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem; nothing for operands the kernel does not take."""
    try:
        _check_sizes(problem)
    except BackendError:
        return ()
    cut = cut_of(problem, arch)

    def build() -> Binary:
        return Binary(compile_cubin(SOURCE, arch=f"sm_{arch}", macros=cut.macros), cut.shared_bytes)

    return (Kernel(NAME, arch, (SOURCE, cut), build),)


@cache
def _kernel(device: torch.device, cut: Cut) -> CudaKernel:
    cubin = compile_cubin(SOURCE, arch=f"sm_{arch_of(device)}", macros=cut.macros)
    return CudaKernel(cubin, NAME, shared_bytes=cut.shared_bytes)


def _params(problem: Problem) -> Params:
    x, weight, norm_weight, out = problem.x, problem.weight, problem.norm_weight, problem.out
    return Params(
        *(x.data_ptr(), weight.data_ptr()),
        None if norm_weight is None else norm_weight.data_ptr(),
        out.data_ptr(),
        *(step for one in (x, weight, out) for step in one.stride()[:2]),
        *(x.shape[1], out.shape[2], problem.inputs),
        problem.eps,
    )
