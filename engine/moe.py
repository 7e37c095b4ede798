"""Sigmoid-routed mixture of experts with a shared expert.

::

    s = sigmoid(W_gate x)                               [M, E]
    choose the K experts with the largest s + bias, inside the best groups
    y = shared(x) + scaling * sum_k s_k / sum(s) * expert_k(x)

The bias steers the choice only and never a weight (`noaux_tc`). Rows are gathered expert by
expert, so each expert that is hit is read once; which experts are hit is read back to the host.
Source: arXiv 2412.19437 section 2.1.2.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import TargetConfig
from engine.layers import SwiGlu, accumulation_dtype
from engine.quantized import Weight

GROUP_SCORE_EXPERTS = 2  # a group's score is the sum of its best two
SCORE_SUM_EPS = 1e-20  # of the published model code: all chosen scores may vanish


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each of M rows goes to, best first, and with which weight."""

    expert_ids: Tensor  # [M, K] int64
    expert_weights: Tensor  # [M, K] accumulation dtype


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses K of E experts for each row."""

    config: TargetConfig
    weight: Tensor  # [E, hidden]
    e_score_correction_bias: Tensor  # [E], accumulation dtype

    def __call__(self, x: Tensor) -> Routing:
        """Route the rows of `x` [M, hidden]."""
        dtype = accumulation_dtype(x.dtype)
        scores = functional.linear(x.to(dtype), self.weight.to(dtype)).sigmoid()
        expert_ids = self._choose(scores + self.e_score_correction_bias.to(dtype))
        weights = scores.gather(1, expert_ids)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + SCORE_SUM_EPS)
        return Routing(expert_ids, weights * self.config.routed_scaling_factor)

    def _choose(self, priority: Tensor) -> Tensor:
        """Return the best K experts of the kept groups, [M, K]."""
        config = self.config
        if config.topk_group < config.n_group:
            grouped = priority.view(-1, config.n_group, config.experts_per_group)
            best = grouped.topk(GROUP_SCORE_EXPERTS, dim=-1).values.sum(dim=-1)  # [M, groups]
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept.scatter_(1, best.topk(config.topk_group, dim=-1).indices, value=True)
            priority = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
        return priority.topk(config.num_experts_per_tok, dim=-1).indices


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts, their projections stacked over E, beside a shared one."""

    router: Router
    gate_proj: Weight  # [E, I, hidden]
    up_proj: Weight  # [E, I, hidden]
    down_proj: Weight  # [E, hidden, I]
    shared: SwiGlu | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map `x` [M, hidden] to the same shape; on CUDA this reads the expert counts back."""
        routing = self.router(x)
        routed = self._experts(x, routing)
        return routed if self.shared is None else routed + self.shared(x)

    def _experts(self, x: Tensor, routing: Routing) -> Tensor:
        """Sum the chosen experts of every row, visiting each expert that is hit once."""
        num_experts, top_k = self.gate_proj.shape[0], routing.expert_ids.shape[1]
        order = routing.expert_ids.flatten().argsort(stable=True)  # [M * K], grouped by expert
        rows = order // top_k
        weights = routing.expert_weights.flatten()[order].unsqueeze(1)
        ends = routing.expert_ids.flatten().bincount(minlength=num_experts).cumsum(0).tolist()
        out = torch.zeros_like(x, dtype=weights.dtype)
        for expert, (start, end) in enumerate(pairwise([0, *ends])):
            if start == end:
                continue
            mlp = SwiGlu(self.gate_proj[expert], self.up_proj[expert], self.down_proj[expert])
            chosen = rows[start:end]  # distinct: a row chooses an expert at most once
            out.index_add_(0, chosen, mlp(x[chosen]) * weights[start:end])
        return out.to(x.dtype)
