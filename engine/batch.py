"""The state that steps: sequences, their cache rows, the drafter's context and what it lacks.

The cache is the engine's and shared by its batches; context and scratch are the batch's own.
Between two steps, for a sequence of n tokens: P = n - 1 rows are in the target's cache, the last
token is the root, and the drafter's context plus the pending taps make up the same P rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.drafter import DraftModel, DraftRequest, TapRows
from engine.drafter_context import DrafterContext
from engine.errors import RequestError
from engine.kv_cache import LatentCache
from engine.sampling import Sampling
from engine.sequence import SequenceMark, SequenceState
from engine.tree_scratch import TreeScratch


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step appended to each sequence, in the batch's order."""

    token_ids: tuple[tuple[int, ...], ...]
    num_nodes: tuple[int, ...]  # draft nodes of each tree, root excluded
    stage_seconds: dict[str, float] | None  # of draft, build, verify, commit; None = no observer

    @property
    def commit_lengths(self) -> tuple[int, ...]:
        """Tokens appended to each sequence."""
        return tuple(len(tokens) for tokens in self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A point to bring a batch back to; its rows stay in the batch, nothing is copied."""

    seqs: tuple[int, ...]
    marks: tuple[SequenceMark, ...]
    context_lengths: tuple[int, ...]
    pending: TapRows | None


@dataclass(slots=True, eq=False)
class StepBatch:
    """Sequences that step together; mutated by every step."""

    sequences: list[SequenceState]
    sampling: Sampling
    cache: LatentCache
    first_seq: int = 0  # the cache's name of the first prompt's sequence; the others follow it
    context: DrafterContext | None = None  # None = nothing is drafted
    scratch: TreeScratch | None = None  # rows of the trees; None = they lie in pages
    pending: TapRows | None = None  # taps of the last step; None = the context is complete

    @property
    def seqs(self) -> tuple[int, ...]:
        """The cache's names of the sequences."""
        return tuple(sequence.seq for sequence in self.sequences)

    def prompt_index(self, index: int) -> int:
        """Return which prompt the sequence at `index` continues."""
        return self.sequences[index].seq - self.first_seq

    def request(self) -> DraftRequest:
        """Return what the drafter is told of the sequences."""
        return DraftRequest(
            root_tokens=tuple(sequence.root_token for sequence in self.sequences),
            num_generated=tuple(sequence.num_new_tokens for sequence in self.sequences),
            sequence_ids=tuple(self.prompt_index(n) for n in range(len(self.sequences))),
        )

    def complete_context(self, drafter: DraftModel) -> None:
        """Turn the pending taps into drafter rows; a cache that reuses prefixes keeps features."""
        if self.context is None or self.pending is None:
            return
        before, counts = list(self.context.lengths), self.pending.counts
        features = drafter.extend(self.context, self.pending)
        self._keep_features(before, counts, features)

    def note_extension(self, counts: Sequence[int], features: Tensor) -> None:
        """Count rows that were written behind the context; `features` begins with theirs."""
        if self.context is None:
            return
        before = list(self.context.lengths)
        self.context.advance(counts)
        self._keep_features(before, counts, features)

    def _keep_features(
        self, before: Sequence[int], counts: Sequence[int], features: Tensor
    ) -> None:
        """Forget the pending taps; a cache that reuses prefixes keeps features, the first ones."""
        self.pending = None
        if self.cache.shape.feature_dim and any(counts):
            added = zip(self.seqs, before, counts, strict=True)
            # A sequence that adds no row may not have begun in the cache.
            slots = [self.cache.slots(seq, range(n, n + k)) for seq, n, k in added if k]
            self.cache.write_features(torch.cat(slots), features[: sum(counts)])

    def publish(self, index: int, num_tokens: int) -> None:
        """Offer the pages of the first `num_tokens` tokens of a sequence to later prompts."""
        sequence = self.sequences[index]
        known = sequence.committed_length
        if self.context is not None:
            known = self.context.lengths[index]  # behind it rows have no features yet
        self.cache.publish(sequence.seq, sequence.token_ids[: min(num_tokens, known)])

    def snapshot(self) -> Snapshot:
        """Return the present point, to come back to with `rewind`."""
        marks = tuple(sequence.mark() for sequence in self.sequences)
        lengths = () if self.context is None else tuple(self.context.lengths)
        return Snapshot(self.seqs, marks, lengths, self.pending)

    def rewind(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`: tokens, cache rows, drafter context and pending taps.

        Raises
        ------
        RequestError
            The snapshot is of other sequences, from before some left, or of steps that an earlier
            rewind took back.
        CacheError
            So many rows came since that the drafter's sliding layers have lost theirs.
        """
        if snapshot.seqs != self.seqs:
            raise RequestError(
                f"snapshot: expected one of sequences {self.seqs}, got {snapshot.seqs} "
                "(released rows cannot come back)"
            )
        if not all(map(SequenceState.has_passed, self.sequences, snapshot.marks)):
            raise RequestError(
                f"snapshot: expected a point on the way of {self.seqs}, got one that was taken "
                "back (its rows are gone)"
            )
        if self.context is not None:
            self.context.rewind(snapshot.context_lengths)
        self.pending = snapshot.pending
        for sequence, mark in zip(self.sequences, snapshot.marks, strict=True):
            sequence.rewind(mark)
            self.cache.truncate(sequence.seq, sequence.committed_length)

    def keep(self, indices: Sequence[int]) -> None:
        """Go on with the sequences at `indices` only and release the others."""
        if list(indices) == list(range(len(self.sequences))):
            return
        kept = [self.sequences[index] for index in indices]
        for seq in set(self.seqs) - {sequence.seq for sequence in kept}:
            if seq in self.cache.sequences:  # not if its prompt never came so far
                self.cache.release(seq)
        self.sequences = kept
        if self.context is not None:
            self.context.select(indices)
        if self.pending is not None:
            self.pending = self.pending.select(indices)
