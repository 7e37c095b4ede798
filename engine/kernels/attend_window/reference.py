"""The definition of attend_window in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from engine.kernels.attend_window.problem import Problem


def run(problem: Problem) -> None:
    """Write what the rows see."""
    one, dtype = problem, problem.queries.dtype
    (N, heads, packed, D), S = one.queries.shape, one.block_size
    wide = torch.promote_types(dtype, torch.float32)
    seen = seen_keys(
        one.lengths,
        block_size=S,
        num_slots=one.rows.shape[2] - S,
        ring=one.ring,
        behind=one.behind,
        ahead=one.ahead,
    )
    read = one.rows.masked_fill(~seen.any(1)[:, None, :, None], 0.0)
    values, keys = read.to(wide).chunk(2, dim=-1)
    scores = one.queries.to(wide) @ keys.transpose(2, 3) * D**-0.5
    hidden = ~seen.repeat(1, packed // S, 1).unsqueeze(1)  # [N, 1, G * S, S + slots]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(dtype).to(wide)
    mixed = (weights @ values).view(N, heads, packed // S, S, D).to(dtype)
    one.out.copy_(mixed.permute(0, 3, 1, 2, 4).reshape(one.out.shape))


def seen_keys(
    lengths: Tensor, *, block_size: int, num_slots: int, ring: int, behind: int, ahead: int
) -> Tensor:
    """Return which of its own rows and of the slots each row of a block sees, [N, S, S + slots]."""
    queries = lengths.unsqueeze(1) + torch.arange(block_size, device=lengths.device)
    last = lengths.unsqueeze(1) - 1
    held = last - (last - torch.arange(num_slots, device=lengths.device)) % ring  # negative: none
    keys = torch.cat((queries, held), dim=1).unsqueeze(1)
    distance = queries.unsqueeze(2) - keys
    return (keys >= 0) & (distance < behind) & (distance > -ahead)
