"""One step of the engine, over context, pages, commit regime and attention backend.

`Step` runs the trained `tiny` pair in float32, so that rounding does not decide the next token. The
prompt is random bytes, on which no drafter could choose its commit length: it is planted. Its whole
forward runs, then its logits are steered so that every step commits exactly `commit_length` tokens
of the target's own continuation (`generation.py` lets the text decide).

`RankStep` runs one rank of Kimi K2.6 in bfloat16, on a GPU that has room for it and in the profile
`full` only. Its weights are random, its prompt's rows were never computed, the tokens it says are
drawn beforehand: they mean nothing, what it reads and launches is a step's, collectives excepted.
Its rows choose experts as if independently, as many of them as balanced routers let them.
`CutRankStep` is the same of its first four layers, which a shorter run has time for.

All samples of a case time the same step again, from a snapshot.
"""

from typing import ClassVar

import torch

from benchmarks._device import DEVICE
from benchmarks._regimes import PROFILE, cut_step_axes, rank_step_axes, step_axes
from benchmarks._step_case import _StepSuite
from engine import (
    Engine,
    EngineConfig,
    PlantedDrafter,
    PlantedTarget,
    StepBatch,
    begin_planted,
    preset,
    resident_bytes,
)
from engine.presets import RANKS, Rank, random_rank

NODE_BUDGET = 16
PREFILL_CHUNKS = {"cpu": 64, "cuda": 512}  # small ones fit a core's caches, large ones fill a GPU
AXES = step_axes(PROFILE, DEVICE)
RANK_AXES = rank_step_axes(PROFILE, DEVICE)
CUT_AXES = cut_step_axes(PROFILE, DEVICE)
RANK_NODE_BUDGET = 8  # 9 tokens: what a mixture of experts can afford to verify
HYBRID_PAGE_SIZE = 64  # trees leave the pages at this size only; pages of others differ little
PASS_BYTES = 8 << 30  # room for what a pass needs beside what an engine keeps


class Step(_StepSuite):
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

    def time_step(
        self, context_tokens: int, page_size: int, commit_length: int, attention_backend: str
    ) -> None:
        del context_tokens, page_size, commit_length, attention_backend
        self.engine.step(self.batch)


class RankStep(_StepSuite):
    """Draft, build, verify and commit once on one rank, behind rows that nobody computed."""

    version = "2"  # in 1 the rows of a step chose the same experts
    rounds = min(PROFILE.rounds, 2)  # its process draws 78 GB of weights
    params: ClassVar[tuple[list[int], list[int], list[str], list[int], list[str]]] = (
        RANK_AXES.context_tokens,
        RANK_AXES.page_sizes,
        RANK_AXES.cache_layouts,
        RANK_AXES.commit_lengths,
        RANK_AXES.attention_backends,
    )
    param_names: ClassVar[list[str]] = [
        "context_tokens",
        "page_size",
        "cache_layout",
        "commit_length",
        "attention_backend",
    ]
    rank: ClassVar[Rank] = RANKS["kimi-k2.6-tp8-rank"]
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    moe_backend: ClassVar[str] = "cuda" if DEVICE == "cuda" else "reference"
    tree_backend: ClassVar[str] = "cuda" if DEVICE == "cuda" else "host"
    graphs: ClassVar[str] = "cuda" if DEVICE == "cuda" else "off"

    def build(
        self,
        context_tokens: int,
        page_size: int,
        cache_layout: str,
        commit_length: int,
        attention_backend: str,
    ) -> None:
        if cache_layout == "hybrid" and page_size != HYBRID_PAGE_SIZE:
            raise NotImplementedError(f"hybrid: of pages of {HYBRID_PAGE_SIZE} rows only")
        self.context_tokens, self.commit_length = context_tokens, commit_length
        config = EngineConfig(
            node_budget=RANK_NODE_BUDGET,
            page_size=page_size,
            cache_layout=cache_layout,
            attention_backend=attention_backend,
            moe_backend=self.moe_backend,
            tree_backend=self.tree_backend,
            graphs=self.graphs,
            max_context=context_tokens + 4 * self.rank.drafter.block_size,
        )
        self.check_room(config)
        models = random_rank(self.rank, device=DEVICE, dtype=self.dtype, seed=0)
        target, num_rows = PlantedTarget(models.target), context_tokens - commit_length
        continuation = target.continuation(1 + num_rows, 4 * self.rank.drafter.block_size)
        drafter = PlantedDrafter(models.drafter, [continuation], commit_length)
        self.engine = Engine(target, drafter, config)
        # The first step commits `commit_length` rows: the timed one finds `context_tokens` of them.
        self.batch = begin_planted(self.engine, [num_rows])
        self.engine.step(self.batch)
        self.snapshot = self.engine.snapshot(self.batch)

    def check_room(self, config: EngineConfig) -> None:
        """Skip a case that this GPU has no room for; asv's word for it is NotImplementedError."""
        if DEVICE == "cpu":
            return
        shapes = random_rank(self.rank, device="meta", dtype=self.dtype, seed=0)
        needed = resident_bytes(shapes.target, shapes.drafter, config).total + PASS_BYTES
        free, _ = torch.cuda.mem_get_info()
        if needed > free:
            raise NotImplementedError(f"rank: needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} free")

    def time_step(
        self,
        context_tokens: int,
        page_size: int,
        cache_layout: str,
        commit_length: int,
        attention_backend: str,
    ) -> None:
        del context_tokens, page_size, cache_layout, commit_length, attention_backend
        self.engine.step(self.batch)


class CutRankStep(RankStep):
    """Draft, build, verify and commit once on the first four layers of one rank."""

    version = "2"  # as above
    rounds = PROFILE.rounds
    params: ClassVar[tuple[list[int], list[int], list[str], list[int], list[str]]] = (
        CUT_AXES.context_tokens,
        CUT_AXES.page_sizes,
        CUT_AXES.cache_layouts,
        CUT_AXES.commit_lengths,
        CUT_AXES.attention_backends,
    )
    rank: ClassVar[Rank] = RANKS["kimi-k2.6-tp8-rank-4-layers"]


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
