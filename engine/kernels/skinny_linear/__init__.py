"""Products of a few rows with a large matrix: what a decoding step's projections are.

For row m of head h (one head where there are none), with `act` in front of the product::

    y[h, m] = act(x[h, m]) weight[h]^T

    act   nothing
          RMS(x) * norm_weight                  with `norm_weight`
          silu(gate) * up of x = [gate | up]    with `is_gated`

and behind it, with `gates_out`, silu(gate) * up of the product [gate | up], so half as wide.

A kernel of our own because weights of N * inputs numbers are all that such a product reads, and a
library that pads rows to a tile, or divides inputs among blocks and adds in a second launch, takes
longer over it; `act` would be one to three launches more. Bound by reading the weights. Sums in
float32 (float64 for float64), rounded once. What `act` gives is rounded where the same PyTorch
calls round it, but that `cuda` rounds x * norm_weight and divides the sums by the root mean square.

Backends: `reference` (PyTorch, any number of rows), `cuda` (bfloat16, at most 32 rows, inputs a
multiple of 32; the architectures in `OP.archs`). `cuda` starts reading weights while the launch
ahead of it still runs: that launch must not write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of
from engine.kernels.skinny_linear import cases
from engine.kernels.skinny_linear.cases import SkinnyLinearCase
from engine.kernels.skinny_linear.problem import MOST_ROWS, Problem, pose
from engine.kernels.skinny_linear.reference import run as _run_reference

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["MOST_ROWS", "OP", "SkinnyLinearCase", "skinny_linear"]

_WHAT = "linear backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "cuda": Backend(
        run=later("skinny_linear.cuda_skinny", "run"),
        build=Build((90, 100, 120), later("skinny_linear.cuda_skinny", "kernels")),
    ),
}


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    gates_out: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str,
) -> Tensor:
    """Multiply rows, normalised or gated before, by the transpose of a weight.

    Parameters
    ----------
    x : [M, inputs] or [H, M, inputs] bfloat16, float16, float32 or float64, last dim contiguous
        With `is_gated` 2 * inputs wide, of the weight's dtype or its accumulation dtype.
    weight : [N, inputs] or [H, N, inputs], last dim contiguous
    norm_weight : [inputs], optional
        Of the norm in front of the product; none beside a gate.
    eps : float
        Added to that norm's mean square.
    is_gated : bool
        Whether x is the gate and what it gates, beside each other.
    gates_out : bool
        Whether the product is; of an even N, and the result is N / 2 wide.
    out_dtype : dtype, optional
        The weight's, which is the default, or its accumulation dtype.
    out : [M, N] or [H, M, N], or half as wide, last dim contiguous, optional
        Written (mutated) and returned; allocated if absent. Must not overlap x.
    backend : str
        Name in `OPS["skinny_linear"].implementations`.

    Returns
    -------
    Tensor
        `out`.

    Raises
    ------
    ShapeError
        Shapes, dtypes, layouts or devices are not as above.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(
        x,
        weight,
        norm_weight=norm_weight,
        eps=eps,
        is_gated=is_gated,
        gates_out=gates_out,
        out_dtype=out_dtype,
        out=out,
    )
    if problem.out.numel():
        run(problem)
    return problem.out if x.dim() == 3 else problem.out[0]


def _problem(**arguments: Any) -> Problem:
    """Check the arguments of a call of which the optional ones may be left out."""
    defaults = {"norm_weight": None, "eps": 0.0, "out_dtype": None, "out": None}
    return pose(**(defaults | {"is_gated": False, "gates_out": False} | arguments))


OP: Op[SkinnyLinearCase] = op_of(skinny_linear, _BACKENDS, _problem, cases)
