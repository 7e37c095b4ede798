"""Sigmoid-routed mixture of experts with a shared expert.

::

    s = sigmoid(W_gate x)                               [M, E]
    choose the K experts with the largest s + bias, inside the best groups
    y = shared(x) + scaling * sum_k s_k / sum(s) * expert_k(x)

The bias steers the choice only and never a weight (`noaux_tc`). Who is chosen is `choose_experts`'
business, what they make of their rows `grouped_experts`'.
Source: arXiv 2412.19437 section 2.1.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor

from engine.config import TargetConfig
from engine.device import Aside
from engine.kernels import Choice, choose_experts, grouped_experts, skinny_linear
from engine.layers import SwiGlu, accumulation_dtype, joined
from engine.quantized import Fp8BlockWeight, Int4GroupWeight, Weight

_CHOSEN: ContextVar[list[Tensor] | None] = ContextVar("chosen", default=None)
CHOOSERS = {"cuda": "triton"}  # who chooses beside experts of a backend, where names differ


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses K of E experts for each row."""

    config: TargetConfig
    weight: Tensor  # [E, hidden]
    e_score_correction_bias: Tensor  # [E], accumulation dtype

    def __call__(self, x: Tensor, *, backend: str = "reference") -> Choice:
        """Route the rows of `x` [M, hidden]; `backend` is that of `choose_experts`."""
        dtype = accumulation_dtype(x.dtype)
        logits = skinny_linear(x, self.weight, out_dtype=dtype, backend="reference")
        return self.choose(logits, backend=backend)

    def choose(self, logits: Tensor, *, backend: str) -> Choice:
        """Route rows by their logits [M, E], of the accumulation dtype."""
        config = self.config
        choice = choose_experts(
            logits,
            self.e_score_correction_bias.to(logits.dtype),
            top_k=config.num_experts_per_tok,
            scaling=config.routed_scaling_factor,
            is_normalised=config.norm_topk_prob,
            num_groups=config.n_group,
            kept_groups=config.topk_group,
            backend=CHOOSERS.get(backend, backend),
        )
        if (chosen := _CHOSEN.get()) is not None:
            chosen.append(choice.expert_ids)
        return choice


@contextmanager
def chosen_experts() -> Iterator[list[Tensor]]:
    """Gather what rows choose inside the block: [M, K] int of each layer, -1 for none, in order.

    A pass that is replayed chooses without being asked: it must run launch by launch.
    """
    chosen: list[Tensor] = []
    token = _CHOSEN.set(chosen)
    try:
        yield chosen
    finally:
        _CHOSEN.reset(token)


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts, their projections stacked over E, beside a shared one."""

    router: Router
    gate_proj: Weight  # [E, I, hidden]
    up_proj: Weight  # [E, I, hidden]
    down_proj: Weight  # [E, hidden, I]
    shared: SwiGlu | None

    def __call__(
        self, x: Tensor, *, backend: str = "reference", linear_backend: str = "reference"
    ) -> Tensor:
        """Map `x` [M, hidden] to the same shape, see `parts`."""
        return reduce(add, self.parts(x, backend=backend, linear_backend=linear_backend))

    def parts(self, x: Tensor, *, backend: str, linear_backend: str) -> tuple[Tensor, ...]:
        """Return what routed experts, and the shared one, make of `x` [M, hidden]: to be summed.

        `backend` is that of the experts, `linear_backend` that of the other products.
        """
        shared = self.shared
        if shared is None:
            return (self._routed(x, self.router(x, backend=backend), backend),)
        # The products with x are one where their weights lie behind each other.
        whole = joined(self.router.weight, shared.gate_proj, shared.up_proj)
        if whole is None:
            routed = self._routed(x, self.router(x, backend=backend), backend)
            return routed, shared(x, backend=linear_backend)
        dtype = accumulation_dtype(x.dtype)
        wide = skinny_linear(x, whole, out_dtype=dtype, backend=linear_backend)
        logits, gated = wide.tensor_split([len(self.router.weight)], dim=-1)
        with Aside(x.device, only_captured=True) as aside:  # short kernels follow, on few SMs
            beside = shared.down(gated, x.dtype, backend=linear_backend)
        routed = self._routed(x, self.router.choose(logits, backend=backend), backend)
        aside.join()
        return routed, beside

    def _routed(self, x: Tensor, routing: Choice, backend: str) -> Tensor:
        return grouped_experts(
            x,
            routing.expert_ids,
            routing.expert_weights,
            **self.stored_experts(),
            backend=backend,
        )

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
