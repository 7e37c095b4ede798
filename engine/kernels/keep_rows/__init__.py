"""What a layer of grouped heads keeps of new context rows, stored where it is kept.

For key head k of row m at the angles (cos, sin)[m], i = m * H_kv + k::

    rows[places[i]] = [ values[m, k] ; rot(RMS(keys[m, k]) * key_norm) ]        [2 D]

`rot` turns the pairs (j, j + D / 2). Where places repeat one of the rows is stored. A kernel of our
own because it is a norm, a rotation, two changes of order and a scatter of a few kilobytes, some
launches in every layer: one launch, bound by nothing else. In float32 (float64 for float64),
rounded once.

Backends: `reference` (PyTorch), `triton` (bfloat16, float16, float32).

Source: z-lab/dflash dflash/model.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.keep_rows import cases
from engine.kernels.keep_rows.cases import KeepRowsCase
from engine.kernels.keep_rows.problem import pose
from engine.kernels.keep_rows.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OP", "KeepRowsCase", "keep_rows"]

_WHAT = "rows backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton": Backend(
        run=later("keep_rows.triton_keep", "run"),
        build=Build((90, 100, 120), later("keep_rows.triton_keep", "kernels")),
    ),
}


def keep_rows(
    keys: Tensor,
    values: Tensor,
    key_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    rows: Tensor,
    places: Tensor,
    backend: str,
) -> None:
    """Store the context rows of new positions.

    Parameters
    ----------
    keys, values : [M, H_kv, D] bfloat16, float16, float32 or float64, last dim contiguous
        D is even.
    key_norm : [D] of their dtype
    cos, sin : [M, D / 2] float32, float64 for float64 rows, last dim contiguous
    eps : float
        Added to the mean square.
    rows : [R, 2 * D] of their dtype, last dim contiguous
        Mutated.
    places : [M * H_kv] int64, contiguous
        Rows to store to, 0 .. R.
    backend : str
        Name in `OPS["keep_rows"].implementations`.

    Raises
    ------
    ShapeError
        Shapes, dtypes, layouts or devices are not as above.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(keys, values, key_norm, cos, sin, eps=eps, rows=rows, places=places)
    if len(keys):
        run(problem)


OP: Op[KeepRowsCase] = op_of(keep_rows, _BACKENDS, pose, cases)
