"""The definition of likeliest_tokens in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.kernels.operands import NO_TOKEN

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.likeliest_tokens.problem import Problem


def run(problem: Problem) -> None:
    """Write ids and log-probs."""
    logits, found = problem.logits, problem.candidates
    token_ids = top_tokens(logits, problem.width)
    chosen = logits.gather(-1, token_ids)
    # `logsumexp`, whose maximum is known. A row with nothing but -inf must not give NaN.
    least = torch.finfo(torch.float32).min
    most = chosen[..., :1].clamp(min=least)
    total = (logits - most).exp_().sum(-1, keepdim=True).log_().add_(most)
    is_sound = (total < torch.inf).all()  # false for NaN as well
    torch.sub(chosen, total.clamp_(min=least), out=found.log_probs)
    found.token_ids.copy_(torch.where(is_sound, token_ids, NO_TOKEN))


def top_tokens(logits: Tensor, width: int) -> Tensor:
    """Return the ids of the `width` largest logits of each row, lower ids first where equal.

    `torch.topk` promises no order, and no choice at its edge, among equal values. So the logit
    becomes an integer of the same order, and its token id, counted down, the digits below it.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    counted_down = torch.arange(0, -logits.shape[-1], -1, device=logits.device)
    return torch.add(counted_down, ordered, alpha=1 << 32).topk(width, dim=-1).indices
