"""The definition of choose_experts in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.kernels.choose_experts.problem import GROUP_SCORE_EXPERTS, SCORE_SUM_EPS

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.choose_experts.problem import Problem


def run(problem: Problem) -> None:
    """Write the choice."""
    scores = problem.logits.sigmoid()  # [M, E]
    priority = _of_kept_groups(problem, scores + problem.bias)  # [M, E]
    ids = priority.topk(problem.top_k, dim=-1).indices  # [M, K]
    weights = scores.gather(1, ids)  # [M, K]
    if problem.is_normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SCORE_SUM_EPS)
    problem.choice.expert_ids.copy_(ids)
    problem.choice.expert_weights.copy_(weights * problem.scaling)


def _of_kept_groups(problem: Problem, priority: Tensor) -> Tensor:
    """Return the priorities [M, E] with -inf outside the best groups."""
    if problem.kept_groups == problem.num_groups:
        return priority
    grouped = priority.reshape(len(priority), problem.num_groups, -1)  # [M, groups, E / groups]
    best = grouped.topk(GROUP_SCORE_EXPERTS, dim=-1).values.sum(dim=-1)  # [M, groups]
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(problem.kept_groups, dim=-1).indices, value=True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
