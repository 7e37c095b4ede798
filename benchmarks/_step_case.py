"""What the step suites share: one step again and again from a snapshot, and what it is made of.

Stage times come from a few steps of their own before the samples: an observer waits for the device
at both ends of a stage, so stages may sum to more than the step. Before them one step runs for the
experts that its rows choose, which `bytes` counts.
"""

import statistics
from collections import defaultdict
from typing import Final

import torch

from benchmarks._device import DEVICE
from benchmarks._experts_hit import mean_hit, step_choices
from benchmarks._identity import SuiteError
from benchmarks._suite import CaseFacts, _Suite
from engine import Engine, Snapshot, StageClock, StepBatch, StepResult, StepShape, step_bytes
from engine.kernels import launched_programs
from engine.kernels.draft_tree import WORD_BITS

OBSERVED_STEPS: Final = 5


class _StepSuite(_Suite):
    """A suite whose body is one step of `engine` on `batch`; `build` makes them and the rest."""

    engine: Engine
    batch: StepBatch
    snapshot: Snapshot  # where every sample starts
    context_tokens: int
    commit_length: int

    def reset(self) -> None:
        self.engine.rewind(self.batch, self.snapshot)

    def facts(self) -> CaseFacts:
        """Run some steps with an observer; refuse a case that is not in its commit regime."""
        chosen = step_choices(self.engine, self.batch, self.snapshot)
        result, stage_seconds = observed(self.engine, self.batch, self.snapshot)
        if result.commit_lengths != (self.commit_length,):
            raise SuiteError(
                f"commit length: expected {self.commit_length}, got {result.commit_lengths} "
                "(the drafter was planted for it)"
            )
        tree_size = 1 + result.num_nodes[0]
        target = self.engine.target
        shape = StepShape(self.context_tokens, tree_size, itemsize=target.dtype.itemsize)
        hit = mean_hit(chosen, target.config)
        cost = step_bytes(target, self.engine.drafter, shape, experts_hit=hit)
        return CaseFacts(
            context_tokens=self.context_tokens,
            bytes=cost.bytes,
            kv_bytes=cost.kv_bytes,
            flops=cost.flops,
            programs=self.num_programs(self.engine.config.attention_backend, tree_size),
            stage_seconds=stage_seconds,
            commit_length=float(self.commit_length),
        )

    def num_programs(self, backend: str, tree_size: int) -> int | None:
        """Count the programs one layer's verify attention is launched with; None without any."""
        if backend == "reference":
            return None
        config, cache = self.engine.target.config, self.batch.cache
        words = -(-tree_size // WORD_BITS)
        shape = (1, tree_size, config.num_attention_heads, config.latent_dim)
        return launched_programs(
            backend=backend,
            q=torch.zeros(shape, dtype=self.engine.target.dtype, device=DEVICE),
            kv_pages=cache.layer(0),
            page_table=cache.page_table((0,)),
            context_lens=torch.tensor([self.context_tokens], dtype=torch.int32, device=DEVICE),
            ancestor_bits=torch.zeros(1, tree_size, words, dtype=torch.int32, device=DEVICE),
            tree_sizes=torch.tensor([tree_size], dtype=torch.int32, device=DEVICE),
            softmax_scale=config.softmax_scale,
            value_dim=config.kv_lora_rank,
        )


def observed(
    engine: Engine, batch: StepBatch, snapshot: Snapshot, num_steps: int = OBSERVED_STEPS
) -> tuple[StepResult, dict[str, float]]:
    """Repeat the step behind `snapshot`; return its result and the median of each stage."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    engine.observer = StageClock(engine.target.device)
    try:
        for _ in range(num_steps):
            engine.rewind(batch, snapshot)
            result = engine.step(batch)
            for stage, seconds in (result.stage_seconds or {}).items():
                times[stage].append(seconds)
    finally:
        engine.observer = None
    return result, {stage: statistics.median(values) for stage, values in times.items()}
