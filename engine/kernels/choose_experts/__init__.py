"""The router's choice: K of E experts for each row, and what they weigh.

For row m with s = sigmoid(logits[m])::

    a group's score is the sum of its best two of s + bias; the best `kept_groups` of them stay
    e_1 .. e_K = the experts of those groups with the largest s + bias, best first
    w_k        = scaling * s[e_k], divided by Σ s[e_k] where the weights are normalised

The bias steers the choice and never a weight. A kernel of our own because the choice is ten
launches of a few microseconds for a few hundred numbers, in every layer: one launch, bound by
nothing else. Equal priorities go to the lower expert in `triton`, to any in `reference`.

Backends: `reference` (PyTorch, float32 and float64), `triton` (float32).

Source: arXiv 2412.19437 §2.1.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.kernels.choose_experts import cases
from engine.kernels.choose_experts.cases import ChooseExpertsCase
from engine.kernels.choose_experts.problem import Choice, Problem, pose
from engine.kernels.choose_experts.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OP", "Choice", "ChooseExpertsCase", "choose_experts"]

_WHAT = "router backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton": Backend(
        run=later("choose_experts.triton_choose", "run"),
        build=Build((90, 100, 120), later("choose_experts.triton_choose", "kernels")),
    ),
}


def choose_experts(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    scaling: float = 1.0,
    is_normalised: bool = True,
    num_groups: int = 1,
    kept_groups: int = 1,
    backend: str,
) -> Choice:
    """Choose the experts of every row. Nothing is read back to the host.

    Parameters
    ----------
    logits : [M, E] float32 or float64, last dim contiguous
    bias : [E] of their dtype
    top_k, num_groups, kept_groups : int
        K, groups of equal size, and how many of them a row may choose from.
    scaling : float
        Factor of all weights.
    is_normalised : bool
        Whether the chosen scores are divided by their sum.
    backend : str
        Name in `OPS["choose_experts"].implementations`.

    Returns
    -------
    Choice
        expert_ids [M, K] int64, best first, and expert_weights [M, K] of the logits' dtype.

    Raises
    ------
    ShapeError
        Shapes, dtypes or devices are not as above, or K experts cannot be chosen.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(
        logits,
        bias,
        top_k=top_k,
        scaling=scaling,
        is_normalised=is_normalised,
        num_groups=num_groups,
        kept_groups=kept_groups,
    )
    if len(logits):
        run(problem)
    return problem.choice


def _problem(**arguments: Any) -> Problem:
    """Check the arguments of a call of which the optional ones may be left out."""
    defaults = {"scaling": 1.0, "is_normalised": True, "num_groups": 1, "kept_groups": 1}
    return pose(**(defaults | arguments))


OP: Op[ChooseExpertsCase] = op_of(choose_experts, _BACKENDS, _problem, cases)
