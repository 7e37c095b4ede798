"""The drafter's own keys and values of the committed context, one buffer for each layer.

::

    buffer   [ block 0 .. S-1 | context slot 0, 1, 2, .. ]      S = block_size
    layer that sees everything   position p lies in slot p
    layer that sees a window     position p lies in slot p mod R, a ring of R = window - 1 + spare

The temporary rows of the block that is drafted lie in front, so that they never overwrite a
context row. What a slot of a ring holds is arithmetic: the last position before the length that
falls on it. After a rewind some slots hold rows from behind the length instead; the arithmetic
then names a position a whole ring earlier, which is outside every window as long as no more than
`REWIND_ROWS` were taken back. Lengths live on the host; nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import DrafterConfig
from engine.device import upload
from engine.errors import CacheError, ConfigError, ShapeError

LEAST_CAPACITY = 64  # context rows of the first buffer; it doubles whenever it is full
REWIND_ROWS = 64  # spare rows of a ring: how far `rewind` may go back


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

    def held(self, lengths: Tensor, num_slots: int) -> Tensor:
        """Return the position each of the slots in use holds, [N, num_slots]; negative = none.

        `lengths` is [N, 1] int64, `num_slots` at least the longest of them where all is kept.
        """
        last = lengths - 1
        slots = torch.arange(num_slots, device=lengths.device)
        return last - (last - slots) % (self.ring or num_slots)

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether each query position sees each key position; they are broadcast."""
        distance = queries - keys
        seen = (keys >= 0).expand_as(distance)
        if self.behind is not None:
            seen = seen & (distance < self.behind)
        if self.ahead is not None:
            seen = seen & (distance > -self.ahead)
        return seen


@dataclass(frozen=True, slots=True, eq=False)
class NewRows:
    """Those rows of an extension that layers of one sight keep, packed sequence by sequence."""

    seqs: Tensor  # [K] int64
    positions: Tensor  # [K] int64, absolute
    slots: Tensor  # [K] int64
    source: Tensor | None  # [K] int64, row of the extension; None = all of them, in order


class DrafterContext:
    """Keys and values of N sequences, `[N, H_kv, S + slots, head_dim]` for each layer.

    Parameters
    ----------
    config : DrafterConfig
    num_seqs : int
    max_context : int, optional
        Most keys a row of a full layer sees behind itself, itself included; None = all.
    dtype, device
        Of the drafter's tensors.

    Raises
    ------
    ConfigError
        `max_context` is less than 1.
    """

    def __init__(
        self,
        config: DrafterConfig,
        num_seqs: int,
        *,
        max_context: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if max_context is not None and max_context < 1:
            raise ConfigError(
                f"max_context: expected at least 1, got {max_context} (keys a full layer sees)"
            )
        layers = range(config.num_hidden_layers)
        self.lengths = [0] * num_seqs  # position behind the last context row of each sequence
        self.sights = tuple(Sight.of_layer(config, index, max_context) for index in layers)
        self.capacity = LEAST_CAPACITY  # positions every sequence has room for
        self._block_size = config.block_size
        self._starts = [0] * num_seqs  # first position that was ever written
        self._peaks = [0] * num_seqs  # greatest length so far: a ring lost what it pushed out
        # Zeros, since a masked row is multiplied by a weight of zero and must be finite.
        shape = (num_seqs, config.num_key_value_heads, config.head_dim)
        sizes = [self._block_size + sight.num_kept(self.capacity) for sight in self.sights]
        self._keys = [_zeros(shape, size, dtype, device) for size in sizes]
        self._values = [_zeros(shape, size, dtype, device) for size in sizes]

    @property
    def num_seqs(self) -> int:
        """Sequences held."""
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self._keys[0].device

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """Keys in the context slots of each layer, [N, H_kv, slots, head_dim] views."""
        return tuple(rows[:, :, self._block_size :] for rows in self._keys)

    @property
    def values(self) -> tuple[Tensor, ...]:
        """Values in the context slots of each layer, [N, H_kv, slots, head_dim] views."""
        return tuple(rows[:, :, self._block_size :] for rows in self._values)

    def num_slots(self, sight: Sight) -> int:
        """Return the slots in use of layers of `sight`: the longest sequence's."""
        return sight.num_kept(max(self.lengths, default=0))

    def first_needed(self, position: int) -> int:
        """Return the first position whose context row a block at `position` sees in some layer."""
        return min(sight.first_seen(position) for sight in self.sights)

    def start_at(self, index: int, position: int) -> None:
        """Let the next rows of sequence `index` begin at `position`, earlier ones being absent.

        No block can be drafted before enough rows follow: see `first_needed`.

        Raises
        ------
        CacheError
            The sequence has rows already, or some layer sees the absent rows for ever.
        """
        if self.lengths[index] or position < 0:
            raise CacheError(
                f"start_at: expected an empty sequence and a position >= 0, got one of "
                f"{self.lengths[index]} rows and {position} (rows are contiguous)"
            )
        if position and any(sight.behind is None for sight in self.sights):
            raise CacheError(
                f"start_at: expected position 0, got {position} (a full layer without "
                "`max_context` sees every row)"
            )
        self.lengths[index] = self._starts[index] = self._peaks[index] = position

    def check_complete(self) -> None:
        """Refuse a context that lacks rows the next block would see, with a `CacheError`."""
        for index, length in enumerate(self.lengths):
            if length < self._least_length(index):
                raise CacheError(
                    f"context of sequence {index}: expected rows from "
                    f"{self.first_needed(length)} on, got rows {self._starts[index]}..{length} "
                    "(a block at its end sees the others)"
                )

    def place(self, counts: Sequence[int], sight: Sight) -> NewRows:
        """Return where layers of `sight` put `counts[n]` rows behind sequence n's length.

        Raises
        ------
        ShapeError
            There is not one count for each sequence, or one is negative.
        """
        if len(counts) != self.num_seqs or min(counts, default=0) < 0:
            raise ShapeError(
                f"counts: expected {self.num_seqs} numbers >= 0, got {tuple(counts)} "
                "(new rows of each sequence)"
            )
        kept = [sight.num_kept(count) for count in counts]
        shifts, sources, packed, read = [], [], 0, 0
        for length, count, keep in zip(self.lengths, counts, kept, strict=True):
            read += count
            shifts.append(length + count - keep - packed)
            sources.append(read - keep - packed)
            packed += keep
        table = upload(torch.tensor((kept, shifts, sources)), self.device)
        rows = torch.arange(packed, device=self.device)
        seqs = torch.arange(self.num_seqs, device=self.device)
        seqs = seqs.repeat_interleave(table[0], output_size=packed)
        positions = rows + table[1][seqs]
        source = None if packed == read else rows + table[2][seqs]
        return NewRows(seqs, positions, sight.slots(positions), source)

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` rows of every sequence, at least doubling what there is."""
        if num_rows <= self.capacity:
            return
        self.capacity = max(num_rows, 2 * self.capacity)
        for index, sight in enumerate(self.sights):
            size = self._block_size + sight.num_kept(self.capacity)
            self._keys[index] = _widen(self._keys[index], size)
            self._values[index] = _widen(self._values[index], size)

    def write(self, layer: int, rows: NewRows, keys: Tensor, values: Tensor) -> None:
        """Store context rows of one layer, [K, H_kv, head_dim] each; room must be reserved."""
        slots = rows.slots + self._block_size
        self._keys[layer][rows.seqs, :, slots] = keys
        self._values[layer][rows.seqs, :, slots] = values

    def write_block(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the block's temporary rows of one layer, [N * S, H_kv, head_dim] each."""
        for rows, new in ((self._keys[layer], keys), (self._values[layer], values)):
            block = new.view(self.num_seqs, self._block_size, *new.shape[1:])
            rows[:, :, : self._block_size] = block.transpose(1, 2)

    def attended(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the block and of the context slots in use behind it."""
        end = self._block_size + self.num_slots(self.sights[layer])
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def advance(self, counts: Sequence[int]) -> None:
        """Count rows that were written to every layer."""
        self.lengths = [n + count for n, count in zip(self.lengths, counts, strict=True)]
        self._peaks = [max(pair) for pair in zip(self._peaks, self.lengths, strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Go back to fewer rows, what the layers then see being as it was at that length.

        Raises
        ------
        CacheError
            A length is more than the present one, or rows seen from there are gone from a ring:
            `REWIND_ROWS` rows back from the greatest length so far are always there.
        """
        if len(lengths) != self.num_seqs or any(
            not 0 <= wanted <= held for wanted, held in zip(lengths, self.lengths, strict=True)
        ):
            raise CacheError(
                f"lengths: expected at most {self.lengths}, got {list(lengths)} "
                "(a drafter context only goes back)"
            )
        least = [min(n, self._least_length(i)) for i, n in enumerate(self.lengths)]
        if any(wanted < bound for wanted, bound in zip(lengths, least, strict=True)):
            raise CacheError(
                f"lengths: expected at least {least}, got {list(lengths)} (layers with a window "
                f"keep {REWIND_ROWS} rows beyond it)"
            )
        self.lengths = list(lengths)

    def select(self, indices: Sequence[int]) -> None:
        """Keep the sequences at `indices`, in that order; their rows are copied."""
        chosen = upload(torch.tensor(indices, dtype=torch.int64), self.device)
        self.lengths = [self.lengths[index] for index in indices]
        self._starts = [self._starts[index] for index in indices]
        self._peaks = [self._peaks[index] for index in indices]
        self._keys = [rows.index_select(0, chosen) for rows in self._keys]
        self._values = [rows.index_select(0, chosen) for rows in self._values]

    def _least_length(self, index: int) -> int:
        """Return the least length of a sequence at which no layer sees a row that is gone."""
        return max(self._least_seen(index, sight) for sight in self.sights)

    def _least_seen(self, index: int, sight: Sight) -> int:
        if sight.behind is None or sight.ring is None:
            return 0  # a sequence that began later is refused for such a layer
        oldest = max(self._starts[index], self._peaks[index] - sight.ring)
        return oldest + sight.behind - 1 if oldest > 0 else 0


def _zeros(
    shape: tuple[int, int, int], num_rows: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    num_seqs, heads, width = shape
    return torch.zeros(num_seqs, heads, num_rows, width, dtype=dtype, device=device)


def _widen(rows: Tensor, num_rows: int) -> Tensor:
    if rows.shape[2] == num_rows:
        return rows
    wide = rows.new_zeros(*rows.shape[:2], num_rows, rows.shape[3])
    wide[:, :, : rows.shape[2]] = rows
    return wide
