"""The drafter's own context: which positions its rows hold, which come next and may come back.

Where rows lie is the business of `ContextRows`. After a rewind some slots of a ring hold rows from
behind the length; the arithmetic then names a position a whole ring earlier, which is outside every
window as long as no more than `REWIND_ROWS` were taken back. Lengths live on the host; nothing here
waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import DrafterConfig
from engine.context_rows import REWIND_ROWS, ContextRows, Sight, capacity_for
from engine.device import upload
from engine.errors import CacheError, ConfigError, ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class NewRows:
    """Those rows of an extension that layers of one sight keep, packed sequence by sequence."""

    seqs: Tensor  # [K] int64
    positions: Tensor  # [K] int64, absolute
    slots: Tensor  # [K] int64
    source: Tensor | None  # [K] int64, row of the extension; None = all of them, in order


class DrafterContext:
    """Keys and values of the committed positions of N sequences, for each layer.

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
        self._distinct = tuple(dict.fromkeys(self.sights))
        like = torch.empty(0, dtype=dtype, device=device)
        self.rows = ContextRows.zeros(config, self.sights, num_seqs, like)
        self._starts = [0] * num_seqs  # first position that was ever written
        self._peaks = [0] * num_seqs  # greatest length so far: a ring lost what it pushed out

    @property
    def num_seqs(self) -> int:
        """Sequences held."""
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.rows.layers[0].device

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """Keys in the context slots of each layer, [N, H_kv, slots, head_dim] views."""
        return tuple(self.rows.context(layer)[0] for layer in range(len(self.sights)))

    @property
    def values(self) -> tuple[Tensor, ...]:
        """Values in the context slots of each layer, like its keys."""
        return tuple(self.rows.context(layer)[1] for layer in range(len(self.sights)))

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
        """Make room for `num_rows` rows of every sequence, up to a power of two."""
        if num_rows > self.rows.capacity:
            self.rows = self.rows.widened(capacity_for(num_rows))

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
        self.rows = self.rows.select(chosen)

    def _least_length(self, index: int) -> int:
        """Return the least length of a sequence at which no layer sees a row that is gone."""
        return max(self._least_seen(index, sight) for sight in self._distinct)

    def _least_seen(self, index: int, sight: Sight) -> int:
        if sight.behind is None or sight.ring is None:
            return 0  # a sequence that began later is refused for such a layer
        oldest = max(self._starts[index], self._peaks[index] - sight.ring)
        return oldest + sight.behind - 1 if oldest > 0 else 0
