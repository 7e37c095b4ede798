"""What happens to a prompt before its first step: pages of earlier prompts, then chunks.

Every token of a prompt but the last gets its row in the cache and in the drafter's context. Where
an earlier sequence began alike, its whole pages are shared and only the drafter's rows are made
again, from the features kept beside the pages. The rest runs in chunks, each a chain that is
certain.
"""

from dataclasses import dataclass

from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.drafter import DraftModel, TapRows
from engine.target import Target
from engine.verify import append_chain


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """Fills the cache and the drafter's context with the prompts of a batch."""

    target: Target
    drafter: DraftModel | None
    config: EngineConfig

    def __call__(self, batch: StepBatch) -> None:
        """Run every prompt of `batch` (mutated), one after the other."""
        for index, sequence in enumerate(batch.sequences):
            start = batch.cache.begin(sequence.seq, sequence.token_ids[:-1])
            self._restore_context(batch, index, start)
            for first in range(start, sequence.committed_length, self.config.prefill_chunk):
                self._run_chunk(batch, index, first)
            batch.publish(index, sequence.committed_length)

    def _run_chunk(self, batch: StepBatch, index: int, first: int) -> None:
        sequence = batch.sequences[index]
        end = min(first + self.config.prefill_chunk, sequence.committed_length)
        passed = append_chain(
            self.target,
            batch.cache,
            sequence.seq,
            sequence.token_ids[first:end],
            backend=self.config.attention_backend,
            tap_ids=() if self.drafter is None else self.drafter.config.target_layer_ids,
        )
        if self.drafter is not None:
            batch.pending = TapRows(passed.taps, _counts(batch, index, end - first))
            batch.complete_context(self.drafter)

    def _restore_context(self, batch: StepBatch, index: int, length: int) -> None:
        """Make the drafter's rows of `length` reused positions from their features."""
        if self.drafter is None or batch.context is None or not length:
            return
        first = batch.context.first_needed(length)
        batch.context.start_at(index, first)
        features = batch.cache.gather_features(batch.sequences[index].seq, first, length)
        counts = _counts(batch, index, length - first)
        self.drafter.extend_features(batch.context, features, counts)


def _counts(batch: StepBatch, index: int, count: int) -> tuple[int, ...]:
    """Return `count` rows for the sequence at `index` and none for the others."""
    return tuple(count if n == index else 0 for n in range(len(batch.sequences)))
