"""One checked call of choose_experts, with room for what it chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.errors import ShapeError
from engine.kernels.operands import check_device, check_tensor

if TYPE_CHECKING:
    from torch import Tensor

SCORE_SUM_EPS = 1e-20  # of the published model code: all chosen scores may vanish
GROUP_SCORE_EXPERTS = 2  # a group's score is the sum of its best two


@dataclass(frozen=True, slots=True)
class Choice:
    """Which experts each of M rows goes to, best first, and with which weight."""

    expert_ids: Tensor  # [M, K] int64
    expert_weights: Tensor  # [M, K], dtype of the logits


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call, checked; `choice` is there to be written."""

    logits: Tensor  # [M, E]
    bias: Tensor  # [E]
    top_k: int
    scaling: float
    is_normalised: bool
    num_groups: int
    kept_groups: int
    choice: Choice

    @property
    def num_experts(self) -> int:
        """Experts there are to choose from, E."""
        return self.logits.shape[1]


def pose(
    logits: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    scaling: float,
    is_normalised: bool,
    num_groups: int,
    kept_groups: int,
) -> Problem:
    """Check the arguments of `choose_experts` and allocate what it gives."""
    check_tensor("logits", logits, (None, None), (torch.float32, torch.float64))
    M, E = logits.shape
    check_tensor("bias", bias, (E,), (logits.dtype,))
    check_device(logits.device, (bias,))
    if num_groups < 1 or E % num_groups or not 1 <= kept_groups <= num_groups:
        raise ShapeError(
            f"num_groups, kept_groups: expected a divisor of {E} and at most it, got {num_groups} "
            f"and {kept_groups} (groups are of equal size)"
        )
    size = E // num_groups
    if not 1 <= top_k <= kept_groups * size:
        raise ShapeError(
            f"top_k: expected 1..{kept_groups * size}, got {top_k} (experts of kept groups)"
        )
    if kept_groups < num_groups and size < GROUP_SCORE_EXPERTS:
        raise ShapeError(f"num_groups: expected groups of 2 experts or more, got {size}")
    ids = torch.empty(M, top_k, dtype=torch.int64, device=logits.device)
    choice = Choice(ids, torch.empty(M, top_k, dtype=logits.dtype, device=logits.device))
    return Problem(logits, bias, top_k, scaling, is_normalised, num_groups, kept_groups, choice)
