"""What a layer of grouped heads makes of a block before it attends: queries, and rows, stored.

For row s of sequence n at the angles (cos, sin)[n * S + s], key head k and query head g of it::

    block[n, k, s]       = [ values[n, s, k] ; rot(RMS(keys[n, s, k]) * key_norm) ]      [2 D]
    out[n, k, g * S + s] = rot(RMS(queries[n, s, k * G + g]) * query_norm)               [D]

`rot` turns the pairs (i, i + D / 2). A kernel of our own because it is two norms, two rotations, a
change of order and two scatters of a few kilobytes, some twenty launches in every layer: one
launch, bound by nothing else. In float32 (float64 for float64), rounded once; the reference rounds
between norm and rotation as the same PyTorch calls do.

Backends: `reference` (PyTorch), `triton` (bfloat16, float16, float32).

Source: z-lab/dflash dflash/model.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.head_rows import cases
from engine.kernels.head_rows.cases import HeadRowsCase
from engine.kernels.head_rows.problem import pose
from engine.kernels.head_rows.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OP", "HeadRowsCase", "head_rows"]

_WHAT = "rows backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton": Backend(
        run=later("head_rows.triton_rows", "run"),
        build=Build((90, 100, 120), later("head_rows.triton_rows", "kernels")),
    ),
}


def head_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    block: Tensor,
    backend: str,
) -> Tensor:
    """Write a block's rows where they are kept, and return its queries.

    Parameters
    ----------
    queries : [N * S, H, D] bfloat16, float16, float32 or float64, last dim contiguous
        H is a multiple of H_kv: G query heads share a key head; D is even.
    keys, values : [N * S, H_kv, D] of its dtype, last dim contiguous
    query_norm, key_norm : [D] of its dtype
    cos, sin : [N * S, D / 2] float32, float64 for float64 rows
    eps : float
        Added to the mean square.
    block : [N, H_kv, S, 2 * D] of their dtype, last dim contiguous
        Mutated.
    backend : str
        Name in `OPS["head_rows"].implementations`.

    Returns
    -------
    Tensor
        [N, H_kv, G * S, D], contiguous.

    Raises
    ------
    ShapeError
        Shapes, dtypes, layouts or devices are not as above.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(queries, keys, values, query_norm, key_norm, cos, sin, eps=eps, block=block)
    if len(queries):
        run(problem)
    return problem.out


OP: Op[HeadRowsCase] = op_of(head_rows, _BACKENDS, pose, cases)
