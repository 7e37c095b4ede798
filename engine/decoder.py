"""The engine: prefill prompts, then step. Read this first; all else is a detail of four stages.

::

    draft    the drafter proposes a distribution for each depth of the next block
    build    the heaviest prefixes become a draft tree under the node budget
    verify   one target pass gives the target's own token after every node
    commit   the path the target agrees with stays, and its next token becomes the root

What is generated is the target's alone: every token was chosen from its logits at its own prefix.
The drafter decides how many of them one step commits. The engine knows nothing about text, clocks
or other engines; between two steps all state is in the `StepBatch`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Snapshot, StepBatch, StepResult
from engine.config import EngineConfig, check_backend
from engine.draft_tree import Acceptance, DraftTree, accept_batch, build_draft_tree
from engine.drafter import DraftModel, TapRows, check_pair
from engine.errors import ConfigError, RequestError
from engine.kernels import OPS
from engine.kv_cache import CacheShape, LatentCache
from engine.observer import StageObserver, stage
from engine.sampling import Sampling, choose_tokens, chosen_log_probs
from engine.sequence import Generation, SequenceState, cut_at_stop
from engine.target import Target, check_tokens
from engine.verify import append_chain, plan_pass


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What the target said after each node of each tree; padding means nothing."""

    target_tokens: Tensor  # [N, T] int64
    log_probs: Tensor  # [N, T], of those tokens
    taps: Tensor  # [M, num_taps * hidden], packed tree by tree
    offsets: tuple[int, ...]  # packed row of each tree's root


class Engine:
    """Decodes with a target and a drafter.

    Parameters
    ----------
    target : Target
    drafter : DraftModel
        A `Drafter` of this target, or a wrapper around one.
    config : EngineConfig
        `num_pages` is the size of each batch's pool.
    observer : StageObserver, optional
        Told of the stages of every step.
    page_fill : float, optional
        What cache rows hold while they are not committed; NaN makes a read of one visible.

    Raises
    ------
    BackendError
        The attention backend does not exist.
    ConfigError
        Drafter and target do not belong together, or `max_context` exceeds the target's.
    """

    def __init__(
        self,
        target: Target,
        drafter: DraftModel,
        config: EngineConfig,
        *,
        observer: StageObserver | None = None,
        page_fill: float | None = None,
    ) -> None:
        check_backend(config.attention_backend, OPS["tree_attention"].implementations)
        check_pair(drafter.config, target.config)
        longest = target.config.max_position_embeddings
        if config.max_context > longest:
            raise ConfigError(
                f"max_context: expected at most {longest}, got {config.max_context} "
                "(the target's max_position_embeddings)"
            )
        self.target = target
        self.drafter = drafter
        self.config = config
        self.observer = observer
        self.page_fill = page_fill

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | Sequence[int] = 0,
        stop_token_ids: Collection[int] = (),
    ) -> list[Generation]:
        """Continue every prompt until a stop token or `max_new_tokens`.

        Parameters
        ----------
        prompts : N sequences of token ids, none empty
        max_new_tokens : int
            At least 1.
        temperature : float
            0 is greedy; otherwise the noise is a function of seed, position and token alone.
        seed : int, or one for each prompt
            Equal prompts with equal seeds have equal continuations.
        stop_token_ids : collection of int
            The first of them ends a sequence and is its last token.

        Raises
        ------
        RequestError
            A prompt or a parameter cannot be served, or prompt and new tokens exceed
            `max_context`.
        """
        if max_new_tokens < 1:
            raise RequestError(
                f"max_new_tokens: expected at least 1, got {max_new_tokens} (nothing to generate)"
            )
        self._check_prompts(prompts, max_new_tokens)
        batch = self.prefill(prompts, temperature=temperature, seed=seed)
        finished: dict[int, Generation] = {}
        while batch.sequences:
            self.step(batch)
            going = []
            for index, sequence in enumerate(batch.sequences):
                generation = _finish(sequence, stop_token_ids, max_new_tokens)
                if generation is None:
                    going.append(index)
                else:
                    finished[sequence.seq] = generation
            batch.keep(going)
        return [finished[seq] for seq in range(len(prompts))]

    def step(self, batch: StepBatch) -> StepResult:
        """Run one step: draft, build, verify, commit."""
        draft_logits = self.draft(batch)
        trees = self.build(batch, draft_logits)
        verified = self.verify(batch, trees)
        appended = self.commit(batch, trees, verified)
        return StepResult(
            token_ids=appended,
            num_nodes=tuple(tree.num_nodes for tree in trees),
            stage_seconds=None if self.observer is None else self.observer.seconds(),
        )

    @stage
    def draft(self, batch: StepBatch) -> Tensor:
        """Complete the drafter's context, then draft the next block, [N, horizon, V] float32."""
        if batch.pending is not None:
            self.drafter.extend(batch.context, batch.pending)
            batch.pending = None
        return self.drafter.draft(batch.context, batch.request())

    @stage
    def build(self, batch: StepBatch, draft_logits: Tensor) -> list[DraftTree]:
        """Build one draft tree for each sequence under the node budget."""
        budget = self.config.node_budget
        return [
            build_draft_tree(logits, root_token=sequence.root_token, node_budget=budget)
            for sequence, logits in zip(batch.sequences, draft_logits, strict=True)
        ]

    @stage
    def verify(self, batch: StepBatch, trees: Sequence[DraftTree]) -> Verified:
        """Run the target over all trees and choose its token after every node."""
        rows = plan_pass(batch.cache, batch.seqs, trees, self.config.attention_backend)
        passed = self.target.forward(rows, self.drafter.config.target_layer_ids)
        logits = self.target.head(passed.hidden)
        seeds = rows.repeat([sequence.seed for sequence in batch.sequences])
        positions = rows.positions + 1  # of the token chosen after each row
        tokens = choose_tokens(logits, positions, seeds, batch.sampling)
        return Verified(
            target_tokens=rows.attention.pad(tokens),
            log_probs=rows.attention.pad(chosen_log_probs(logits, tokens)),
            taps=passed.taps,
            offsets=rows.offsets,
        )

    @stage
    def commit(
        self, batch: StepBatch, trees: Sequence[DraftTree], verified: Verified
    ) -> tuple[tuple[int, ...], ...]:
        """Keep what the target agreed with: tokens, cache rows and taps of each sequence."""
        accepted = accept_batch(trees, verified.target_tokens)
        log_probs = verified.log_probs.tolist()
        appended, tap_rows = [], []
        for n, (sequence, acceptance) in enumerate(zip(batch.sequences, accepted, strict=True)):
            kept = [0, *acceptance.path.tolist()]
            batch.cache.commit(sequence.seq, kept[1:])
            tokens = _appended(trees[n], acceptance)
            sequence.append_step(tokens, [log_probs[n][node] for node in kept])
            tap_rows += [verified.offsets[n] + node for node in kept]
            appended.append(tokens)
        chosen = torch.tensor(tap_rows, device=verified.taps.device)
        counts = tuple(acceptance.commit_length for acceptance in accepted)
        batch.pending = TapRows(verified.taps.index_select(0, chosen), counts)
        return tuple(appended)

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float = 0.0,
        seed: int | Sequence[int] = 0,
    ) -> StepBatch:
        """Start a batch: every prompt token but the last gets its cache and context rows.

        The last token of a prompt is its first root. Parameters and errors are as in `generate`.
        """
        self._check_prompts(prompts, 0)
        seeds = [seed] * len(prompts) if isinstance(seed, int) else list(seed)
        if len(seeds) != len(prompts):
            raise RequestError(
                f"seed: expected one, or one for each of {len(prompts)} prompts, got {len(seeds)} "
                "(the noise of a sequence is its own)"
            )
        sampling = Sampling(temperature=temperature)
        sequences = [
            SequenceState(seq, list(prompt), len(prompt), seed=seeds[seq], sampling=sampling)
            for seq, prompt in enumerate(prompts)
        ]
        batch = StepBatch(
            sequences=sequences,
            sampling=sampling,
            cache=self._new_cache(len(prompts)),
            context=self.drafter.new_context(len(prompts)),
        )
        for index in range(len(prompts)):
            self._prefill_sequence(batch, index)
        return batch

    def snapshot(self, batch: StepBatch) -> Snapshot:
        """Return the present point of `batch`; nothing is copied."""
        return batch.snapshot()

    def rewind(self, batch: StepBatch, snapshot: Snapshot) -> None:
        """Bring `batch` back to `snapshot`, so that the same step can be run again."""
        batch.rewind(snapshot)

    def release(self, batch: StepBatch) -> None:
        """End all sequences of `batch` and give back their pages."""
        batch.keep([])

    def _prefill_sequence(self, batch: StepBatch, index: int) -> None:
        """Run the prompt in chunks, each a tree that is one chain."""
        sequence = batch.sequences[index]
        batch.cache.reserve(sequence.seq, 0)
        counts = [0] * len(batch.sequences)
        end, size = sequence.committed_length, self.config.prefill_chunk
        for start in range(0, end, size):
            passed = append_chain(
                self.target,
                batch.cache,
                sequence.seq,
                sequence.token_ids[start : min(start + size, end)],
                backend=self.config.attention_backend,
                tap_ids=self.drafter.config.target_layer_ids,
            )
            counts[index] = len(passed.taps)
            self.drafter.extend(batch.context, TapRows(passed.taps, tuple(counts)))

    def _new_cache(self, num_seqs: int) -> LatentCache:
        config = self.config
        longest = -(-(config.max_context + config.node_budget) // config.page_size)
        shape = CacheShape(
            num_layers=self.target.config.num_hidden_layers,
            num_pages=config.num_pages or num_seqs * longest,
            page_size=config.page_size,
            row_dim=self.target.config.latent_dim,
        )
        target = self.target
        return LatentCache(shape, dtype=target.dtype, device=target.device, fill=self.page_fill)

    def _check_prompts(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if not prompts:
            raise RequestError("prompts: expected at least one, got none (an empty batch)")
        for prompt in prompts:
            check_tokens(prompt, self.target.config.vocab_size)
            if len(prompt) + max_new_tokens > self.config.max_context:
                raise RequestError(
                    f"prompt and new tokens: expected at most {self.config.max_context}, got "
                    f"{len(prompt)} + {max_new_tokens} (max_context of the engine)"
                )


def _appended(tree: DraftTree, acceptance: Acceptance) -> tuple[int, ...]:
    """Return the tokens a step appends: those of the accepted path, then the bonus token."""
    path = acceptance.path.long()
    return (*tree.token_ids.index_select(0, path).tolist(), acceptance.bonus_token)


def _finish(
    sequence: SequenceState, stop_token_ids: Collection[int], max_new_tokens: int
) -> Generation | None:
    """Return what is handed out if the last step ended the sequence, cut where it ended."""
    before = len(sequence.new_token_ids) - sequence.commit_lengths[-1]
    last = sequence.new_token_ids[before:]
    cut = cut_at_stop(last, stop_token_ids, room=max_new_tokens - before)
    if cut.finish_reason is None:
        return None
    kept = before + cut.num_tokens
    return Generation(
        token_ids=sequence.new_token_ids[:kept],
        commit_lengths=tuple(sequence.commit_lengths),
        logprobs=tuple(sequence.logprobs[:kept]),
        finish_reason=cut.finish_reason,
    )
