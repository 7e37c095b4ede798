"""Commit lengths and contexts that are chosen, so that a regime can be timed without its text.

A planted drafter does all of its work; afterwards its logits are steered with what the target is
known to say: the next tokens of its greedy continuation become certain, and the one after them is
banned, so that the target must disagree exactly there.

What a target will say can be recorded. In low precision, though, random weights give near ties, and
what was said in a pass of one shape may not come true in another. A planted target does all of its
work, too, and then says drawn tokens, one for each position: its continuation is known beforehand,
and a commit length is a matter of no rounding.

A planted context is rows that nobody computed: a step behind them reads as much, in less time than
a long prompt takes to prefill. What it says means nothing.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.config import DrafterConfig
from engine.context_rows import ContextRows
from engine.decoder import Engine
from engine.device import upload
from engine.drafter import BlockInputs, Drafted, DraftModel, DraftRequest, TapRows
from engine.drafter_context import DrafterContext
from engine.errors import ConfigError, RequestError
from engine.kv_cache import CacheShape, LatentCache
from engine.sampling import GREEDY, choose_tokens
from engine.target import Target, check_tokens
from engine.verify import REFERENCE, Backends, append_chain

PLANT_MARGIN = 64.0  # above a row's largest logit: in float32 all other probability vanishes
PREFILL_CHUNK = 64
PAGE_SIZE = 64
PLANTED_ROWS = 16384  # rows of a context made at a time


def record_continuation(
    target: Target, prompt: Sequence[int], num_tokens: int, *, backends: Backends = REFERENCE
) -> list[int]:
    """Return the `num_tokens` tokens that greedy decoding appends to `prompt`, one pass for each.

    Raises
    ------
    RequestError
        The prompt is empty or leaves the vocabulary.
    """
    check_tokens(prompt, target.config.vocab_size)
    num_pages = -(-(len(prompt) + num_tokens) // PAGE_SIZE)
    shape = CacheShape(
        target.config.num_hidden_layers, num_pages, PAGE_SIZE, target.config.latent_dim
    )
    cache = LatentCache(shape, dtype=target.dtype, device=target.device)

    def run(token_ids: Sequence[int]) -> Tensor:
        passed = append_chain(target, cache, 0, token_ids, backends=backends, tap_ids=())
        return passed.hidden[-1:]

    known = prompt[:-1]
    for start in range(0, len(known), PREFILL_CHUNK):
        run(known[start : start + PREFILL_CHUNK])
    tokens = [prompt[-1]]
    for position in range(len(prompt), len(prompt) + num_tokens):
        at = torch.tensor([position], device=target.device)
        logits = target.head(run(tokens[-1:]))
        tokens.append(int(choose_tokens(logits, at, 0, GREEDY)))
    return tokens[1:]


class PlantedTarget(Target):
    """A target that an engine's greedy steps hear say drawn tokens, the same for every sequence.

    Its tensors are those of `target`, its passes and its head run as ever; then the logit of the
    token drawn for the next position is raised above all others of its row. Ties, rounding and the
    shape of a pass decide nothing; what is no number stays none. Graphs capture it as they capture
    the head. A prompt's own tokens are not looked at.

    Parameters
    ----------
    target : Target
    seed : int
        Of the tokens.
    """

    def __init__(self, target: Target, *, seed: int = 0) -> None:
        vars(self).update(vars(target))  # the same model, whatever it keeps besides its tensors
        draws = torch.Generator().manual_seed(seed)
        shape = (self.config.max_position_embeddings + 1,)
        self.tokens = torch.randint(self.config.vocab_size, shape, generator=draws)
        self._following = upload(self.tokens[1:], self.device)  # of each position

    def continuation(self, prompt_length: int, num_tokens: int) -> list[int]:
        """Return what greedy steps append to a prompt of `prompt_length` tokens."""
        tokens: list[int] = self.tokens[prompt_length : prompt_length + num_tokens].tolist()
        return tokens

    def steer(self, logits: Tensor, positions: Tensor) -> None:
        """Raise in `logits` [M, V] (mutated) what is said behind `positions` [M]."""
        said = self._following[positions].unsqueeze(1)
        logits.scatter_(1, said, logits.amax(1, keepdim=True) + PLANT_MARGIN)


class PlantedDrafter:
    """Wraps a drafter so that every greedy step commits exactly `commit_length` tokens.

    Parameters
    ----------
    drafter : DraftModel
        Its whole forward runs for every block.
    continuations : sequence, or mapping from a prompt's index in its batch, of token ids
        What the target appends to each prompt, as `record_continuation` or a `PlantedTarget` gives
        it; each block looks at most `block_size` tokens ahead.
    commit_length : int
        1..block_size. The engine's node budget must be at least `commit_length - 1`: a smaller
        tree has no room for the path.

    Raises
    ------
    ConfigError
        `commit_length` is outside 1..block_size.
    """

    def __init__(
        self,
        drafter: DraftModel,
        continuations: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
        commit_length: int,
    ) -> None:
        if not 1 <= commit_length <= drafter.config.block_size:
            raise ConfigError(
                f"commit_length: expected 1..{drafter.config.block_size}, got {commit_length} "
                "(accepted drafts of one block and the bonus token)"
            )
        self.drafter = drafter
        self.continuations = continuations
        self.commit_length = commit_length

    @property
    def config(self) -> DrafterConfig:
        """The wrapped drafter's."""
        return self.drafter.config

    def new_context(self, num_seqs: int, *, max_context: int | None = None) -> DrafterContext:
        """Return the wrapped drafter's empty context."""
        return self.drafter.new_context(num_seqs, max_context=max_context)

    def extend(self, context: DrafterContext, rows: TapRows) -> Tensor:
        """Extend the wrapped drafter's context (mutated) and return the features."""
        return self.drafter.extend(context, rows)

    def extend_features(
        self, context: DrafterContext, features: Tensor, counts: Sequence[int]
    ) -> None:
        """Extend the wrapped drafter's context (mutated) by known features."""
        self.drafter.extend_features(context, features, counts)

    def draft(self, context: DrafterContext, request: DraftRequest) -> Tensor:
        """Draft with the wrapped drafter, then steer its logits, [N, horizon, V] float32.

        Raises
        ------
        RequestError
            A continuation is missing or too short for this block.
        """
        logits = self.drafter.draft(context, request)
        tokens = torch.tensor(self.block_tokens(request))
        self._steer(logits, upload(tokens, logits.device))
        return logits

    def block_tokens(self, request: DraftRequest) -> list[list[int]]:
        """Return each root, the tokens to plant behind it and, if in reach, the one to ban.

        Raises
        ------
        RequestError
            A continuation is missing or too short for this block.
        """
        ahead = map(self._ahead, request.sequence_ids, request.num_generated)
        return [[root, *row] for root, row in zip(request.root_tokens, ahead, strict=True)]

    def complete_and_draft(self, rows: ContextRows, inputs: BlockInputs) -> Drafted:
        """Draft with the wrapped drafter, then steer its logits."""
        drafted = self.drafter.complete_and_draft(rows, inputs)
        self._steer(drafted.logits, inputs.tokens)
        return drafted

    def _steer(self, logits: Tensor, tokens: Tensor) -> None:
        """Plant what follows the roots in `tokens` [N, 1 + ahead] in the logits (mutated)."""
        wanted, num_accepted = tokens[:, 1:, None], self.commit_length - 1  # [N, ahead, 1]
        certain = logits.amax(-1, keepdim=True)[:, :num_accepted] + PLANT_MARGIN
        logits[:, :num_accepted].scatter_(-1, wanted[:, :num_accepted], certain)
        logits[:, num_accepted : self.commit_length].scatter_(
            -1, wanted[:, num_accepted:], -torch.inf
        )

    def _ahead(self, sequence_id: int, num_generated: int) -> list[int]:
        """Return the tokens to plant and, if the block reaches that far, the one to ban."""
        count = min(self.commit_length, self.config.horizon)
        known = self._continuation(sequence_id)
        ahead = list(known[num_generated : num_generated + count])
        if len(ahead) < count:
            raise RequestError(
                f"continuation of sequence {sequence_id}: expected at least "
                f"{num_generated + count} tokens, got {len(known)} (record more: a block looks "
                f"{count} tokens ahead)"
            )
        return ahead

    def _continuation(self, sequence_id: int) -> Sequence[int]:
        try:
            return self.continuations[sequence_id]
        except LookupError as error:
            raise RequestError(
                f"continuation of sequence {sequence_id}: expected one for each prompt, got "
                f"{len(self.continuations)} (nothing to plant)"
            ) from error


def begin_planted(engine: Engine, num_tokens: Sequence[int], *, seed: int = 0) -> StepBatch:
    """Start a batch as if prompts had been prefilled, its rows random and none computed.

    Parameters
    ----------
    engine : Engine
    num_tokens : sequence of N int
        Committed rows of each sequence. Rows of cache and drafter context have the size that
        normalised ones have.
    seed : int
        Of the tokens, and of the rows, which differ between kinds of devices.

    Raises
    ------
    ConfigError
        The engine reuses prefixes: later prompts would start from these rows.
    RequestError
        A sequence exceeds `max_context`.
    OutOfPagesError
        The pool is too small; the pages of this batch are given back.
    """
    if engine.config.prefix_reuse:
        raise ConfigError("prefix_reuse: expected False, got True (planted rows are no prompt's)")
    source = random.Random(seed)  # noqa: S311 - any tokens will do, but always the same
    vocabulary = range(engine.target.config.vocab_size)
    batch = engine.begin([source.choices(vocabulary, k=count + 1) for count in num_tokens])
    draws = torch.Generator(engine.target.device).manual_seed(seed)
    with ExitStack() as on_failure:
        on_failure.callback(batch.keep, [])
        for index in range(len(num_tokens)):
            _plant_rows(engine, batch, index, draws)
        on_failure.pop_all()
    return batch


def _plant_rows(engine: Engine, batch: StepBatch, index: int, draws: torch.Generator) -> None:
    """Commit random rows of one sequence to the cache and the drafter's context."""
    target, cache, drafter = engine.target, batch.cache, engine.drafter
    sequence = batch.sequences[index]
    cache.begin(sequence.seq, ())

    def normal(num_rows: int, width: int) -> Tensor:
        drawn = torch.randn(num_rows, width, generator=draws, device=target.device)
        return drawn.to(target.dtype)

    for first in range(0, sequence.committed_length, PLANTED_ROWS):
        count = min(PLANTED_ROWS, sequence.committed_length - first)
        cache.reserve(sequence.seq, count)
        slots = cache.slots(sequence.seq, range(first, first + count))
        for layer in range(target.config.num_hidden_layers):
            cache.write(layer, slots, normal(count, target.config.latent_dim))
        cache.advance(sequence.seq, count)
        if drafter is not None and batch.context is not None:
            counts = [count if n == index else 0 for n in range(len(batch.sequences))]
            features = normal(count, target.config.hidden_size)
            drafter.extend_features(batch.context, features, counts)
