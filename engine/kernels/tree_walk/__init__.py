"""The walk: from the root of each draft tree along what the target says, while it is in the tree.

For sequence n, with t the target's tokens and node 0 the root::

    path   = 0, then again and again the child of the last node whose token is t of that node
    tokens = t along the path: the accepted tokens, and last the bonus token

A kernel of our own because on the host the walk is a wait for the device before the commit, and
with PyTorch's operations it is a launch for every depth. One launch, bound by its latency; what a
commit has to move comes with it.

Backends: `reference` (PyTorch, reads back from a device), `cuda` (CUDA C++, needs the extra
`cuda`; nothing is read back).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of
from engine.kernels.tree_walk import cases
from engine.kernels.tree_walk.cases import WalkTreeCase
from engine.kernels.tree_walk.problem import NO_TOKEN, NO_WALK, Walk, pose
from engine.kernels.tree_walk.reference import run as _run_reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NO_TOKEN", "NO_WALK", "OP", "Walk", "WalkTreeCase", "walk_tree"]

_WHAT = "walk backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "cuda": Backend(
        run=later("tree_walk.cuda_walk", "run"),
        build=Build((90, 100, 120), later("tree_walk.cuda_walk", "kernels")),
    ),
}


def walk_tree(
    target_tokens: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    tree_sizes: Tensor,
    slots: Tensor,
    *,
    width: int,
    backend: str,
) -> Walk:
    """Walk every tree; say what is accepted and which rows a commit moves.

    Parameters
    ----------
    target_tokens : [N, T] int64, last dim contiguous
        What the target says after each node, negative where it says nothing.
    token_ids : [N, T] int64, contiguous
    parents : [N, T] int32, contiguous
        Of a node in 0..T - 1, trusted.
    tree_sizes : [N] int32
        Rows of each tree; what lies behind them is not looked at.
    slots : [N, T] int64, contiguous
        Where the row of each node is.
    width : int
        Most nodes of a path, the root included; 1..T. Deeper nodes are not walked to.
    backend : str
        Name in `OPS["walk_tree"].implementations`.

    Returns
    -------
    Walk
        Behind the end of its path a row names itself, so that a commit of `width` rows leaves it
        where it is. Where a node of the tree has no token of the target, or a size is not in 1..T,
        there is no walk: nothing is kept but the root, and `num_accepted` is `NO_WALK`.

    Raises
    ------
    ShapeError
        Shapes, dtypes, layouts or devices are not as above.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(target_tokens, token_ids, parents, tree_sizes, slots, width=width)
    if len(target_tokens):
        run(problem)
    return problem.walk


OP: Op[WalkTreeCase] = op_of(walk_tree, _BACKENDS, pose, cases)
