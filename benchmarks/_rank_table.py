"""A rank's step as a table, without asv: ``python -m benchmarks._rank_table [PRESET ...]``.

For each context and attention backend the step's time, then stage by stage beside the floor: the
bytes a stage must read, or the products it must do, at the rates measured in this process. Weights
are drawn once for all contexts of a preset. Then what a chunk of a prompt takes there, and what one
step asks of the device: launches, waits and the share of its time in which some kernel ran.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks._ceilings import Ceilings, measure_ceilings
from benchmarks._device import DEVICE
from benchmarks._identity import SuiteError
from benchmarks._step_case import observed
from engine import (
    STAGES,
    Engine,
    EngineConfig,
    PlantedDrafter,
    PlantedTarget,
    Preset,
    Snapshot,
    StepBatch,
    StepShape,
    begin_planted,
    resident_bytes,
    stage_costs,
)
from engine.device import wait_for
from engine.presets import RANKS, random_rank
from engine.verify import append_chain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.kernels import Cost

INCIDENT_CONTEXTS: Final = (1024, 65536, 189440)
NODE_BUDGET: Final = 8
WARM_UP_STEPS: Final = 3
_LAUNCHES: Final = ("LaunchKernel", "GraphLaunch")
_WAITS: Final = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")


@dataclass(frozen=True, slots=True)
class Layout:
    """What all steps of a table have in common."""

    page_size: int
    cache_layout: str
    commit_length: int
    moe_backend: str
    num_steps: int
    graphs: str
    prefill_chunk: int


@dataclass(frozen=True, slots=True)
class Planted:
    """An engine before a step that commits what was planted, and repeats."""

    engine: Engine
    batch: StepBatch
    snapshot: Snapshot

    @classmethod
    def of(cls, models: Preset, context: int, backend: str, layout: Layout) -> Planted:
        """Plant `context` committed rows and the step behind them."""
        ahead = 4 * models.drafter.config.block_size
        config = EngineConfig(
            node_budget=NODE_BUDGET,
            page_size=layout.page_size,
            cache_layout=layout.cache_layout,
            attention_backend=backend,
            moe_backend=layout.moe_backend,
            graphs=layout.graphs,
            max_context=context + ahead + layout.prefill_chunk,
        )
        target, num_rows = PlantedTarget(models.target), context - layout.commit_length
        continuation = target.continuation(1 + num_rows, ahead)
        drafter = PlantedDrafter(models.drafter, [continuation], layout.commit_length)
        engine = Engine(target, drafter, config)
        batch = begin_planted(engine, [num_rows])
        engine.step(batch)
        return cls(engine, batch, engine.snapshot(batch))

    def step(self) -> float:
        """Run the step once more and return its seconds, the device idle at both ends."""
        self.engine.rewind(self.batch, self.snapshot)
        wait_for(self.engine.target.device)
        started_s = time.perf_counter()
        self.engine.step(self.batch)
        wait_for(self.engine.target.device)
        return time.perf_counter() - started_s

    def prefill(self, num_tokens: int) -> float:
        """Run a chunk of a prompt behind the context and return the target's seconds for it."""
        engine, (seq,) = self.engine, self.batch.seqs
        drafter = engine.drafter
        self.engine.rewind(self.batch, self.snapshot)
        started_s = time.perf_counter()
        append_chain(
            engine.target,
            self.batch.cache,
            seq,
            [0] * num_tokens,
            backends=engine.backends,
            tap_ids=() if drafter is None else drafter.config.target_layer_ids,
        )
        wait_for(engine.target.device)
        return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class Asked:
    """What one step asks of the device."""

    launches: int
    waits: int
    copies_back: int  # from device to host
    busy_s: float


def floor_s(cost: Cost, ceilings: Ceilings) -> float:
    """Return the least seconds of a cost at measured rates; 0 where none was measured."""
    read_s = cost.bytes / (ceilings.read_bytes_per_s or float("inf"))
    return max(read_s, cost.flops / (ceilings.matmul_flops_per_s or float("inf")))


def rows(
    models: Preset, contexts: Sequence[int], backends: Sequence[str], layout: Layout
) -> Iterator[str]:
    """Measure the steps of one preset and yield the lines of its table."""
    ceilings = measure_ceilings()
    stages = "  ".join(f"{stage:>8}/floor" for stage in STAGES)
    yield f"{'context':>8} {'backend':14} {'step ms':>9} {'floor':>7} {'times':>6}  {stages}"
    for context in contexts:
        for backend in backends:
            planted = Planted.of(models, context, backend, layout)
            yield from _of_step(planted, context, ceilings, layout)
            check(planted)
            del planted  # and its pages, before the next ones are made


def _of_step(planted: Planted, context: int, ceilings: Ceilings, layout: Layout) -> Iterator[str]:
    engine = planted.engine
    times_s = [planted.step() for _ in range(WARM_UP_STEPS + layout.num_steps)]
    step_s = statistics.median(times_s[WARM_UP_STEPS:])
    result, stages_s = observed(engine, planted.batch, planted.snapshot, layout.num_steps)
    shape = StepShape(context, 1 + result.num_nodes[0], itemsize=engine.target.dtype.itemsize)
    if engine.drafter is None:
        raise SuiteError("step: expected a drafter, got none")
    costs = stage_costs(engine.target, engine.drafter, shape)
    floors_s = {stage: floor_s(cost, ceilings) for stage, cost in costs.items()}
    whole_s = sum(floors_s.values())
    parts = (f"{stages_s[stage] * 1e3:8.3f}/{floors_s[stage] * 1e3:5.3f}" for stage in STAGES)
    yield (
        f"{context:8} {engine.config.attention_backend:14} {step_s * 1e3:9.3f} "
        f"{whole_s * 1e3:7.3f} {step_s / whole_s:6.2f}  {'  '.join(parts)}"
    )
    chunk = layout.prefill_chunk
    chunk_s = min(planted.prefill(chunk) for _ in range(2)) if chunk else 0.0
    if chunk:
        rate = chunk / chunk_s
        yield f"{'':8} prefill: {chunk} tokens in {chunk_s * 1e3:.1f} ms, {rate:.0f} a second"
    asked = counted(planted)
    yield (
        f"{'':8} commits {result.commit_lengths[0]}, {asked.launches} launches, "
        f"{asked.waits} waits, {asked.copies_back} copies back, busy {asked.busy_s * 1e3:.3f} ms, "
        f"{100 * asked.busy_s / step_s:.0f} %"
    )


def check(planted: Planted) -> None:
    """Refuse a step whose numbers are no numbers or whose cache is torn."""
    engine, batch = planted.engine, planted.batch
    engine.rewind(batch, planted.snapshot)
    trees = engine.build(batch, engine.draft(batch))
    verified = engine.verify(batch, trees)
    engine.commit(batch, trees, verified)
    batch.cache.check_integrity()
    if not verified.log_probs.isfinite().all() or not verified.taps.isfinite().all():
        raise SuiteError("step: expected finite log-probs and taps, got others")


def counted(planted: Planted) -> Asked:
    """Profile one step; without a GPU nothing is asked of one."""
    if planted.engine.target.device.type != "cuda":
        return Asked(0, 0, 0, 0.0)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        planted.step()
    names: Counter[str] = Counter()
    busy_us = 0.0
    for event in profiler.events() or ():
        names[event.name] += 1
        if str(event.device_type).endswith("CUDA"):
            busy_us += event.time_range.elapsed_us()
    return Asked(
        launches=_count(names, _LAUNCHES),
        waits=_count(names, _WAITS) - 2,  # those of the clock around the step
        copies_back=_count(names, ("Memcpy DtoH",)),
        busy_s=busy_us / 1e6,
    )


def _count(names: Counter[str], parts: Sequence[str]) -> int:
    return sum(count for name, count in names.items() if any(part in name for part in parts))


def memory(models: Preset, max_context: int, layout: Layout) -> str:
    """Return what was counted for an engine beside what the device says it gave."""
    config = EngineConfig(
        node_budget=NODE_BUDGET,
        page_size=layout.page_size,
        cache_layout=layout.cache_layout,
        max_context=max_context,
    )
    held = resident_bytes(models.target, models.drafter, config)
    weights = held.target_weights + held.drafter_weights
    given = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    return (
        f"weights {weights / 1e9:.2f} GB counted, {given / 1e9:.2f} GB allocated; "
        f"{held.total / 1e9:.2f} GB with {max_context} tokens"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the presets that were asked for and print their steps."""
    parser = argparse.ArgumentParser(description="a rank's step, stage by stage, beside its floor")
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=", ".join(RANKS))
    parser.add_argument("--contexts", type=int, nargs="+", default=INCIDENT_CONTEXTS)
    parser.add_argument("--backends", nargs="+", default=["triton_split"])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--cache-layout", default="paged")
    parser.add_argument("--commit-length", type=int, default=8)
    parser.add_argument("--moe-backend", default="triton")
    parser.add_argument("--graphs", default="cuda" if DEVICE == "cuda" else "off")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--prefill-chunk", type=int, default=512, help="tokens; 0 leaves it out")
    asked = parser.parse_args(arguments)
    layout = Layout(
        page_size=asked.page_size,
        cache_layout=asked.cache_layout,
        commit_length=asked.commit_length,
        moe_backend=asked.moe_backend,
        num_steps=asked.steps,
        graphs=asked.graphs,
        prefill_chunk=asked.prefill_chunk,
    )
    names = asked.presets or list(RANKS)[:1]
    unknown = [name for name in names if name not in RANKS]
    if unknown:
        parser.error(f"presets: expected some of {', '.join(RANKS)}, got {unknown[0]!r}")
    for name in names:
        started_s = time.perf_counter()
        models = random_rank(RANKS[name], device=DEVICE, dtype=torch.bfloat16, seed=0)
        wait_for(models.target.device)
        _say(f"{name}: drawn in {time.perf_counter() - started_s:.1f} s")
        _say(memory(models, max(asked.contexts), layout))
        for line in rows(models, asked.contexts, asked.backends, layout):
            _say(line)
        if DEVICE == "cuda":
            _say(f"most allocated: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB\n")
        del models
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
