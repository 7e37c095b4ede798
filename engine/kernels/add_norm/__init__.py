"""What stands between two parts of a layer: sums onto the residual stream, and its norm.

For row m, each sum and the norm rounded to the rows' dtype::

    total[m]  = x[m] + (first[m] + second[m])        of as many addends as there are
    normed[m] = RMS(total[m]) * norm_weight

A kernel of our own because it is one to two sums and a norm of a few kilobytes, three launches
twice in every layer: one launch, bound by nothing else. Sums of squares in float32 (float64 for
float64).

Backends: `reference` (PyTorch), `triton` (bfloat16, float16, float32).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.add_norm import cases
from engine.kernels.add_norm.cases import AddNormCase
from engine.kernels.add_norm.problem import pose
from engine.kernels.add_norm.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OP", "AddNormCase", "add_norm"]

_WHAT = "norm backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton": Backend(
        run=later("add_norm.triton_norm", "run"),
        build=Build((90, 100, 120), later("add_norm.triton_norm", "kernels")),
    ),
}


def add_norm(
    x: Tensor,
    addends: tuple[Tensor, ...],
    norm_weight: Tensor,
    *,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the sum of rows and what is added to them, and the sum's norm.

    Parameters
    ----------
    x : [M, hidden] bfloat16, float16, float32 or float64, last dim contiguous
    addends : none, one or two like x
        Two are summed, and rounded, before they are added.
    norm_weight : [hidden] of their dtype
    eps : float
        Added to the mean square.
    backend : str
        Name in `OPS["add_norm"].implementations`.

    Returns
    -------
    tuple of Tensor
        total [M, hidden], x itself where nothing is added; normed [M, hidden].

    Raises
    ------
    ShapeError
        Shapes, dtypes, layouts or devices are not as above.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(x, addends, norm_weight, eps=eps)
    if len(x):
        run(problem)
    return problem.total, problem.normed


OP: Op[AddNormCase] = op_of(add_norm, _BACKENDS, pose, cases)
