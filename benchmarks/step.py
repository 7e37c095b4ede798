"""One step of the engine on the trained `tiny` pair, over context, page size and commit regime.

The prompt is random bytes, on which no drafter could choose its commit length: it is planted. Its
whole forward runs, then its logits are steered so that every step commits exactly `commit_length`
tokens of the target's own continuation (`generation.py` lets the text decide). All samples of a
case time the same step again, from a snapshot. float32, so that rounding does not decide the next
token.

Stage times come from a few steps of their own before the samples: an observer waits for the device
at both ends of a stage, so stages may sum to more than the step.
"""

import statistics
from collections import defaultdict
from typing import ClassVar

import torch

from benchmarks._device import DEVICE
from benchmarks._identity import SuiteError
from benchmarks._regimes import PROFILE, step_axes
from benchmarks._suite import CaseFacts, _Suite
from engine import (
    Engine,
    EngineConfig,
    PlantedDrafter,
    StageClock,
    StepBatch,
    preset,
    step_bytes,
)
from engine.draft_tree import WORD_BITS
from engine.kernels import launched_programs

NODE_BUDGET = 16
OBSERVED_STEPS = 5
PREFILL_CHUNKS = {"cpu": 64, "cuda": 512}  # small ones fit a core's caches, large ones fill a GPU
AXES = step_axes(PROFILE, DEVICE)


class Step(_Suite):
    """Draft, build, verify and commit once for one sequence of `context_tokens` committed rows."""

    version = "2"  # 1 was a smaller pair with random weights
    params: ClassVar[tuple[list[int], list[int], list[int], list[str]]] = (
        AXES.context_tokens,
        AXES.page_sizes,
        AXES.commit_lengths,
        AXES.attention_backends,
    )
    param_names: ClassVar[list[str]] = [
        "context_tokens",
        "page_size",
        "commit_length",
        "attention_backend",
    ]

    def build(
        self, context_tokens: int, page_size: int, commit_length: int, attention_backend: str
    ) -> None:
        self.context_tokens, self.commit_length = context_tokens, commit_length
        models = preset("tiny", device=DEVICE, dtype=torch.float32)
        ahead = 2 * models.drafter.config.block_size
        config = EngineConfig(
            node_budget=NODE_BUDGET,
            page_size=page_size,
            attention_backend=attention_backend,
            max_context=context_tokens + NODE_BUDGET + 2 * ahead,
            prefill_chunk=PREFILL_CHUNKS[DEVICE],
        )
        # The first step commits `commit_length` rows: the timed one finds `context_tokens` of them.
        prompt = _prompt(context_tokens + 1 - commit_length)
        unplanted = Engine(models.target, models.drafter, config)
        self.batch = unplanted.prefill([prompt])
        continuation = _continue(unplanted, self.batch, ahead)
        drafter = PlantedDrafter(models.drafter, [continuation], commit_length)
        self.engine = Engine(models.target, drafter, config)
        self.engine.step(self.batch)  # it also completes the drafter's context of the whole prompt
        self.snapshot = self.engine.snapshot(self.batch)

    def reset(self) -> None:
        self.engine.rewind(self.batch, self.snapshot)

    def facts(self) -> CaseFacts:
        """Run some steps with an observer; refuse a case that is not in its commit regime."""
        clock = StageClock(self.engine.target.device)
        self.engine.observer = clock
        times: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(OBSERVED_STEPS):
            self.reset()
            result = self.engine.step(self.batch)
            for stage, seconds in (result.stage_seconds or {}).items():
                times[stage].append(seconds)
        self.engine.observer = None
        if result.commit_lengths != (self.commit_length,):
            raise SuiteError(
                f"commit length: expected {self.commit_length}, got {result.commit_lengths} "
                "(the drafter was planted for it)"
            )
        tree_size = 1 + result.num_nodes[0]
        cost = step_bytes(self.engine.target, self.engine.drafter, self.context_tokens, tree_size)
        return CaseFacts(
            context_tokens=self.context_tokens,
            bytes=cost.bytes,
            kv_bytes=cost.kv_bytes,
            flops=cost.flops,
            programs=self.num_programs(self.engine.config.attention_backend, tree_size),
            stage_seconds={stage: statistics.median(values) for stage, values in times.items()},
            commit_length=float(self.commit_length),
        )

    def num_programs(self, backend: str, tree_size: int) -> int | None:
        """Count the programs one layer's verify attention is launched with; None without any."""
        if backend == "reference":
            return None
        config, cache = self.engine.target.config, self.batch.cache
        words = -(-tree_size // WORD_BITS)
        return launched_programs(
            backend=backend,
            q=torch.zeros(1, tree_size, config.num_attention_heads, config.latent_dim).to(DEVICE),
            kv_pages=cache.layer(0),
            page_table=cache.page_table((0,)),
            context_lens=torch.tensor([self.context_tokens], dtype=torch.int32, device=DEVICE),
            ancestor_bits=torch.zeros(1, tree_size, words, dtype=torch.int32, device=DEVICE),
            tree_sizes=torch.tensor([tree_size], dtype=torch.int32, device=DEVICE),
            softmax_scale=config.softmax_scale,
            value_dim=config.kv_lora_rank,
        )

    def time_step(
        self, context_tokens: int, page_size: int, commit_length: int, attention_backend: str
    ) -> None:
        del context_tokens, page_size, commit_length, attention_backend
        self.engine.step(self.batch)


def _continue(engine: Engine, batch: StepBatch, num_tokens: int) -> list[int]:
    """Return at least `num_tokens` tokens of the target's greedy continuation; batch is as it was.

    A greedy engine's output is the target's own whatever its drafter says, so that the prompt is
    prefilled once and not again for a recording.
    """
    start = engine.snapshot(batch)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += engine.step(batch).token_ids[0]
    engine.rewind(batch, start)
    return tokens


def _prompt(length: int) -> list[int]:
    """Return random bytes, the same for every run."""
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(0, 256, (length,), generator=generator).tolist()
    return tokens
