"""Experts that rows choose in the same call: `choose_experts` without groups, `grouped_experts`.

For row m::

    e, w   = choose_experts(logits[m], bias)    K experts and their weights
    y[m]   = grouped_experts(x[m], e, w)

A kernel of our own because the choice is a few hundred numbers, and the first launch of the experts
sorts what it gives: it chooses as well, and one launch of every layer is saved. Bound by reading
the weights of the experts that are hit. Nothing is read back to the host.

Backends: `reference` (PyTorch), `cuda` (what that of `grouped_experts` takes; at most 1024 choices,
32 of a row; equal priorities go to the lower expert).

Source: arXiv 2412.19437 §2.1.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of
from engine.kernels.routed_experts import cases
from engine.kernels.routed_experts.cases import RoutedExpertsCase
from engine.kernels.routed_experts.problem import Problem, pose
from engine.kernels.routed_experts.reference import run as _run_reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OP", "RoutedExpertsCase", "routed_experts"]

_WHAT = "moe backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "cuda": Backend(
        run=later("routed_experts.cuda_routed", "run"),
        build=Build((90, 100, 120), later("routed_experts.cuda_routed", "kernels")),
    ),
}


def routed_experts(
    x: Tensor,
    logits: Tensor,
    bias: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    gate_scale: Tensor | None = None,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    block: tuple[int, int] | None = None,
    top_k: int,
    scaling: float = 1.0,
    is_normalised: bool = True,
    logits_are_there: bool = False,
    backend: str,
) -> Tensor:
    """Choose the experts of every row and sum what they make of it.

    Parameters
    ----------
    x : [M, hidden] float16, bfloat16, float32 or float64, last dim contiguous
    logits : [M, E] of x's accumulation dtype, last dim contiguous
    bias : [E] of the logits' dtype
        Steers the choice and never a weight.
    gate, up, down, gate_scale, up_scale, down_scale, block
        The experts, as `grouped_experts` takes them.
    top_k : int
        K, experts of a row.
    scaling : float
        Factor of all weights.
    is_normalised : bool
        Whether the chosen scores are divided by their sum.
    logits_are_there : bool
        Whether the launch ahead is one of `skinny_linear`'s `cuda` that makes none of the operands:
        it lets the next one start when all launches before it have ended, so that `cuda` need not
        wait for it before it chooses.
    backend : str
        Name in `OPS["routed_experts"].implementations`.

    Returns
    -------
    Tensor
        [M, hidden], dtype of x.

    Raises
    ------
    ShapeError
        Shapes, dtypes, layouts or devices are not as above, or K experts cannot be chosen.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(
        x,
        logits,
        bias,
        gate,
        up,
        down,
        gate_scale=gate_scale,
        up_scale=up_scale,
        down_scale=down_scale,
        block=block,
        top_k=top_k,
        scaling=scaling,
        is_normalised=is_normalised,
        logits_are_there=logits_are_there,
    )
    if len(x):
        run(problem)
    return problem.experts.out


def _problem(**arguments: Any) -> Problem:
    """Check the arguments of a call of which the optional ones may be left out."""
    names = ("gate_scale", "up_scale", "down_scale", "block")
    options: dict[str, Any] = dict.fromkeys(names)
    options |= {"scaling": 1.0, "is_normalised": True, "logits_are_there": False}
    return pose(**(options | arguments))


OP: Op[RoutedExpertsCase] = op_of(routed_experts, _BACKENDS, _problem, cases)
