"""What MLA makes before it attends: latent rows, stored, and queries against such rows.

For row m at the angles (cos, sin)[m], with C value dims and R = D - C rotated ones::

    rows[slots[m]]    = [ RMS(kv_a[m, :C]) * norm_weight ; rot_m(kv_a[m, C:]) ]         [D]
    out[m, h]         = [ queries[m, h, :-R] up_keys[h] ; rot_m(queries[m, h, -R:]) ]   [D]

`rot` turns the pairs (2i, 2i + 1); the product absorbs a head's keys into its query. A kernel of
our own because it is a norm, two rotations, two concatenations, a scatter and a batch of products
with a megabyte of weights, some sixteen launches in every layer: one launch, bound by nothing else.
Sums and products in float32 (float64 for float64), rounded once.

Backends: `reference` (PyTorch), `triton` (bfloat16, float16, float32).

Source: arXiv 2412.19437 §2.1.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.mla_rows import cases
from engine.kernels.mla_rows.cases import MlaRowsCase
from engine.kernels.mla_rows.problem import pose
from engine.kernels.mla_rows.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OP", "MlaRowsCase", "mla_rows"]

_WHAT = "rows backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton": Backend(
        run=later("mla_rows.triton_rows", "run"),
        build=Build((90, 100, 120), later("mla_rows.triton_rows", "kernels")),
    ),
}


def mla_rows(
    kv_a: Tensor,
    norm_weight: Tensor,
    queries: Tensor,
    up_keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    *,
    eps: float,
    rows: Tensor,
    out: Tensor,
    backend: str,
) -> None:
    """Write latent rows at their slots, and queries against such rows.

    Parameters
    ----------
    kv_a : [M, D] bfloat16, float16, float32 or float64, last dim contiguous
    norm_weight : [C] of its dtype
    queries : [M, H, Q + R] of its dtype, last dim contiguous
        The last R dims of a head are rotated, the others absorbed.
    up_keys : [H, Q, C] of its dtype, last dim contiguous
        What makes a head's keys of a latent row.
    cos, sin : [M, R / 2] float32, float64 for float64 rows
    slots : [M] int64
        Distinct rows of `rows`, trusted.
    eps : float
        Added to the mean square.
    rows : [S, D] of kv_a's dtype, last dim contiguous
        Storage of one layer; mutated at `slots` only.
    out : [M, H, D] of kv_a's dtype, last dim contiguous
        Mutated.
    backend : str
        Name in `OPS["mla_rows"].implementations`.

    Raises
    ------
    ShapeError
        Shapes, dtypes, layouts or devices are not as above.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(
        kv_a, norm_weight, queries, up_keys, cos, sin, slots, eps=eps, rows=rows, out=out
    )
    if len(kv_a):
        run(problem)


OP: Op[MlaRowsCase] = op_of(mla_rows, _BACKENDS, pose, cases)
