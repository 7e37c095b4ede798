"""Where the drafter's keys and values lie: one tensor for each layer, rows of `[value ; key]`.

::

    rows of a head   [ unused | block 0 .. S-1 | context slot 0, 1, 2, .. ]      S = block_size
    layer that sees everything   position p lies in slot p
    layer that sees a window     position p lies in slot p mod R, a ring of R = window - 1 + spare

The temporary rows of the block that is drafted lie in front, so that they never overwrite a
context row, and behind a page's beginning, so that the context of a layer that sees everything can
be read as pages. What a slot of a ring holds is arithmetic: the last position before the length
that falls on it.
"""

from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from engine.config import DrafterConfig

REWIND_ROWS = 64  # spare rows of a ring: how far `rewind` may go back
PAGE_ROWS = 64  # of what is read as pages; a multiple of every kernel's tile


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys the rows of a layer see: those with `-ahead < q - k < behind`; None = no bound."""

    behind: int | None = None
    ahead: int | None = None

    @classmethod
    def of_layer(cls, config: DrafterConfig, index: int, max_context: int | None) -> "Sight":
        """Return the sight of layer `index`; `max_context` bounds what a full layer sees behind."""
        if config.layer_types[index] == "full_attention":
            return cls(behind=max_context)
        window = config.sliding_window
        return cls(behind=window, ahead=1 if config.is_block_causal else window)

    @property
    def ring(self) -> int | None:
        """Context rows worth keeping; None = all of them."""
        return None if self.behind is None else self.behind - 1 + REWIND_ROWS

    def num_kept(self, num_rows: int) -> int:
        """Return how many of `num_rows` context rows are kept."""
        return num_rows if self.ring is None else min(num_rows, self.ring)

    def first_seen(self, position: int) -> int:
        """Return the first position that a row at `position` sees."""
        return 0 if self.behind is None else max(0, position - self.behind + 1)

    def slots(self, positions: Tensor) -> Tensor:
        """Return the context slot of each position."""
        return positions if self.ring is None else positions % self.ring


@dataclass(frozen=True, slots=True, eq=False)
class ContextRows:
    """The rows of N sequences where they lie now; a context that grows or shrinks has others."""

    layers: tuple[Tensor, ...]  # [N, H_kv, front + slots, 2 * head_dim] each
    sights: tuple[Sight, ...]  # of each layer
    block_size: int
    capacity: int  # positions every sequence has room for, a multiple of `PAGE_ROWS`
    number: int = field(default_factory=count().__next__)  # tells these rows from all others

    @classmethod
    def zeros(
        cls, config: DrafterConfig, sights: tuple[Sight, ...], num_seqs: int, like: Tensor
    ) -> "ContextRows":
        """Make rows for one page of positions, of the dtype and on the device of `like`.

        Zeros, since a masked row is multiplied by a weight of zero and must be finite.
        """
        front = _whole_pages(config.block_size)
        heads, width = config.num_key_value_heads, 2 * config.head_dim
        layers = tuple(
            like.new_zeros(num_seqs, heads, front + sight.num_kept(PAGE_ROWS), width)
            for sight in sights
        )
        return cls(layers, sights, config.block_size, PAGE_ROWS)

    @property
    def num_seqs(self) -> int:
        """Sequences held."""
        return self.layers[0].shape[0]

    @property
    def front(self) -> int:
        """Rows of a head before its context's."""
        return _whole_pages(self.block_size)

    def context(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values in the context slots, [N, H_kv, slots, head_dim] views."""
        values, keys = self.layers[layer][:, :, self.front :].chunk(2, dim=-1)
        return keys, values

    def attended(self, layer: int, num_rows: int) -> Tensor:
        """Return the block's rows and those of the context slots behind it, `num_rows`, a view."""
        first = self.front - self.block_size
        return self.layers[layer][:, :, first : first + num_rows]

    def index(self, sight: Sight, seqs: Tensor, slots: Tensor) -> Tensor:
        """Return where rows of layers of `sight` lie in all of the layer's, head by head.

        Parameters
        ----------
        sight : Sight
        seqs, slots : [K] int64
            Their sequences and context slots.

        Returns
        -------
        Tensor
            [K * H_kv] int64.
        """
        return (self.heads(sight)[seqs] + slots.unsqueeze(1)).flatten()

    def heads(self, sight: Sight) -> Tensor:
        """Return where slot 0 of each head lies in all of a layer of `sight`, [N, H_kv] int64."""
        layer = self.layers[self.sights.index(sight)]
        N, heads, num_rows, _ = layer.shape
        begins = torch.arange(0, N * heads * num_rows, num_rows, device=layer.device)
        return begins.view(N, heads) + self.front

    def write(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows of one layer (mutated), [K, H_kv, head_dim] each, at `index` of its sight."""
        new = torch.cat((values, keys), dim=-1)
        self.packed(layer).index_copy_(0, index, new.flatten(0, 1))

    def packed(self, layer: int) -> Tensor:
        """Return all rows of one layer `[value ; key]`, head by head, a view."""
        return self.layers[layer].flatten(0, 2)

    def widened(self, capacity: int) -> "ContextRows":
        """Return a copy with room for `capacity` positions of every sequence."""
        sizes = [self.front + sight.num_kept(capacity) for sight in self.sights]
        layers = tuple(map(_widen, self.layers, sizes))
        return ContextRows(layers, self.sights, self.block_size, capacity)

    def select(self, indices: Tensor) -> "ContextRows":
        """Return a copy of the sequences at `indices`, in that order."""
        layers = tuple(rows.index_select(0, indices) for rows in self.layers)
        return ContextRows(layers, self.sights, self.block_size, self.capacity)

    def pages(self, layer: int) -> Tensor:
        """Return all rows of one layer that keeps everything as pages, [P, L, 2 * head_dim]."""
        rows = self.layers[layer]
        return rows.view(-1, PAGE_ROWS, rows.shape[-1])

    def page_table(self) -> Tensor:
        """Return the pages of each head's context, [N * H_kv, pages] int32, of any such layer."""
        layer = self.layers[self.sights.index(Sight())]
        front, count = self.front // PAGE_ROWS, self.capacity // PAGE_ROWS
        pages = torch.arange(front, front + count, dtype=torch.int32, device=layer.device)
        heads = torch.arange(
            layer.shape[0] * layer.shape[1], dtype=torch.int32, device=layer.device
        )
        return heads.unsqueeze(1) * (front + count) + pages

    def block(self, layer: int) -> Tensor:
        """Return the block's temporary rows of one layer, [N, H_kv, S, 2 * head_dim], a view."""
        return self.layers[layer][:, :, self.front - self.block_size : self.front]


def capacity_for(num_rows: int) -> int:
    """Return the positions to make room for: a power of two, so that few graphs differ in it."""
    return 1 << (max(num_rows, PAGE_ROWS) - 1).bit_length()


def _whole_pages(num_rows: int) -> int:
    return -(-num_rows // PAGE_ROWS) * PAGE_ROWS


def _widen(rows: Tensor, num_rows: int) -> Tensor:
    if rows.shape[2] == num_rows:
        return rows
    wide = rows.new_zeros(*rows.shape[:2], num_rows, rows.shape[3])
    wide[:, :, : rows.shape[2]] = rows
    return wide
