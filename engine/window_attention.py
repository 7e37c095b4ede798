"""Attention of those drafter layers whose rows see a window, where a mask says who sees whom.

`MaskedAttention` leaves all of it to PyTorch, whose kernels with a mask divide work by queries
alone: one key head of a block is one or two programs that walk the window, whatever the device.
`SpreadAttention` is products of whole windows instead, which a matrix library spreads over the
device: scores and softmax in float32 (float64 for float64), weights rounded to the rows' dtype.
What both launch depends on shapes alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.context_rows import ContextRows, Sight
from engine.layers import accumulation_dtype

ALIGNMENT = 16  # numbers from row to row of what kernels of attention and products read as it is


def block_mask(sight: Sight, positions: Tensor, num_slots: int) -> Tensor:
    """Return which of its own rows and of the first `num_slots` context slots a block row sees.

    Parameters
    ----------
    sight : Sight
    positions : [N, S] int64
        Of the block's rows.
    num_slots : int
        At least those that hold rows.

    Returns
    -------
    Tensor
        [N, S, S + slots] bool, the block's own rows first.
    """
    held = sight.held(positions[:, :1], num_slots)
    keys = torch.cat((positions, held), dim=1).unsqueeze(1)
    return sight.sees(positions.unsqueeze(2), keys)


@dataclass(frozen=True, slots=True, eq=False)
class MaskedAttention:
    """PyTorch's own, with a bias."""

    bias: Tensor  # [N, 1, group * S, S + slots], of the rows' dtype

    @classmethod
    def over(cls, mask: Tensor, group: int, dtype: torch.dtype) -> "MaskedAttention":
        """Make it for `group` query heads that share a key head, of a `block_mask`."""
        N, S, K = mask.shape
        padded = -(-K // ALIGNMENT) * ALIGNMENT
        bias = torch.zeros(N, group, S, padded, dtype=dtype, device=mask.device)[..., :K]
        bias.masked_fill_(~mask.unsqueeze(1), -torch.inf)
        return cls(bias.flatten(1, 2).unsqueeze(1))

    def __call__(self, queries: Tensor, rows: ContextRows, layer: int) -> Tensor:
        """Mix what the block's `queries` [N, H_kv, group * S, head_dim] see, like them."""
        keys, values = rows.attended(layer, self.bias.shape[-1])
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class SpreadAttention:
    """Two products and a softmax; a row that sees nothing gets a mean of what it does not see."""

    bias: Tensor  # [N, 1, group * S, lead + S + slots], in the accumulation dtype
    lead: int  # rows in front of the block that nobody sees, for the sake of alignment

    @classmethod
    def over(cls, mask: Tensor, group: int, dtype: torch.dtype, *, room: int) -> "SpreadAttention":
        """Make it likewise; `room` is how many rows lie in front of the block."""
        N, S, K = mask.shape
        lead = min(room, -K % ALIGNMENT)
        dtype = accumulation_dtype(dtype)
        bias = torch.zeros(N, group, S, lead + K, dtype=dtype, device=mask.device)
        seen = functional.pad(mask, (lead, 0)).unsqueeze(1)
        bias.masked_fill_(~seen, torch.finfo(dtype).min)  # no infinity: it would make rows of NaN
        return cls(bias.flatten(1, 2).unsqueeze(1), lead)

    def __call__(self, queries: Tensor, rows: ContextRows, layer: int) -> Tensor:
        """Mix what the block's `queries` [N, H_kv, group * S, head_dim] see, like them."""
        N, heads, packed, head_dim = queries.shape
        keys, values = rows.attended(layer, self.bias.shape[-1], lead=self.lead)
        scores = _wide_product(queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
        scores = torch.add(self.bias, scores.view(N, heads, packed, -1), alpha=head_dim**-0.5)
        weights = scores.softmax(dim=-1).to(queries.dtype)
        return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(queries.shape)


def window_attention(
    sight: Sight, positions: Tensor, num_slots: int, rows: ContextRows, group: int
) -> MaskedAttention | SpreadAttention:
    """Return the attention of a block at `positions` [N, S] in layers of `sight`.

    On a GPU it is spread over the device; `num_slots` and `group` are as above.
    """
    mask, dtype = block_mask(sight, positions, num_slots), rows.layers[0].dtype
    if positions.device.type != "cuda":
        return MaskedAttention.over(mask, group, dtype)
    return SpreadAttention.over(mask, group, dtype, room=rows.front - rows.block_size)


def _wide_product(one: Tensor, other: Tensor) -> Tensor:
    """Multiply batches of matrices, the product in their accumulation dtype."""
    wide = accumulation_dtype(one.dtype)
    if one.dtype == wide:
        return torch.bmm(one, other)
    if one.device.type == "cuda":  # products of sixteen-bit numbers are exact in float32
        product: Tensor = torch.ops.aten.bmm.dtype(one, other, wide)
        return product
    return torch.bmm(one.to(wide), other.to(wide))
