"""The definition of greedy_tokens in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.kernels.operands import NO_TOKEN

if TYPE_CHECKING:
    from engine.kernels.greedy_tokens.problem import Problem


def run(problem: Problem) -> None:
    """Write tokens and log-probs."""
    best = problem.logits.max(-1)  # the first of equal maxima, NaN before all
    is_sound = best.values.isfinite()
    problem.greedy.tokens.copy_(best.indices.masked_fill(~is_sound, NO_TOKEN))
    torch.sub(best.values, problem.logits.logsumexp(-1), out=problem.greedy.log_probs)
