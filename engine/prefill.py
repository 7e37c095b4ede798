"""What happens to a prompt before its first step: checks, pages of earlier prompts, then chunks.

Every token of a prompt but the last gets its row in the cache and in the drafter's context. Where
an earlier sequence began alike, its whole pages are shared and only the drafter's rows are made
again, from the features kept beside the pages. The rest runs in chunks, each a chain that is
certain.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.drafter import DraftModel, TapRows
from engine.errors import RequestError
from engine.sampling import Sampling, check_integer
from engine.sequence import SequenceState
from engine.target import Target, check_tokens, is_list
from engine.verify import Backends, append_chain


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
            backends=Backends.of(self.config),
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


def check_prompts(
    prompts: object, vocab_size: int, max_context: int, *, max_new_tokens: int = 0
) -> None:
    """Refuse prompts that are no token ids or leave no room for what follows: `RequestError`."""
    if not is_list(prompts):
        raise RequestError(
            f"prompts: expected a list of prompts, got {prompts!r} (also if there is one)"
        )
    if len(prompts) == 0:
        raise RequestError("prompts: expected at least one, got none (an empty batch)")
    for prompt in prompts:
        check_tokens(prompt, vocab_size)
        if len(prompt) + max_new_tokens > max_context:
            raise RequestError(
                f"prompt and new tokens: expected at most {max_context}, got "
                f"{len(prompt)} + {max_new_tokens} (max_context of the engine)"
            )


def check_stops(token_ids: object, vocab_size: int) -> None:
    """Refuse stop tokens that the target can never say with a `RequestError`."""
    if not is_list(token_ids) and not isinstance(token_ids, AbstractSet):
        raise RequestError(
            f"stop_token_ids: expected a collection, got {token_ids!r} (also if there is one)"
        )
    for token in token_ids:
        reason = "a token of the target's vocabulary"
        check_integer("stop_token_ids", token, least=0, most=vocab_size - 1, reason=reason)


def new_sequences(
    prompts: Sequence[Sequence[int]],
    first_seq: int,
    *,
    sampling: Sampling,
    seed: int | Sequence[int],
) -> list[SequenceState]:
    """Return the sequences of prompts that were checked; `seed` is one, or one for each of them.

    Raises
    ------
    RequestError
        There is no seed for each prompt, or one is no int64.
    """
    seeds = seed if isinstance(seed, Sequence) else [seed] * len(prompts)
    if len(seeds) != len(prompts):
        raise RequestError(
            f"seed: expected one, or one for each of {len(prompts)} prompts, got {len(seeds)} "
            "(the noise of a sequence is its own)"
        )
    return [
        SequenceState(first_seq + n, list(map(int, prompt)), len(prompt), own_seed, sampling)
        for n, (prompt, own_seed) in enumerate(zip(prompts, seeds, strict=True))
    ]


def _counts(batch: StepBatch, index: int, count: int) -> tuple[int, ...]:
    """Return `count` rows for the sequence at `index` and none for the others."""
    return tuple(count if n == index else 0 for n in range(len(batch.sequences)))
