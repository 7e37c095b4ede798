"""One checked call of likeliest_tokens, with room for what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What the trees of N sequences are built from, best first."""

    log_probs: Tensor  # [N, horizon, K] float32, descending; -inf = banned
    token_ids: Tensor  # [N, horizon, K] int64


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call, checked; `candidates` is there to be written."""

    logits: Tensor  # [N, horizon, V]
    candidates: Candidates

    @property
    def width(self) -> int:
        """Tokens that are found in each row, K, at most V."""
        return self.candidates.token_ids.shape[-1]

    @property
    def num_rows(self) -> int:
        """Depths of all sequences, N * horizon."""
        return self.logits.shape[0] * self.logits.shape[1]


def pose(draft_logits: Tensor, *, width: int) -> Problem:
    """Check the arguments of `likeliest_tokens` and allocate what it gives."""
    if draft_logits.ndim != 3 or draft_logits.dtype != torch.float32:
        raise ShapeError(
            f"draft_logits: expected [N, horizon, V] float32, got {list(draft_logits.shape)} "
            f"{draft_logits.dtype} (nothing is cast, rounding decides ties)"
        )
    if width < 1:
        raise ShapeError(f"width: expected at least 1, got {width} (tokens of each depth)")
    shape = (*draft_logits.shape[:2], min(width, draft_logits.shape[2]))
    token_ids = torch.empty(shape, dtype=torch.int64, device=draft_logits.device)
    log_probs = torch.empty(shape, dtype=torch.float32, device=draft_logits.device)
    return Problem(draft_logits, Candidates(log_probs, token_ids))
