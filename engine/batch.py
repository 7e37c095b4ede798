"""The state that steps: sequences, their cache rows, the drafter's context and what it lacks.

A batch owns its cache, so batches never compete for pages. Between two steps, for a sequence of
n tokens: P = n - 1 rows are in the target's cache, the last token is the root, and the drafter's
context plus the pending taps make up the same P rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.drafter import DraftRequest, TapRows
from engine.drafter_context import DrafterContext
from engine.errors import RequestError
from engine.kv_cache import LatentCache
from engine.sampling import Sampling
from engine.sequence import SequenceMark, SequenceState


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
    context: DrafterContext
    pending: TapRows | None = None  # taps of the last step; None = the context is complete

    @property
    def seqs(self) -> tuple[int, ...]:
        """The cache's names of the sequences: indices of their prompts."""
        return tuple(sequence.seq for sequence in self.sequences)

    def request(self) -> DraftRequest:
        """Return what the drafter is told of the sequences."""
        return DraftRequest(
            root_tokens=tuple(sequence.root_token for sequence in self.sequences),
            num_generated=tuple(len(sequence.new_token_ids) for sequence in self.sequences),
            sequence_ids=self.seqs,
        )

    def snapshot(self) -> Snapshot:
        """Return the present point, to come back to with `rewind`."""
        marks = tuple(sequence.mark() for sequence in self.sequences)
        return Snapshot(self.seqs, marks, tuple(self.context.lengths), self.pending)

    def rewind(self, snapshot: Snapshot) -> None:
        """Go back to `snapshot`: tokens, cache rows, drafter context and pending taps.

        Raises
        ------
        RequestError
            The snapshot is of other sequences: of another batch, or from before some left.
        """
        if snapshot.seqs != self.seqs:
            raise RequestError(
                f"snapshot: expected one of sequences {self.seqs}, got {snapshot.seqs} "
                "(released rows cannot come back)"
            )
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
            self.cache.release(seq)
        self.sequences = kept
        self.context.select(indices)
        if self.pending is not None:
            self.pending = self.pending.select(indices)
