"""What routed_experts is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.kernels.grouped_experts.cases import INT4, PLAIN, GroupedExpertsCase, tolerance
from engine.kernels.grouped_experts.cases import cost as experts_cost
from engine.kernels.grouped_experts.cases import expert_ids as chosen_ids
from engine.kernels.grouped_experts.cases import inputs as experts_inputs
from engine.kernels.op import Case, Cost

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CASES", "PRODUCTION", "RoutedExpertsCase", "cost", "inputs", "tolerance"]

CHOSEN_LOGIT = 3.0  # above which those of the chosen experts lie


@dataclass(frozen=True, slots=True)
class RoutedExpertsCase(Case):
    """Sizes of one call."""

    num_rows: int  # M
    num_experts: int = 8  # E
    top_k: int = 2  # K
    hidden: int = 64
    inner: int = 32  # I
    stored: str = PLAIN
    scaling: float = 2.5
    is_normalised: bool = True
    logits_gap: int = 0  # numbers behind every row of the logits: a view
    is_one_expert: bool = False  # the weights of one expert stand for all: memory of one
    seed: int = 0

    @property
    def experts(self) -> GroupedExpertsCase:
        """Return what is known of the experts, the choice among them."""
        return GroupedExpertsCase(
            self.name,
            self.reason,
            self.num_rows,
            self.num_experts,
            self.top_k,
            self.hidden,
            self.inner,
            self.stored,
            is_one_expert=self.is_one_expert,
            seed=self.seed,
        )


def inputs(
    case: RoutedExpertsCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `routed_experts`, without the backend, from the case's seed.

    The logits choose what the case of the experts says; those it leaves idle are NaN, as is the
    gap behind a row of the logits.
    """
    generator = torch.Generator().manual_seed(case.seed)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    operands = experts_inputs(case.experts, device=device, dtype=dtype)
    del operands["expert_ids"], operands["expert_weights"]
    M, E = case.num_rows, case.num_experts
    logits = torch.full((M, E + case.logits_gap), torch.nan)
    ids = chosen_ids(case.experts)
    own = logits[:, :E].copy_(normal(M, E).clamp(-2.0, 2.0))
    own.scatter_(1, ids, CHOSEN_LOGIT + normal(*ids.shape).abs())
    return operands | {
        "logits": logits.to(device, wide)[:, :E],
        "bias": (normal(E).clamp(-2.0, 2.0) * 0.02).to(device, wide),
        "top_k": case.top_k,
        "scaling": case.scaling,
        "is_normalised": case.is_normalised,
    }


def cost(case: RoutedExpertsCase, *, itemsize: int = 2) -> Cost:
    """Bytes and FLOP of a call: those of the experts, logits and bias."""
    experts = experts_cost(case.experts, itemsize=itemsize)
    logits = max(itemsize, 4) * (case.num_rows + 1) * case.num_experts
    return Cost(bytes=experts.bytes + logits, flops=experts.flops)


CASES: tuple[RoutedExpertsCase, ...] = (
    RoutedExpertsCase("one-row", "smallest legal call: one row, one choice", 1, 1, 1),
    RoutedExpertsCase("plain", "experts that are not packed", 5),
    RoutedExpertsCase("scores", "weights are scores", 4, is_normalised=False, scaling=1.0),
    RoutedExpertsCase("packed", "more rows than warps, experts no lane divides", 9, 40, 3, 256, 256,
                      INT4),
    RoutedExpertsCase("strided", "logits of a wider product", 17, 13, 4, 512, 256, INT4,
                      logits_gap=32),
    RoutedExpertsCase("packed-scores", "weights are scores", 2, 64, 8, 256, 256, INT4,
                      is_normalised=False),
)  # fmt: skip

# Kimi K2.6: one of eight tensor-parallel ranks.
PRODUCTION: tuple[RoutedExpertsCase, ...] = tuple(
    RoutedExpertsCase(
        f"rank-{rows}", "a shape that is served", rows, 384, 8, 7168, 256, INT4, 2.827,
        is_one_expert=True,
    )
    for rows in (1, 9, 17)
)  # fmt: skip
