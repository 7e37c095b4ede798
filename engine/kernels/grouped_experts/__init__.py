"""Routed experts of M tokens: gate and up, SiLU, down, weighted sum.

For row m, with e = expert_ids[m, k] for each of its K choices::

    h[m, k] = silu(gate[e] x[m]) * (up[e] x[m])                       [I]
    y[m]    = Σ_k expert_weights[m, k] * (down[e] h[m, k])            [hidden]

A choice of -1 is none. A kernel of our own because at the few rows of a verify pass the step's
time is that of streaming weights: those of every expert that is hit, 3 * I * hidden numbers each,
have to be read, once for all of its tokens. Bound by that read while experts have few tokens, by
arithmetic beyond it.

Weights are taken as they are stored: plain numbers of the rows' dtype, int4 in groups of an
output's inputs (compressed-tensors: eight values in an int32, the first lowest, 8 stands for 0),
or fp8 in blocks. A product of value and scale is rounded once, to the scale's dtype (`cuda` scales
the sums of groups instead and rounds none; where experts have few tokens it rounds what goes into a
product to multiples of 2^-12 of the largest of its 256 inputs, or finer).

Backends: `reference` (PyTorch, any dtype, any device; fp8 too), `triton` (float32, bfloat16 and
float16 rows, plain or int4 weights; the architectures in `OP.archs`, or the CPU under
TRITON_INTERPRET=1), `cuda` (bfloat16 rows of numbers below 2^63, int4 weights in groups of 32 with
bfloat16 scales, widths that are multiples of 256; the architectures in `OP.archs`).

A CUDA graph: a call of `triton` or `cuda` can be captured and replayed with any rows, choices and
weights of them in the same buffers: grids and memory follow from the shapes alone. Rows that a
bucket of the graph has and a step lacks choose -1 and cost nothing.

Source: arXiv 2412.19437 §2.1.2 (the experts), vllm-project/compressed-tensors (the packing).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from engine.kernels.grouped_experts import cases
from engine.kernels.grouped_experts.cases import GroupedExpertsCase
from engine.kernels.grouped_experts.problem import pose
from engine.kernels.grouped_experts.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, given, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "OP",
    "GroupedExpertsCase",
    "experts_programs",
    "experts_workspace_size",
    "grouped_experts",
]

_WHAT = "moe backend"  # as refusals call it
_ARCHS = (90, 100, 120)


_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton": Backend(
        run=later("grouped_experts.triton_grouped", "run"),
        build=Build(_ARCHS, later("grouped_experts.triton_grouped", "kernels")),
        programs=later("grouped_experts.triton_grouped", "programs"),
        workspace_size=later("grouped_experts.triton_grouped", "workspace_size"),
    ),
    "cuda": Backend(
        run=later("grouped_experts.cuda_int4", "run"),
        build=Build(_ARCHS, later("grouped_experts.cuda_int4", "kernels")),
        programs=later("grouped_experts.cuda_int4", "programs"),
        workspace_size=later("grouped_experts.cuda_int4", "workspace_size"),
    ),
}


def grouped_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    gate_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    block: tuple[int, int] | None = None,
    num_splits: int | None = None,
    backend: str,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Sum the chosen experts of every row.

    Nothing is cast, copied or read back to the host (the reference reads which experts are hit),
    so that a call can be captured in a CUDA graph.

    Parameters
    ----------
    x : [M, hidden] float16, bfloat16, float32 or float64, last dim contiguous
        Rows whose choices are all -1 never matter.
    expert_ids : [M, K] int32 or int64
        0..E - 1, or -1 for no expert; an expert may stand twice in a row. The reference refuses
        others, which `triton` and `cuda` take for none.
    expert_weights : [M, K] float32 (float64 for float64 rows)
        Factors of the experts' results; those of no expert never matter.
    gate, up : [E, I, hidden] of x's dtype or float8_e4m3fn, or [E, I, hidden / 8] int32
        Last dim contiguous. Experts that no row chose are not read.
    down : [E, hidden, I], or [E, hidden, I / 8] int32
        Stored as gate and up are.
    gate_scale, up_scale, down_scale : [E, outputs, inputs / group size], optional
        Scales of int4 weights, bfloat16, float16 or float32; of fp8 ones one float32 for each
        block. None beside plain weights.
    block : (int, int), optional
        Outputs and inputs of a block of fp8 weights; None otherwise.
    num_splits : int, optional
        Parts that `hidden` is divided into where few programs would run, for `triton`; chosen by
        shapes and machine if None.
    backend : str
        Name in `OPS["grouped_experts"].implementations`.
    out : [M, hidden], dtype of x, last dim contiguous, optional
        Written (mutated) and returned; allocated if absent. Must not overlap x.
    workspace : [≥ experts_workspace_size] float32, contiguous, optional
        Scratch of `triton` and `cuda` (mutated); allocated if absent.

    Returns
    -------
    out
        Rows without any expert are 0.

    Raises
    ------
    ShapeError
        A tensor's shape, dtype, device or layout is not as above.
    BackendError
        The backend is unknown, cannot run here, or was given an argument it has no use for.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(
        x,
        expert_ids,
        expert_weights,
        gate,
        up,
        down,
        gate_scale=gate_scale,
        up_scale=up_scale,
        down_scale=down_scale,
        block=block,
        num_splits=num_splits,
        out=out,
        workspace=workspace,
    )
    if len(x):
        run(problem)
    return problem.out


def experts_programs(*operands: Tensor, backend: str, **arguments: Any) -> int:
    """Count the programs of the kernel that reads gate and up, for a call with these arguments.

    The reference has no such kernel, which is a BackendError.
    """
    count = given(backend, "launched programs", backend_named(_BACKENDS, backend, _WHAT).programs)
    return int(count(_problem(*operands, **arguments)))


def experts_workspace_size(*operands: Tensor, backend: str, **arguments: Any) -> int:
    """Return the float32 numbers a call with these arguments needs as its workspace.

    A function of shapes, dtypes and machine. A backend that takes none is a BackendError.
    """
    size = given(backend, "workspace", backend_named(_BACKENDS, backend, _WHAT).workspace_size)
    return int(size(_problem(*operands, **arguments)))


# The arguments of a call, checked; the optional ones may be left out.
_problem = partial(
    pose,
    gate_scale=None,
    up_scale=None,
    down_scale=None,
    block=None,
    num_splits=None,
    out=None,
    workspace=None,
)

OP: Op[GroupedExpertsCase] = op_of(grouped_experts, _BACKENDS, _problem, cases)
