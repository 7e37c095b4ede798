"""One checked call of greedy_tokens, with room for what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.kernels.operands import check_tensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Greedy:
    """The likeliest token of each of M rows."""

    tokens: Tensor  # [M] int64
    log_probs: Tensor  # [M] float32


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call, checked; `greedy` is there to be written."""

    logits: Tensor  # [M, V]
    greedy: Greedy


def pose(logits: Tensor) -> Problem:
    """Check the arguments of `greedy_tokens` and allocate what it gives."""
    check_tensor("logits", logits, (None, None), (torch.float32,))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    return Problem(logits, Greedy(tokens, log_probs))
