"""The likeliest token of each row of logits, and how likely it is.

For row m::

    tokens[m]    = the lowest id among the largest of logits[m]
    log_probs[m] = its logit - logsumexp(logits[m])

A row with NaN or +inf, or of nothing but -inf, is no distribution: it has `NO_TOKEN`, and no other
row has less for it.

A kernel of our own because it is some twenty launches after every pass of a target: two launches,
bound by their latency. The first takes the parts of the vocabulary, the second puts them together.

Backends: `reference` (PyTorch), `triton`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.greedy_tokens import cases
from engine.kernels.greedy_tokens.cases import GreedyTokensCase
from engine.kernels.greedy_tokens.problem import Greedy, pose
from engine.kernels.greedy_tokens.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OP", "Greedy", "GreedyTokensCase", "greedy_tokens"]

_WHAT = "greedy backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton": Backend(
        run=later("greedy_tokens.triton_greedy", "run"),
        build=Build((90, 100, 120), later("greedy_tokens.triton_greedy", "kernels")),
    ),
}


def greedy_tokens(logits: Tensor, *, backend: str) -> Greedy:
    """Choose the likeliest token of every row. Nothing is read back to the host.

    Parameters
    ----------
    logits : [M, V] float32, last dim contiguous
    backend : str
        Name in `OPS["greedy_tokens"].implementations`.

    Returns
    -------
    Greedy
        Log-probs mean nothing where the token is `NO_TOKEN`.

    Raises
    ------
    ShapeError
        The logits have another shape, dtype or layout.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(logits)
    if len(logits):
        run(problem)
    return problem.greedy


OP: Op[GreedyTokensCase] = op_of(greedy_tokens, _BACKENDS, pose, cases)
