"""Attention of a drafter's block over a window of context rows that lie in a ring, and over itself.

Row s of the block of sequence n stands at q = lengths[n] + s. The first S of its rows are the
block's, in order; ring slot j behind them holds the last position before lengths[n] that is j
modulo `ring`, if there is one. A row at q sees the keys at p with -ahead < q - p < behind; so for
query head g of key head k::

    out[n * S + s, k * G + g] = sum_p softmax_p(queries[n, k, g * S + s] . key_p * scale) value_p

A kernel of our own because a block's few rows make a mask, two products, a softmax and two changes
of order some six launches in every layer over a megabyte of rows: two launches, bound by their
latency, one that cuts the window over the device and one that adds the parts. Scores, softmax and
sums in float32 (float64 for float64); weights are rounded to the rows' dtype. What no row of a
block sees may be anything.

Backends: `reference` (PyTorch), `triton` (bfloat16, float16, float32; head dims up to 128).
`triton` starts reading context rows while the launch ahead of it still runs: that launch must not
write them.

Source: arXiv 2602.06036; z-lab/dflash dflash/model.py; of the cut: arXiv 2311.01282.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.attend_window import cases
from engine.kernels.attend_window.cases import AttendWindowCase
from engine.kernels.attend_window.problem import pose
from engine.kernels.attend_window.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OP", "AttendWindowCase", "attend_window"]

_WHAT = "window backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton": Backend(
        run=later("attend_window.triton_window", "run"),
        build=Build((90, 100, 120), later("attend_window.triton_window", "kernels")),
    ),
}


def attend_window(
    queries: Tensor,
    rows: Tensor,
    lengths: Tensor,
    *,
    block_size: int,
    ring: int,
    behind: int,
    ahead: int | None = None,
    backend: str,
) -> Tensor:
    """Mix what the rows of blocks see.

    Parameters
    ----------
    queries : [N, H_kv, G * S, D] bfloat16, float16, float32 or float64, last dim contiguous
        G query heads share a key head; scores are scaled by 1 / sqrt(D).
    rows : [N, H_kv, S + slots, 2 * D] of its dtype, last dim contiguous
        `[value ; key]`; the block's, then ring slots 0 .. slots.
    lengths : [N] int64, contiguous
        Positions before each block; slots that would hold them must be there.
    block_size : int
        S.
    ring : int
        At least `slots`, and at least behind - 1: nothing seen has been overwritten.
    behind : int
        At least 1: every row sees itself.
    ahead : int, optional
        At least 1. None: no bound.
    backend : str
        Name in `OPS["attend_window"].implementations`.

    Returns
    -------
    Tensor
        [N * S, H_kv * G * D], contiguous.

    Raises
    ------
    ShapeError
        Shapes, dtypes, layouts, devices or numbers are not as above.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(
        queries,
        rows,
        lengths,
        block_size=block_size,
        ring=ring,
        behind=behind,
        ahead=ahead,
    )
    if len(queries):
        run(problem)
    return problem.out


OP: Op[AttendWindowCase] = op_of(attend_window, _BACKENDS, pose, cases)
