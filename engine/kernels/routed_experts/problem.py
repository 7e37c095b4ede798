"""One checked call of routed experts: a choice, and experts that follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.kernels.choose_experts.problem import Problem as Choosing
from engine.kernels.choose_experts.problem import pose as pose_choice
from engine.kernels.grouped_experts.problem import Problem as Experts
from engine.kernels.grouped_experts.problem import pose as pose_experts
from engine.kernels.operands import check_tensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call; the choice and `experts.out` are there to be written."""

    choosing: Choosing
    experts: Experts
    logits_are_there: bool


def pose(
    x: Tensor,
    logits: Tensor,
    bias: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    gate_scale: Tensor | None,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    block: tuple[int, int] | None,
    top_k: int,
    scaling: float,
    is_normalised: bool,
    logits_are_there: bool,
) -> Problem:
    """Check the arguments of `routed_experts` and allocate what it writes."""
    choosing = pose_choice(
        logits,
        bias,
        top_k=top_k,
        scaling=scaling,
        is_normalised=is_normalised,
        num_groups=1,
        kept_groups=1,
    )
    experts = pose_experts(
        x,
        choosing.choice.expert_ids,
        choosing.choice.expert_weights,
        gate,
        up,
        down,
        gate_scale=gate_scale,
        up_scale=up_scale,
        down_scale=down_scale,
        block=block,
        num_splits=None,
        out=None,
        workspace=None,
    )
    check_tensor("logits", logits, (len(x), len(gate)), (logits.dtype,))
    return Problem(choosing, experts, logits_are_there)
