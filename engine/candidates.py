"""The likeliest tokens of each depth, by the drafter's logits: found on the device, read back once.

Within a depth the order is descending logit, equal logits by ascending token id. Whatever the
number of sequences there is one copy to the host, and with it the one wait of a tree's building;
or none, where trees are built on the device too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ShapeError

NO_TOKEN = -1  # in place of every candidate where the logits are no distribution


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What the trees of N sequences are built from."""

    log_probs: Tensor  # [N, horizon, K] float32, descending; -inf = banned
    token_ids: Tensor  # [N, horizon, K] int64


def top_candidates(draft_logits: Tensor, width: int) -> Candidates:
    """Return the `width` likeliest tokens of each depth, or all V of them, on the host.

    Parameters
    ----------
    draft_logits : [N, horizon, V] float32
        -inf bans a token.
    width : int
        At least 1.

    Raises
    ------
    ShapeError
        The logits have another shape or dtype, or hold NaN or +inf.
    """
    found = likeliest(draft_logits, width)
    log_prob_bits = found.log_probs.view(torch.int32).long()
    log_prob_bits, token_ids = torch.stack((log_prob_bits, found.token_ids)).cpu()
    check_candidates(not token_ids.numel() or int(token_ids.min()) != NO_TOKEN)
    return Candidates(log_prob_bits.int().view(torch.float32), token_ids)


def likeliest(draft_logits: Tensor, width: int) -> Candidates:
    """Return the same where the logits are, without a wait.

    If any of them is NaN or +inf, every candidate is `NO_TOKEN`: whoever reads something back of
    what they led to says so with `check_candidates`.
    """
    if draft_logits.ndim != 3 or draft_logits.dtype != torch.float32:
        raise ShapeError(
            f"draft_logits: expected [N, horizon, V] float32, got {list(draft_logits.shape)} "
            f"{draft_logits.dtype} (nothing is cast, rounding decides ties)"
        )
    token_ids = top_tokens(draft_logits, min(width, draft_logits.shape[-1]))
    chosen = draft_logits.gather(-1, token_ids)
    # `logsumexp`, whose maximum is known. A row with nothing but -inf must not give NaN.
    least = torch.finfo(torch.float32).min
    most = chosen[..., :1].clamp(min=least)
    total = (draft_logits - most).exp_().sum(-1, keepdim=True).log_().add_(most)
    is_sound = (total < torch.inf).all()  # false for NaN as well
    log_probs = chosen - total.clamp_(min=least)
    return Candidates(log_probs, torch.where(is_sound, token_ids, NO_TOKEN))


def check_candidates(are_sound: bool) -> None:
    """Refuse, once it is known on the host, logits that are no distribution: `ShapeError`."""
    if not are_sound:
        raise ShapeError("draft_logits: expected no NaN and no +inf, got some (no distribution)")


def top_tokens(logits: Tensor, width: int) -> Tensor:
    """Return the ids of the `width` largest logits of each row, lower ids first where equal.

    `torch.topk` promises no order, and no choice at its edge, among equal values. So the logit
    becomes an integer of the same order, and its token id, counted down, the digits below it.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    counted_down = torch.arange(0, -logits.shape[-1], -1, device=logits.device)
    return torch.add(counted_down, ordered, alpha=1 << 32).topk(width, dim=-1).indices
