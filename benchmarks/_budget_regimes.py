"""Regimes that budgets race in: texts of the trained pair, and a planted rank that knows its odds.

A budget is worth what the drafter's probabilities say only if they are right. A `PlantedDrafter` is
certain and, behind its commit length, certainly wrong: no policy has anything to weigh there. A
`CalibratedDrafter` puts `NUM_RANKS` candidates at each depth with probabilities c, c (1 - c),
c (1 - c)^2, ..., and the token that the target will say is each of them just so often. What a
tree of n nodes commits is then known in the mean: the root's token and its nodes' path
probabilities. Every step of such a regime is as sure as all others, so one fixed budget is the best
there, and an adaptive one can at most find it; only on texts do steps differ.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch

from engine import (
    PlantedDrafter,
    PlantedTarget,
    Sampling,
    begin_planted,
    build_from_log_probs,
    sample_text,
)
from engine.planted import PLANT_MARGIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from engine import DraftModel, Engine, Preset, StepBatch, StepResult, Target
    from engine.drafter import DraftRequest

NUM_RANKS: Final = 8  # candidates of a depth; with the least sure drafter a sixth lies behind them
TEXT_TOKENS: Final = 256  # bytes of a prompt
MOST_WINDOWS: Final = 4  # of a text: so many drafts keep their graphs


class CalibratedDrafter(PlantedDrafter):
    """Wraps a drafter so that its probabilities are right.

    Parameters
    ----------
    drafter : DraftModel
        Its whole forward runs for every block.
    continuation : sequence of token ids
        What the target appends to the only prompt.
    confidence : float
        Between 0 and 1: c, but for what lies behind the last candidate.
    seed : int
        Of the ranks at which the right tokens stand, drawn anew for every block: steps that are
        taken back and run again are other steps.
    """

    def __init__(
        self, drafter: DraftModel, continuation: Sequence[int], confidence: float, seed: int = 0
    ) -> None:
        super().__init__(drafter, [continuation], drafter.config.block_size)
        self._weights = rank_probs(confidence)
        self._source = random.Random(seed)  # noqa: S311 - any ranks will do
        self._decay = math.log1p(-confidence)

    def block_tokens(self, request: DraftRequest) -> list[list[int]]:
        """Return each root and the first candidate of each depth; errors are as in the base."""
        vocab_size = self.config.vocab_size
        blocks = super().block_tokens(request)
        for block in blocks:
            ranks = self._source.choices(range(NUM_RANKS), self._weights, k=len(block) - 1)
            block[1:] = [(t + r) % vocab_size for t, r in zip(block[1:], ranks, strict=True)]
        return blocks

    def _steer(self, logits: Tensor, tokens: Tensor) -> None:
        """Raise the candidates of each depth: the first, the token below it, and so on."""
        ranks = torch.arange(NUM_RANKS, device=logits.device)
        candidates = (tokens[:, 1:, None] - ranks) % logits.shape[-1]  # [N, horizon, ranks]
        raised = logits.amax(-1, keepdim=True) + PLANT_MARGIN + ranks * self._decay
        logits.scatter_(-1, candidates, raised)


def rank_probs(confidence: float) -> list[float]:
    """Return the probability of each candidate of a depth."""
    weights = [(1.0 - confidence) ** rank for rank in range(NUM_RANKS)]
    return [weight / sum(weights) for weight in weights]


def expected_commits(confidence: float, horizon: int, most_nodes: int) -> list[float]:
    """Return the mean commit length of trees of 0, 1, ..., `most_nodes` nodes."""
    log_probs = torch.tensor(rank_probs(confidence)).log().expand(horizon, -1).contiguous()
    tokens = torch.arange(NUM_RANKS).expand(horizon, -1).contiguous()
    tree = build_from_log_probs(log_probs, tokens, root_token=0, node_budget=most_nodes)
    return list(accumulate(tree.path_log_probs[1:].exp().tolist(), initial=1.0))


@dataclass(frozen=True, slots=True)
class Regime:
    """What engines with different budgets decode, and what a step of theirs is worth."""

    name: str
    target: Target
    drafter: DraftModel
    context: int
    max_context: int
    begin: Callable[[Engine], list[StepBatch]]  # what a run decodes, one behind the other
    is_done: Callable[[StepBatch, int], bool]  # after so many steps
    worth: Callable[[StepResult], float]  # tokens


def text_regime(models: Preset, text: str, temperature: float, windows: int, new: int) -> Regime:
    """Return the regime of a held-out text: windows of it, each continued by `new` tokens."""
    source = sample_text(text)
    stride = (len(source) - TEXT_TOKENS) // max(windows, 1)
    prompts = [list(source[n * stride : n * stride + TEXT_TOKENS]) for n in range(windows)]

    def begin(engine: Engine) -> list[StepBatch]:
        sampling = Sampling(temperature=temperature)
        return [engine.prefill([prompt], sampling=sampling) for prompt in prompts]

    return Regime(
        name=f"{text} T={temperature:g}",
        target=models.target,
        drafter=models.drafter,
        context=TEXT_TOKENS,
        max_context=TEXT_TOKENS + new + 2 * models.drafter.config.block_size,
        begin=begin,
        is_done=lambda batch, _: len(batch.sequences[0].new_token_ids) >= new,
        worth=lambda result: float(sum(result.commit_lengths)),
    )


def planted_regime(
    models: Preset, context: int, confidence: float, steps: int, most_nodes: int
) -> Regime:
    """Return the regime of a planted context and a calibrated drafter: `steps` steps a run.

    A step is worth what its tree commits in the mean, so that few steps say much.
    """
    config = models.drafter.config
    ahead = (steps + 2) * config.block_size
    target = PlantedTarget(models.target)
    continuation = target.continuation(context, ahead)
    commits = expected_commits(confidence, config.horizon, most_nodes)

    def begin(engine: Engine) -> list[StepBatch]:
        return [begin_planted(engine, [context - 1])]

    return Regime(
        name=f"context {context} confidence {confidence:g}",
        target=target,
        drafter=CalibratedDrafter(models.drafter, continuation, confidence),
        context=context,
        max_context=context + ahead,
        begin=begin,
        is_done=lambda _, num_steps: num_steps >= steps,
        worth=lambda result: sum(commits[nodes] for nodes in result.num_nodes),
    )
