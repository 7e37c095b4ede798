"""Decoding a text with the trained pair: what commits comes from the text, not from a plant.

One sequence starts behind the first `CONTEXT_TOKENS` bytes of a shipped text that the pair was not
trained on, and a sample decodes at least `NEW_TOKENS` more. `ar` and `dflash` are the same engine
without drafts and with a chain of them. float32, so that rounding does not decide the next token;
the noise of a temperature is a function of its place, so all samples of a case, and all modes of a
text, decode the same tokens: where times differ, text does not.
"""

from typing import ClassVar

import torch

from benchmarks._device import DEVICE
from benchmarks._experts_hit import mean_hit
from benchmarks._regimes import PROFILE, generation_axes
from benchmarks._suite import CaseFacts, _Suite
from engine import Engine, EngineConfig, Sampling, StepShape, preset, sample_text, step_bytes
from engine.moe import chosen_experts

NODE_BUDGET = 16
PAGE_SIZE = 64
CONTEXT_TOKENS = 256
NEW_TOKENS = 48  # and the last step's: fewer than a drafter's sliding layers can always take back
BACKENDS = {"cpu": "reference", "cuda": "triton_split"}
AXES = generation_axes(PROFILE)


class Generation(_Suite):
    """Decode `NEW_TOKENS` tokens of one sequence behind the beginning of a text."""

    version = "1"
    params: ClassVar[tuple[list[str], list[str], list[float], list[str]]] = (
        AXES.texts,
        AXES.modes,
        AXES.temperatures,
        AXES.cache_layouts,
    )
    param_names: ClassVar[list[str]] = ["text", "mode", "temperature", "cache_layout"]

    def build(self, text: str, mode: str, temperature: float, cache_layout: str) -> None:
        models = preset("tiny", device=DEVICE, dtype=torch.float32)
        config = EngineConfig(
            mode=mode,
            node_budget=NODE_BUDGET,
            page_size=PAGE_SIZE,
            cache_layout=cache_layout,
            attention_backend=BACKENDS[DEVICE],
            max_context=CONTEXT_TOKENS + NEW_TOKENS + models.drafter.config.block_size,
        )
        self.engine = Engine(models.target, models.drafter, config)
        prompt = list(sample_text(text)[:CONTEXT_TOKENS])
        self.batch = self.engine.prefill([prompt], sampling=Sampling(temperature=temperature))
        self.snapshot = self.engine.snapshot(self.batch)

    def reset(self) -> None:
        self.engine.rewind(self.batch, self.snapshot)

    def facts(self) -> CaseFacts:
        """Sum the least bytes and FLOP of the steps that one sample takes."""
        engine, (sequence,) = self.engine, self.batch.sequences
        costs, already = [], len(sequence.new_token_ids)
        while not self._is_done():
            context = sequence.committed_length
            with chosen_experts() as chosen:
                tree_size = 1 + engine.step(self.batch).num_nodes[0]
            hit = mean_hit(chosen, engine.target.config)
            shape = StepShape(context, tree_size, itemsize=engine.target.dtype.itemsize)
            costs.append(step_bytes(engine.target, engine.drafter, shape, experts_hit=hit))
        lengths, new_tokens = list(sequence.commit_lengths), len(sequence.new_token_ids)
        self.reset()
        return CaseFacts(
            context_tokens=CONTEXT_TOKENS,
            bytes=sum(cost.bytes for cost in costs),
            kv_bytes=sum(cost.kv_bytes for cost in costs),
            flops=sum(cost.flops for cost in costs),
            commit_length=sum(lengths) / len(lengths),
            new_tokens=new_tokens - already,
        )

    def time_generate(self, text: str, mode: str, temperature: float, cache_layout: str) -> None:
        del text, mode, temperature, cache_layout
        while not self._is_done():
            self.engine.step(self.batch)

    def _is_done(self) -> bool:
        return len(self.batch.sequences[0].new_token_ids) >= NEW_TOKENS
