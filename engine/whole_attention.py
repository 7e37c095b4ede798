"""Attention of those drafter layers that see the whole context, where no mask need be read.

`SlicedAttention` knows the lengths on the host and cuts what is read to them. `PagedAttention`
knows them on the device alone, so that a CUDA graph can be replayed for any: it takes the kernel
of the target's trees, which divides a long context over the device whatever is in it. A block is a
tree in which everybody sees everybody; the queries of a key head are the heads of its sequence; a
row is `[value ; key]`, of which the score takes the key and the result the value.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.context_rows import ContextRows
from engine.kernels import tree_attention

WORD_BITS = 32  # of the words that say whom a row of a block sees


class BlockAttention(Protocol):
    """Attention of a block in layers of one sight."""

    def __call__(self, queries: Tensor, rows: ContextRows, layer: int) -> Tensor:
        """Mix what the block's `queries` [N, H_kv, group * S, head_dim] see.

        What comes out is what the next product reads, [N * S, H * head_dim].
        """


@dataclass(frozen=True, slots=True)
class SlicedAttention:
    """Sequence by sequence, over as many rows as each has."""

    lengths: tuple[int, ...]  # context rows of each sequence

    def __call__(self, queries: Tensor, rows: ContextRows, layer: int) -> Tensor:
        """Mix what the block's queries see."""
        (N, heads, _, head_dim), S = queries.shape, rows.block_size
        values, keys = rows.attended(layer, S + max(self.lengths)).chunk(2, dim=-1)
        # No mask where a row sees all there is: such kernels split a long context over the device.
        parts = [
            functional.scaled_dot_product_attention(
                queries[n : n + 1], keys[n : n + 1, :, :end], values[n : n + 1, :, :end]
            )
            for n, end in enumerate(S + length for length in self.lengths)
        ]
        out = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(N, heads, -1, S, head_dim)
        return out.permute(0, 3, 1, 2, 4).reshape(N * S, -1)


@dataclass(frozen=True, slots=True, eq=False)
class PagedAttention:
    """All sequences at once, lengths on the device; nothing of it depends on what they are."""

    backend: str  # of `tree_attention`
    page_table: Tensor  # [N * H_kv, pages] int32
    lengths: Tensor  # [N * H_kv] int64, context rows
    block_bits: Tensor  # [N * H_kv, S, W] int32, all S bits of every row
    block_sizes: Tensor  # [N * H_kv] int32

    @classmethod
    def over(cls, rows: ContextRows, backend: str) -> "PagedAttention":
        """Make what is the same for every block over `rows`; the lengths are zero."""
        table, S = rows.page_table(), rows.block_size
        row = ((1 << S) - 1).to_bytes(4 * -(-S // WORD_BITS), "little")
        words = torch.frombuffer(bytearray(row), dtype=torch.int32).to(table.device)
        return cls(
            backend=backend,
            page_table=table,
            lengths=torch.zeros(len(table), dtype=torch.int64, device=table.device),
            block_bits=words.repeat(len(table), S, 1),
            block_sizes=torch.full((len(table),), S, dtype=torch.int32, device=table.device),
        )

    def at(self, lengths: Tensor) -> "PagedAttention":
        """Return the same for context rows of each sequence, [N] int64, on the device."""
        of_heads = lengths.unsqueeze(1).expand(-1, len(self.page_table) // len(lengths))
        return replace(self, lengths=of_heads.flatten().contiguous())

    def __call__(self, queries: Tensor, rows: ContextRows, layer: int) -> Tensor:
        """Mix what the block's queries see."""
        N, heads, packed, head_dim = queries.shape
        group, S = packed // rows.block_size, rows.block_size
        of_keys = queries.view(N * heads, group, S, head_dim).transpose(1, 2)
        out, _ = tree_attention(
            functional.pad(of_keys, (head_dim, 0)),  # [N * H_kv, S, group, 2 * head_dim]
            rows.pages(layer),
            self.page_table,
            self.lengths,
            self.block_bits,
            tree_sizes=self.block_sizes,
            softmax_scale=head_dim**-0.5,
            value_dim=head_dim,
            tree_kv=rows.block(layer).flatten(0, 1),
            backend=self.backend,
        )
        return out.view(N, heads, S, -1).transpose(1, 2).reshape(N * S, -1)
