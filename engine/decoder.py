"""The engine: prefill prompts, then step. Read this first; all else is a detail of four stages.

::

    draft    the drafter proposes a distribution for each depth of the next block
    build    the heaviest prefixes become a draft tree under the node budget
    verify   one target pass gives the target's own token after every node
    commit   the path the target agrees with stays, and its next token becomes the root

What is generated is the target's alone: every token was chosen from its logits at its own prefix.
The drafter decides how many of them one step commits: linear DFlash is a step whose tree is a
chain, autoregressive decoding one whose tree is the root. The engine knows nothing about text or
clocks; between two steps all state is in the `StepBatch` and in the cache that batches share.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from engine.batch import Snapshot, StepBatch, StepResult
from engine.budget import Budget, CostTable
from engine.config import DrafterConfig, EngineConfig
from engine.cost import check_costs, most_nodes, pool_pages
from engine.device import upload
from engine.device_trees import DeviceTrees, num_nodes, tree_runner
from engine.draft_graphs import draft_runner
from engine.draft_tree import (
    Acceptance,
    DraftTree,
    accept_batch,
    root_tree,
)
from engine.drafter import DraftModel, TapRows, check_pair
from engine.errors import ConfigError, RequestError, ShapeError
from engine.kv_cache import CacheShape, LatentCache
from engine.mla import cached_rows
from engine.observer import StageObserver, stage
from engine.pass_graphs import Choice, fill_up, pass_runner
from engine.prefill import Prefill, check_prompts, check_stops, new_sequences
from engine.sampling import GREEDY, Sampling, check_integer
from engine.sequence import Generation, SequenceState
from engine.target import PassRows, Target
from engine.verify import Backends, Verified, plan_pass


class Engine:
    """Decodes with a target and a drafter.

    Parameters
    ----------
    target : Target
    drafter : DraftModel, optional
        A `Drafter` of this target, or a wrapper around one. Mode "ar" has no use for it and
        needs none.
    config : EngineConfig
    observer : StageObserver, optional
        Told of the stages of every step.
    page_fill : float, optional
        What cache rows hold while they are not committed; NaN makes a read of one visible.
    cost_table : CostTable, optional
        What a step costs on this machine; budget policy "adaptive" needs it.

    Raises
    ------
    BackendError
        A backend does not exist.
    ConfigError
        Drafter and target do not belong together, the mode or the budget policy lacks what it
        needs, or `max_context` exceeds the target's.
    """

    def __init__(
        self,
        target: Target,
        drafter: DraftModel | None,
        config: EngineConfig,
        *,
        observer: StageObserver | None = None,
        page_fill: float | None = None,
        cost_table: CostTable | None = None,
    ) -> None:
        self.backends = Backends.of(config)
        _check_parts(target, drafter, config)
        self._trees = tree_runner(config, target.device)
        check_costs(target, drafter, config, cost_table)
        self.target = target
        self.drafter = None if config.mode == "ar" else drafter
        self.config = config
        tap_ids = () if self._drafts is None else self._drafts.target_layer_ids
        self._run_pass = pass_runner(target, tap_ids, config)
        self._run_draft = draft_runner(target, self.drafter, config)
        self.observer = observer
        self.page_fill = page_fill
        self.cost_table = cost_table
        self.budget = Budget(config, cost_table)
        self.cache: LatentCache | None = None  # made by the first prefill, shared by all batches
        self._num_seqs = 0  # begun so far; the cache knows sequences by this number

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float | None = None,
        sampling: Sampling | None = None,
        seed: int | Sequence[int] = 0,
        stop_token_ids: Collection[int] = (),
    ) -> list[Generation]:
        """Continue every prompt until a stop token or `max_new_tokens`.

        Parameters
        ----------
        prompts : N sequences of token ids, none empty
        max_new_tokens : int
            At least 1.
        temperature : float, optional
            0, also if nothing is given, is greedy; otherwise the noise is a function of seed,
            position and token alone.
        sampling : Sampling, optional
            Temperature, top-k, top-p and min-p together, in place of `temperature`.
        seed : int, or one for each prompt
            Equal prompts with equal seeds have equal continuations.
        stop_token_ids : collection of int
            The first of them ends a sequence and is its last token.

        Raises
        ------
        RequestError
            A prompt or a parameter cannot be served, or prompt and new tokens exceed
            `max_context`.
        OutOfPagesError
            The pool is too small; the pages of these prompts are given back.
        """
        if sampling is not None and temperature is not None:
            raise RequestError(
                f"temperature: expected none beside a Sampling, got {temperature!r} (it has one)"
            )
        if sampling is None:
            sampling = GREEDY if temperature is None else Sampling(temperature=temperature)
        check_integer("max_new_tokens", max_new_tokens, least=1, reason="nothing to generate")
        check_stops(stop_token_ids, self.target.config.vocab_size)
        batch = self._begin(prompts, sampling, seed, max_new_tokens)
        finished: dict[int, Generation] = {}
        try:
            while batch.sequences:
                self.step(batch)
                going = []
                for index, sequence in enumerate(batch.sequences):
                    generation = sequence.finished(stop_token_ids, max_new_tokens)
                    if generation is None:
                        going.append(index)
                        continue
                    finished[batch.prompt_index(index)] = generation
                    batch.publish(index, sequence.prompt_length + len(generation.token_ids))
                batch.keep(going)
        finally:
            batch.keep([])
        return [finished[index] for index in range(len(prompts))]

    def step(self, batch: StepBatch) -> StepResult:
        """Run one step: draft, build, verify, commit.

        Raises
        ------
        RequestError
            No sequence is left in the batch.
        OutOfPagesError
            The pool is too small; the batch is as it was.
        """
        if not batch.sequences:
            raise RequestError("batch: expected at least one sequence, got none (all released)")
        draft_logits = self.draft(batch)
        trees = self.build(batch, draft_logits)
        verified = self.verify(batch, trees)
        appended = self.commit(batch, trees, verified)
        return StepResult(
            token_ids=appended,
            num_nodes=num_nodes(trees),
            stage_seconds=None if self.observer is None else self.observer.seconds(),
        )

    @stage
    def draft(self, batch: StepBatch) -> Tensor | None:
        """Complete the drafter's context, then draft the next block.

        Returns [N, horizon, V] float32, or None where nothing is drafted.
        """
        if self._run_draft is None or batch.context is None:
            return None
        return self._run_draft(batch, batch.context)

    @stage
    def build(self, batch: StepBatch, draft_logits: Tensor | None) -> Sequence[DraftTree]:
        """Build one draft tree for each sequence under the budget policy."""
        roots = [sequence.root_token for sequence in batch.sequences]
        if draft_logits is None:
            return [root_tree(root) for root in roots]
        self._check_draft(draft_logits, len(roots))
        if self._trees is not None:
            return self._trees.build(batch, draft_logits, self.most_nodes(len(roots)))
        mean = sum(sequence.committed_length for sequence in batch.sequences) / len(roots)
        return self.budget.build(draft_logits, roots, self.most_nodes(len(roots)), mean)

    @stage
    def verify(self, batch: StepBatch, trees: Sequence[DraftTree]) -> Verified:
        """Run the target over all trees and choose its token after every node."""
        rows = self._plan(batch, trees)
        seeds = [sequence.seed for sequence in batch.sequences]
        choice = Choice(batch.sampling, None if batch.sampling.is_greedy else rows.repeat(seeds))
        passed = self._run_pass(rows, choice)
        return Verified(
            target_tokens=rows.attention.pad(passed.tokens),
            log_probs=rows.attention.pad(passed.log_probs),
            taps=passed.taps,
            offsets=rows.offsets,
            slots=passed.slots,
        )

    @stage
    def commit(
        self, batch: StepBatch, trees: Sequence[DraftTree], verified: Verified
    ) -> tuple[tuple[int, ...], ...]:
        """Keep what the target agreed with: tokens, cache rows and taps of each sequence."""
        if self._trees is not None and isinstance(trees, DeviceTrees):
            return self._trees.commit(batch, trees, verified)
        said = verified.to_host(trees)
        accepted = accept_batch(trees, said.target_tokens)
        self.budget.tell(trees, accepted)
        log_probs = said.log_probs.tolist()
        appended, tap_rows = [], []
        for n, (sequence, acceptance) in enumerate(zip(batch.sequences, accepted, strict=True)):
            kept = [0, *acceptance.path.tolist()]
            if batch.scratch is None:
                batch.cache.commit(sequence.seq, kept[1:])
            else:
                batch.cache.commit_scratch(batch.scratch, n, sequence.seq, kept[1:])
            tokens = _appended(trees[n], acceptance)
            sequence.append_step(tokens, [log_probs[n][node] for node in kept])
            tap_rows += [verified.offsets[n] + node for node in kept]
            appended.append(tokens)
        if batch.context is not None:
            chosen = upload(torch.tensor(tap_rows), verified.taps.device)
            counts = tuple(acceptance.commit_length for acceptance in accepted)
            batch.pending = TapRows(verified.taps.index_select(0, chosen), counts)
        return tuple(appended)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling = GREEDY,
        seed: int | Sequence[int] = 0,
    ) -> StepBatch:
        """Start a batch: every prompt token but the last gets its cache and context rows.

        The last token of a prompt is its first root. Errors are as in `generate`; the batch holds
        its pages until `release`.
        """
        return self._begin(prompts, sampling, seed, 0)

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling = GREEDY,
        seed: int | Sequence[int] = 0,
        max_new_tokens: int = 0,
    ) -> StepBatch:
        """Start a batch whose rows its caller brings: `prefill` without the prefill."""
        if not isinstance(sampling, Sampling):
            raise RequestError(
                f"sampling: expected a Sampling, got {sampling!r} (how tokens are chosen)"
            )
        vocab_size, max_context = self.target.config.vocab_size, self.config.max_context
        check_prompts(prompts, vocab_size, max_context, max_new_tokens=max_new_tokens)
        sequences = new_sequences(prompts, self._num_seqs, sampling=sampling, seed=seed)
        self._num_seqs += len(prompts)
        return self._new_batch(sequences, sampling)

    def snapshot(self, batch: StepBatch) -> Snapshot:
        """Return the present point of `batch`; nothing is copied."""
        return batch.snapshot()

    def rewind(self, batch: StepBatch, snapshot: Snapshot) -> None:
        """Bring `batch` back to `snapshot`, so that the same step can be run again."""
        batch.rewind(snapshot)

    def release(self, batch: StepBatch) -> None:
        """End all sequences of `batch` and give back their pages."""
        for index, sequence in enumerate(batch.sequences):
            batch.publish(index, sequence.committed_length)
        batch.keep([])

    def most_nodes(self, num_seqs: int) -> int:
        """Return how many draft nodes one tree can have in a batch of `num_seqs`."""
        return most_nodes(self.config, self._drafts, num_seqs)

    @property
    def _drafts(self) -> DrafterConfig | None:
        return None if self.drafter is None else self.drafter.config

    def _plan(self, batch: StepBatch, trees: Sequence[DraftTree]) -> PassRows:
        """Lay out the pass over the trees, filled up to a bucket if it may be captured."""
        in_buckets = self.config.graphs != "off"
        if isinstance(trees, DeviceTrees):
            return trees.plan(batch, self.backends, widens_table=in_buckets)
        if in_buckets:
            trees = fill_up(trees, 1 + self.most_nodes(len(trees)))
        cache, seqs, scratch = batch.cache, batch.seqs, batch.scratch
        return plan_pass(
            cache, seqs, trees, self.backends, scratch=scratch, widens_table=in_buckets
        )

    def _check_draft(self, draft_logits: Tensor, num_seqs: int) -> None:
        """Refuse drafts of other sequences or of tokens that the target does not have."""
        vocab_size = self.target.config.vocab_size
        shape = list(draft_logits.shape)
        if len(shape) != 3 or shape[0] != num_seqs or shape[2] != vocab_size:
            raise ShapeError(
                f"draft_logits: expected [{num_seqs}, horizon, {vocab_size}], got {shape} (one "
                "block for each sequence, over the target's vocabulary)"
            )

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int | Sequence[int],
        max_new_tokens: int,
    ) -> StepBatch:
        """Make a batch and prefill it; whatever happens on the way, no page is lost."""
        batch = self.begin(prompts, sampling=sampling, seed=seed, max_new_tokens=max_new_tokens)
        with ExitStack() as on_failure:
            on_failure.callback(batch.keep, [])
            Prefill(self.target, self.drafter, self.config)(batch)
            on_failure.pop_all()
        return batch

    def _new_batch(self, sequences: list[SequenceState], sampling: Sampling) -> StepBatch:
        count, context, scratch = len(sequences), None, None
        if self.drafter is not None:
            context = self.drafter.new_context(count, max_context=self.config.drafter_context)
        cache = self._cache_for(count)
        if self.config.cache_layout == "hybrid":
            scratch = cache.new_scratch(count, 1 + self.most_nodes(count))
        return StepBatch(sequences, sampling, cache, sequences[0].seq, context, scratch)

    def _cache_for(self, num_seqs: int) -> LatentCache:
        """Return the cache; one whose size is the engine's own business has room for all."""
        config, live = self.config, 0 if self.cache is None else len(self.cache.sequences)
        # A live sequence may be of a larger batch, with a larger share in its nodes, than this one.
        wanted = pool_pages(config, self._drafts, live + num_seqs)
        if self.cache is None:
            self.cache = self._new_cache(config.num_pages or wanted)
        elif config.num_pages is None and wanted > self.cache.shape.num_pages:
            self.cache.grow(wanted)
        return self.cache

    def _new_cache(self, num_pages: int) -> LatentCache:
        target, config, drafter = self.target, self.config, self.drafter
        dtype, row_dim = cached_rows(target.config, target.dtype, config.kv_dtype)
        shape = CacheShape(
            num_layers=target.config.num_hidden_layers,
            num_pages=num_pages,
            page_size=config.page_size,
            row_dim=row_dim,
            feature_dim=drafter.config.hidden_size if drafter and config.prefix_reuse else 0,
            feature_dtype=target.dtype,
        )
        return LatentCache(
            shape,
            dtype=dtype,
            device=target.device,
            fill=self.page_fill,
            reuse_prefixes=config.prefix_reuse,
        )


def _check_parts(target: Target, drafter: DraftModel | None, config: EngineConfig) -> None:
    if drafter is not None:
        check_pair(drafter.config, target.config)
    elif config.mode != "ar":
        raise ConfigError(
            f"drafter: expected one, got None (mode {config.mode!r} drafts; only 'ar' does not)"
        )
    longest = target.config.max_position_embeddings
    if config.max_context > longest:
        raise ConfigError(
            f"max_context: expected at most {longest}, got {config.max_context} "
            "(the target's max_position_embeddings)"
        )


def _appended(tree: DraftTree, acceptance: Acceptance) -> tuple[int, ...]:
    """Return the tokens a step appends: those of the accepted path, then the bonus token."""
    path = acceptance.path.long()
    return (*tree.token_ids.index_select(0, path).tolist(), acceptance.bonus_token)
