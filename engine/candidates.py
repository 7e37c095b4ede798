"""The likeliest tokens of each depth, by the drafter's logits: found on the device, read back once.

Which these are is `likeliest_tokens`' matter. Whatever the number of sequences there is one copy to
the host, and with it the one wait of a tree's building; where trees are built on the device too,
whoever reads something back of what candidates led to says what `check_candidates` found.
"""

import torch
from torch import Tensor

from engine.errors import ShapeError
from engine.kernels import Candidates, likeliest_tokens
from engine.kernels.operands import NO_TOKEN


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
    found = likeliest_tokens(draft_logits, width=width, backend="reference")
    log_prob_bits = found.log_probs.view(torch.int32).long()
    log_prob_bits, token_ids = torch.stack((log_prob_bits, found.token_ids)).cpu()
    check_candidates(not token_ids.numel() or int(token_ids.min()) != NO_TOKEN)
    return Candidates(log_prob_bits.int().view(torch.float32), token_ids)


def check_candidates(are_sound: bool) -> None:
    """Refuse, once it is known on the host, logits that are no distribution: `ShapeError`."""
    if not are_sound:
        raise ShapeError("draft_logits: expected no NaN and no +inf, got some (no distribution)")
