"""Sigmoid-routed mixture of experts with a shared expert.

::

    s = sigmoid(W_gate x)                               [M, E]
    choose the K experts with the largest s + bias, inside the best groups
    y = shared(x) + scaling * sum_k s_k / sum(s) * expert_k(x)

The bias steers the choice only and never a weight (`noaux_tc`). Who is chosen is `choose_experts`'
business, what they make of their rows `grouped_experts`'.
Source: arXiv 2412.19437 section 2.1.2.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.config import TargetConfig
from engine.kernels import Choice, choose_experts, grouped_experts
from engine.layers import SwiGlu, accumulation_dtype, linear_accumulated
from engine.quantized import Fp8BlockWeight, Int4GroupWeight, Weight


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses K of E experts for each row."""

    config: TargetConfig
    weight: Tensor  # [E, hidden]
    e_score_correction_bias: Tensor  # [E], accumulation dtype

    def __call__(self, x: Tensor, *, backend: str = "reference") -> Choice:
        """Route the rows of `x` [M, hidden]; `backend` is that of `choose_experts`."""
        config, dtype = self.config, accumulation_dtype(x.dtype)
        return choose_experts(
            linear_accumulated(x, self.weight),
            self.e_score_correction_bias.to(dtype),
            top_k=config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
            is_normalised=config.norm_topk_prob,
            num_groups=config.n_group,
            kept_groups=config.topk_group,
            backend=backend,
        )


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts, their projections stacked over E, beside a shared one."""

    router: Router
    gate_proj: Weight  # [E, I, hidden]
    up_proj: Weight  # [E, I, hidden]
    down_proj: Weight  # [E, hidden, I]
    shared: SwiGlu | None

    def __call__(self, x: Tensor, *, backend: str = "reference") -> Tensor:
        """Map `x` [M, hidden] to the same shape; `backend` is that of choice and experts."""
        routing = self.router(x, backend=backend)
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
