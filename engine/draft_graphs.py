"""Drafts in buffers that stay where they are, so that one CUDA graph is replayed for many.

::

    bucket    a context's rows where they lie now, and with them sequences and capacity
    buffers   taps of the last step, and for each sequence: length, new rows, tokens of its block
    a draft   the buffers are overwritten, but for taps behind the last new row; then a replay

A step's new context rows and the block behind them are one run. How many rows are new, and how
long the context is, stands in the buffers alone: a run always writes `block_size` rows of each
sequence, those that are none to a place that the block overwrites. Where a context grows or a
sequence leaves, its rows are copied elsewhere, and that is another bucket. What a run gives lies in
the bucket's memory and holds until the next one.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.config import EngineConfig
from engine.context_rows import ContextRows, Sight
from engine.device import Place
from engine.drafter import BlockInputs, Drafted, DraftModel, TapRows
from engine.drafter_context import DrafterContext
from engine.drafter_layer import LayerBackends
from engine.pass_graphs import Capture, Kept, capture_for
from engine.target import Target
from engine.verify import Backends
from engine.whole_attention import PagedAttention

MOST_BUCKETS = 4  # of batches that take turns; without a graph each keeps its context's rows


class RunDraft(Protocol):
    """Completes the drafter's context of a batch and drafts its next blocks."""

    def __call__(self, batch: StepBatch, context: DrafterContext) -> Tensor:
        """Return draft logits [N, horizon, V] float32; the batch has no pending taps then."""


def draft_runner(
    target: Target, drafter: DraftModel | None, config: EngineConfig
) -> RunDraft | None:
    """Return what an engine's configuration asks for; errors are as in `capture_for`."""
    if drafter is None:
        return None
    if config.graphs == "off":
        return PlainDraft(drafter)
    return BucketDraft(target, drafter, Backends.of(config), capture_for(config, target.device))


@dataclass(frozen=True, slots=True)
class PlainDraft:
    """Launches every operation of a draft anew."""

    drafter: DraftModel

    def __call__(self, batch: StepBatch, context: DrafterContext) -> Tensor:
        """Extend the context, then draft."""
        batch.complete_context(self.drafter)
        return self.drafter.draft(context, batch.request())


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Buffers of the drafts over one context's rows, and what runs over them."""

    inputs: BlockInputs
    numbers: Place  # [N, 2 + k] int64, of which lengths, counts and tokens are columns
    run: Callable[[], Drafted]

    def load(self, pending: TapRows, numbers: Tensor) -> None:
        """Overwrite the buffers (mutated) with the rows that are new and what a block starts at."""
        self.inputs.taps[: len(pending.taps)].copy_(pending.taps)
        self.numbers.bring(numbers)


class BucketDraft:
    """Runs drafts over the same rows in the same buffers."""

    def __init__(
        self, target: Target, drafter: DraftModel, backends: Backends, capture: Capture
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._backends = backends
        self._capture = capture
        self._kept: Kept[Bucket] = Kept(MOST_BUCKETS)

    @property
    def buckets(self) -> dict[Hashable, Bucket]:
        """The buckets in the order of their last use."""
        return self._kept.values

    def __call__(self, batch: StepBatch, context: DrafterContext) -> Tensor:
        """Extend the context and draft in one run, captured before if its rows lay there."""
        pending = batch.pending or self._nothing(context.num_seqs)
        if max(pending.counts) > self._drafter.config.block_size:
            batch.complete_context(self._drafter)  # of a longer path than a block's
            pending = self._nothing(context.num_seqs)
        tokens = self._drafter.block_tokens(batch.request())
        starts = zip(context.lengths, pending.counts, tokens, strict=True)
        numbers = torch.tensor([[length, count, *row] for length, count, row in starts])
        context.reserve(max(map(sum, zip(context.lengths, pending.counts, strict=True))))
        rows, width = context.rows, numbers.shape[1]
        key = (rows.number, width)
        bucket, was_there = self._kept.get(key, lambda: self._new_bucket(rows, pending, numbers))
        if was_there:
            bucket.load(pending, numbers)
        drafted = bucket.run()
        batch.note_extension(pending.counts, drafted.features)
        context.check_complete()
        return drafted.logits

    def _nothing(self, num_seqs: int) -> TapRows:
        config, target = self._drafter.config, self._target
        width = len(config.target_layer_ids) * config.hidden_size
        return TapRows(target.embed_tokens.new_empty(0, width), (0,) * num_seqs)

    def _new_bucket(self, rows: ContextRows, pending: TapRows, numbers: Tensor) -> Bucket:
        place = Place(numbers, rows.layers[0].device)
        size = (rows.num_seqs * rows.block_size, pending.taps.shape[1])
        backends = LayerBackends(self._backends.rows, self._backends.linear(size[0]))
        # Other kernels of trees are made for the target's rows.
        trees = "reference" if self._backends.attention == "reference" else "triton_split"
        inputs = BlockInputs(
            taps=pending.taps.new_zeros(size),
            lengths=place.held[:, 0],
            counts=place.held[:, 1],
            tokens=place.held[:, 2:],
            heads={sight: rows.heads(sight) for sight in rows.sights},
            whole=PagedAttention.over(rows, trees) if Sight() in rows.sights else None,
            backends=backends,
        )
        inputs.taps[: len(pending.taps)].copy_(pending.taps)
        drafter = self._drafter
        run = self._capture(lambda: drafter.complete_and_draft(rows, inputs))
        return Bucket(inputs, place, run)
