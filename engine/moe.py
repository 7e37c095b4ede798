"""Sigmoid-routed mixture of experts with a shared expert.

::

    s = sigmoid(W_gate x)                               [M, E]
    choose the K experts with the largest s + bias, inside the best groups
    y = shared(x) + scaling * sum_k s_k / sum(s) * expert_k(x)

The bias steers the choice only and never a weight (`noaux_tc`). What the chosen experts make of
their rows is `grouped_experts`' business.
Source: arXiv 2412.19437 section 2.1.2.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import TargetConfig
from engine.kernels import grouped_experts
from engine.layers import SwiGlu, accumulation_dtype
from engine.quantized import Fp8BlockWeight, Int4GroupWeight, Weight

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

    def __call__(self, x: Tensor, *, backend: str = "reference") -> Tensor:
        """Map `x` [M, hidden] to the same shape; `backend` is that of `grouped_experts`."""
        routing = self.router(x)
        routed = grouped_experts(
            x,
            routing.expert_ids,
            routing.expert_weights,
            **self.stored_experts(),
            backend=backend,
        )
        return routed if self.shared is None else routed + self.shared(x)

    def stored_experts(self) -> dict[str, Any]:
        """Return the routed experts as arguments of `grouped_experts`."""
        gate, up, down = map(stored, (self.gate_proj, self.up_proj, self.down_proj))
        return {
            "gate": gate.values,
            "up": up.values,
            "down": down.values,
            "gate_scale": gate.scale,
            "up_scale": up.scale,
            "down_scale": down.scale,
            "block": gate.block,
        }


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight in the words of `grouped_experts`."""

    values: Tensor
    scale: Tensor | None = None
    block: tuple[int, int] | None = None  # of fp8; int4 says it by the shape of its scales


def stored(weight: Weight) -> StoredWeight:
    """Return the tensors a weight is kept in."""
    if isinstance(weight, Fp8BlockWeight):
        return StoredWeight(weight.values, weight.scale_inv, weight.block)
    if isinstance(weight, Int4GroupWeight):
        return StoredWeight(weight.packed, weight.scale)
    return StoredWeight(weight)
