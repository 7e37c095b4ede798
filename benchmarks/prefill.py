"""Reading a prompt, over context, pages and attention backend.

`Prefill` reads a whole prompt of random bytes with the trained `tiny` pair in float32, as every
request begins: rows into the cache and into the drafter's context, chunk by chunk.

`RankChunk` runs one more chunk behind rows that nobody computed, on the first four layers of one
rank of Kimi K2.6 in bfloat16: what prefill is to the step of `step.CutRankStep`, and on a GPU only.
"""

from typing import ClassVar, Final

import torch

from benchmarks._device import DEVICE
from benchmarks._experts_hit import mean_hit
from benchmarks._regimes import PROFILE, chunk_axes, prefill_axes
from benchmarks._suite import CaseFacts, _Suite
from benchmarks.step import PREFILL_CHUNKS
from engine import Engine, EngineConfig, StepShape, begin_planted, preset, stage_costs
from engine.moe import chosen_experts
from engine.presets import RANKS, Rank, random_rank
from engine.verify import append_chain

AXES = prefill_axes(PROFILE, DEVICE)
CHUNK_AXES = chunk_axes(PROFILE, DEVICE)
CHUNK_TOKENS: Final = 512


class Prefill(_Suite):
    """Read a prompt of `context_tokens` tokens up to its last one."""

    version = "1"
    params: ClassVar[tuple[list[int], list[int], list[str]]] = (
        AXES.context_tokens,
        AXES.page_sizes,
        AXES.attention_backends,
    )
    param_names: ClassVar[list[str]] = ["context_tokens", "page_size", "attention_backend"]

    def build(self, context_tokens: int, page_size: int, attention_backend: str) -> None:
        self.context_tokens = context_tokens
        models = preset("tiny", device=DEVICE, dtype=torch.float32)
        config = EngineConfig(
            page_size=page_size,
            attention_backend=attention_backend,
            max_context=context_tokens + 4 * models.drafter.config.block_size,
            prefill_chunk=PREFILL_CHUNKS[DEVICE],
        )
        self.drafter = models.drafter
        self.engine = Engine(models.target, models.drafter, config)
        draws = torch.Generator().manual_seed(0)
        self.prompt = torch.randint(0, 256, (context_tokens,), generator=draws).tolist()

    def facts(self) -> CaseFacts:
        """Say that the weights are read once and every row is computed: a prompt in one pass."""
        engine = self.engine
        with chosen_experts() as chosen:
            engine.release(engine.prefill([self.prompt]))
        hit = mean_hit(chosen, engine.target.config)
        shape = StepShape(0, self.context_tokens - 1, itemsize=engine.target.dtype.itemsize)
        cost = stage_costs(engine.target, self.drafter, shape, experts_hit=hit)["verify"]
        return CaseFacts(context_tokens=self.context_tokens, bytes=cost.bytes, flops=cost.flops)

    def time_prefill(self, context_tokens: int, page_size: int, attention_backend: str) -> None:
        del context_tokens, page_size, attention_backend
        self.engine.prefill([self.prompt])


class RankChunk(_Suite):
    """Run 512 drawn tokens behind `context_tokens` rows: the target's part of a prefill."""

    version = "2"  # in 1 all tokens of a chunk were one, which chose the same experts
    params: ClassVar[tuple[list[int], list[int], list[str]]] = (
        CHUNK_AXES.context_tokens,
        CHUNK_AXES.page_sizes,
        CHUNK_AXES.attention_backends,
    )
    param_names: ClassVar[list[str]] = ["context_tokens", "page_size", "attention_backend"]
    rank: ClassVar[Rank] = RANKS["kimi-k2.6-tp8-rank-4-layers"]
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    moe_backend: ClassVar[str] = "triton" if DEVICE == "cuda" else "reference"

    def build(self, context_tokens: int, page_size: int, attention_backend: str) -> None:
        self.context_tokens = context_tokens
        models = random_rank(self.rank, device=DEVICE, dtype=self.dtype, seed=0)
        config = EngineConfig(
            page_size=page_size,
            attention_backend=attention_backend,
            moe_backend=self.moe_backend,
            max_context=context_tokens + 2 * CHUNK_TOKENS,
        )
        self.drafter = models.drafter
        self.engine = Engine(models.target, models.drafter, config)
        self.batch = begin_planted(self.engine, [context_tokens])
        self.batch.cache.reserve(self.batch.seqs[0], CHUNK_TOKENS)
        draws = torch.Generator().manual_seed(0)
        vocabulary = models.target.config.vocab_size
        self.tokens = torch.randint(vocabulary, (CHUNK_TOKENS,), generator=draws).tolist()

    def reset(self) -> None:
        (seq,) = self.batch.seqs
        self.batch.cache.truncate(seq, self.context_tokens)
        self.batch.cache.reserve(seq, CHUNK_TOKENS)

    def facts(self) -> CaseFacts:
        """Say what one pass of the chunk must read and compute."""
        engine = self.engine
        with chosen_experts() as chosen:
            self._append()
        self.reset()
        hit = mean_hit(chosen, engine.target.config)
        shape = StepShape(self.context_tokens, CHUNK_TOKENS, itemsize=engine.target.dtype.itemsize)
        cost = stage_costs(engine.target, self.drafter, shape, experts_hit=hit)["verify"]
        return CaseFacts(
            context_tokens=self.context_tokens,
            bytes=cost.bytes,
            kv_bytes=cost.kv_bytes,
            flops=cost.flops,
        )

    def time_chunk(self, context_tokens: int, page_size: int, attention_backend: str) -> None:
        del context_tokens, page_size, attention_backend
        self._append()

    def _append(self) -> None:
        append_chain(
            self.engine.target,
            self.batch.cache,
            self.batch.seqs[0],
            self.tokens,
            backends=self.engine.backends,
            tap_ids=self.drafter.config.target_layer_ids,
        )
