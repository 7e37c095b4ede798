"""The drafter's own keys and values of the committed context, one buffer for each layer.

Rows are laid out by absolute position, so that a block's temporary rows simply stand behind the
context while it is drafted and are overwritten later. Every layer keeps all positions; a sliding
layer reads the last window of them only. Lengths live on the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import DrafterConfig
from engine.errors import CacheError

LEAST_CAPACITY = 64  # rows of the first buffer; it doubles whenever it is full


class DrafterContext:
    """Keys and values of N sequences, `[N, H_kv, capacity, head_dim]` for each layer."""

    def __init__(
        self, config: DrafterConfig, num_seqs: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.lengths = [0] * num_seqs  # context rows of each sequence
        heads, width = config.num_key_value_heads, config.head_dim
        layers = range(config.num_hidden_layers)
        # Zeros, since a masked row is multiplied by a weight of zero and must be finite.
        shape = (num_seqs, heads, LEAST_CAPACITY, width)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]

    @property
    def num_seqs(self) -> int:
        """Sequences held."""
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Rows each sequence has room for."""
        return self.keys[0].shape[2]

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` rows of every sequence, at least doubling what there is."""
        if num_rows <= self.capacity:
            return
        wanted = max(num_rows, 2 * self.capacity)
        self.keys = [_widen(rows, wanted) for rows in self.keys]
        self.values = [_widen(rows, wanted) for rows in self.values]

    def write(self, layer: int, place: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor]) -> None:
        """Store keys and values of one layer.

        Parameters
        ----------
        layer : int
        place : two [M] int64 tensors on the buffers' device
            Sequence index and absolute position of each row; room must be reserved.
        rows : keys and values, [M, H_kv, head_dim] each
        """
        seqs, positions = place
        self.keys[layer][seqs, :, positions] = rows[0]
        self.values[layer][seqs, :, positions] = rows[1]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Go back to fewer rows; the rows kept are untouched."""
        if len(lengths) != self.num_seqs or any(
            not 0 <= wanted <= held for wanted, held in zip(lengths, self.lengths, strict=True)
        ):
            raise CacheError(
                f"lengths: expected at most {self.lengths}, got {list(lengths)} "
                "(a drafter context only goes back)"
            )
        self.lengths = list(lengths)

    def select(self, indices: Sequence[int]) -> None:
        """Keep the sequences at `indices`, in that order; their rows are copied."""
        chosen = torch.tensor(indices, dtype=torch.int64, device=self.keys[0].device)
        self.lengths = [self.lengths[index] for index in indices]
        self.keys = [rows.index_select(0, chosen) for rows in self.keys]
        self.values = [rows.index_select(0, chosen) for rows in self.values]


def _widen(rows: Tensor, capacity: int) -> Tensor:
    wide = rows.new_zeros(*rows.shape[:2], capacity, rows.shape[3])
    wide[:, :, : rows.shape[2]] = rows
    return wide
