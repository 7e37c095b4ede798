"""The likeliest tokens of each depth of a draft, and how likely they are.

For row r of draft logits, of N sequences and `horizon` depths::

    token_ids[r] = the K tokens with the largest logits, best first, equals by ascending id
    log_probs[r] = their logits - logsumexp(logits[r])

Where any logit of any row is NaN or +inf, which no draft may be, every id is `NO_TOKEN`.

A kernel of our own because PyTorch's top-k leaves ties to chance, and order by integers of 64 bits
takes it some fifty launches: two launches, bound by their latency. The first finds the best of each
part of the vocabulary, the second those of all parts.

Backends: `reference` (PyTorch), `triton`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.likeliest_tokens import cases
from engine.kernels.likeliest_tokens.cases import LikeliestTokensCase
from engine.kernels.likeliest_tokens.problem import Candidates, pose
from engine.kernels.likeliest_tokens.reference import run as _run_reference
from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, later, op_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OP", "Candidates", "LikeliestTokensCase", "likeliest_tokens"]

_WHAT = "candidates backend"  # as refusals call it
_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton": Backend(
        run=later("likeliest_tokens.triton_likeliest", "run"),
        build=Build((90, 100, 120), later("likeliest_tokens.triton_likeliest", "kernels")),
    ),
}


def likeliest_tokens(draft_logits: Tensor, *, width: int, backend: str) -> Candidates:
    """Find the `width` likeliest tokens of each depth, or all V of them. Nothing is read back.

    Parameters
    ----------
    draft_logits : [N, horizon, V] float32
        -inf bans a token. `triton` wants the last dim contiguous.
    width : int
        At least 1.
    backend : str
        Name in `OPS["likeliest_tokens"].implementations`.

    Returns
    -------
    Candidates
        Log-probs mean nothing where the ids are `NO_TOKEN`.

    Raises
    ------
    ShapeError
        The logits have another shape or dtype, or nothing is to be found.
    BackendError
        The backend is unknown or cannot run here.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(draft_logits, width=width)
    if draft_logits.numel():
        run(problem)
    return problem.candidates


OP: Op[LikeliestTokensCase] = op_of(likeliest_tokens, _BACKENDS, pose, cases)
