"""Draft trees: the heaviest prefixes under a node budget, from the sorted candidates of each depth.

For sequence n, depth d = 1 .. horizon and rank r, with lp the candidates' log-probs::

    weight(r_1 .. r_d) = Σ lp[n, i - 1, r_i]     in float64, summed in the order of the search
    nodes              = the `node_budget` heaviest prefixes, heaviest first
    ties               = by (r_1 .. r_d), lexicographic, a prefix first

A kernel of our own because a heap on the host is a wait for the device in the middle of a step and
a millisecond of Python; on the device the step goes on with the tree where it is needed. It reads
and writes a few kilobytes and is bound by the latency of one choice after the other.

The trees come as a verify pass wants them: positions, ancestor words, and each filled up to
`num_rows` rows with children of its root that carry its own token and that nobody walks to.
`reference` is the order of Python's heap, `cuda` has it bit for bit.

Backends: `reference` (PyTorch, reads back from a device), `cuda` (CUDA C++, needs the extra
`cuda`; nothing is read back).

Source: arXiv 2604.12989; liranringel/ddtree ddtree.py (c96427a).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.kernels.draft_tree import cases
from engine.kernels.draft_tree.cases import DraftTreeCase
from engine.kernels.draft_tree.problem import NO_TREE, WORD_BITS, Problem, Trees, new_trees, pose
from engine.kernels.draft_tree.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NO_TREE", "OP", "WORD_BITS", "DraftTreeCase", "Trees", "draft_tree", "new_trees"]

_WHAT = "tree backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "cuda": Backend(
        run=later("draft_tree.cuda_tree", "run"),
        build=Build((90, 100, 120), later("draft_tree.cuda_tree", "kernels")),
    ),
}


def draft_tree(
    log_probs: Tensor,
    token_ids: Tensor,
    root_tokens: Tensor,
    root_positions: Tensor,
    *,
    node_budget: int,
    num_rows: int | None = None,
    backend: str,
    out: Trees | None = None,
) -> Trees:
    """Build one draft tree for each sequence.

    Parameters
    ----------
    log_probs : [N, horizon, K] float32, last dim contiguous
        Descending in each row, trusted. -inf is never chosen.
    token_ids : [N, horizon, K] int64, last dim contiguous
        The candidates' tokens, distinct within a row, trusted.
    root_tokens, root_positions : [N] int64
    node_budget : int
        Most nodes of a tree, root excluded, 0..`MAX_NODE_BUDGET`. Of each row only so many
        candidates are looked at.
    num_rows : int, optional
        T, more than the budget; by default the root and as many nodes as it allows.
    backend : str
        Name in `OPS["draft_tree"].implementations`.
    out : Trees, optional
        Written (mutated) and returned; contiguous; allocated if absent.

    Returns
    -------
    Trees
        Where a candidate that is looked at is NaN, +inf or no token (negative), there is no
        distribution: the tree is its root alone and its size `NO_TREE`.

    Raises
    ------
    BudgetError
        The budget is negative or beyond the limit.
    ShapeError
        Shapes, dtypes, layouts or devices are not as above.
    BackendError
        The backend is unknown, cannot run here, or has no room for such a tree.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(
        log_probs,
        token_ids,
        root_tokens,
        root_positions,
        node_budget=node_budget,
        num_rows=num_rows,
        out=out,
    )
    if len(log_probs):
        run(problem)
    return problem.trees


def _problem(**arguments: Any) -> Problem:
    """Check the arguments of a call of which the optional ones may be left out."""
    return pose(**({"num_rows": None, "out": None} | arguments))


OP: Op[DraftTreeCase] = op_of(draft_tree, _BACKENDS, _problem, cases)
