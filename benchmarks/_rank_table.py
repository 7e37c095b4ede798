"""A rank's step as a table, without asv: ``python -m benchmarks._rank_table [PRESET ...]``.

For each context and attention backend the step's time, then stage by stage beside the floor: the
bytes a stage must read, or the products it must do, at the rates measured in this process. A step
is timed as an engine runs it, the device idle at its two ends only; its stages are timed in other
steps, the device idle at both ends of each, so they sum to more than the step. Weights are drawn
once for all contexts of a preset. Then what a chunk of a prompt takes there, what a whole prompt
takes from its first token on if ``--fill`` says how long it is, and what one step asks of the
device: launches, waits and the share of its time in which some kernel ran. A row that fails says
why, and the next one follows. ``--json`` keeps all figures, rewritten row by row.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from benchmarks._ceilings import Ceilings, measure_ceilings
from benchmarks._device import DEVICE
from benchmarks._device_work import device_work
from benchmarks._experts_hit import hit_by_layer, mean_hit, step_choices
from benchmarks._identity import SuiteError
from benchmarks._rank_report import Report, Row, say, title
from benchmarks._step_case import observed
from engine import (
    Engine,
    EngineConfig,
    EngineError,
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
from engine.cost import expected_experts_hit
from engine.device import wait_for
from engine.kernels import OPS
from engine.presets import RANKS, random_rank
from engine.verify import append_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.kernels import Cost

INCIDENT_CONTEXTS: Final = (1024, 8192, 32768, 65536, 131072, 189440)
BACKENDS: Final = {"cuda": ["triton_serial", "triton_split", "cuda"], "cpu": ["reference"]}
NODE_BUDGET: Final = 8
WARM_UP_STEPS: Final = 3
PREFILLS: Final = 3  # the first compiles


@dataclass(frozen=True, slots=True)
class Layout:
    """What all steps of a table have in common."""

    page_size: int
    cache_layout: str
    commit_length: int
    moe_backend: str
    num_steps: int
    graphs: str
    tree_backend: str
    prefill_chunk: int
    most_kernels: int  # listed of a step

    def config(self, backend: str, max_context: int) -> EngineConfig:
        """Return the configuration of an engine."""
        return EngineConfig(
            node_budget=NODE_BUDGET,
            page_size=self.page_size,
            cache_layout=self.cache_layout,
            attention_backend=backend,
            moe_backend=self.moe_backend,
            graphs=self.graphs,
            tree_backend=self.tree_backend,
            max_context=max_context,
        )


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
        config = layout.config(backend, context + ahead + layout.prefill_chunk)
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
        drafter, tokens = engine.drafter, drawn_tokens(engine.target.config.vocab_size, num_tokens)
        self.engine.rewind(self.batch, self.snapshot)
        started_s = time.perf_counter()
        append_chain(
            engine.target,
            self.batch.cache,
            seq,
            tokens,
            backends=engine.backends,
            tap_ids=() if drafter is None else drafter.config.target_layer_ids,
        )
        wait_for(engine.target.device)
        return time.perf_counter() - started_s


def floor_s(cost: Cost, ceilings: Ceilings) -> float:
    """Return the least seconds of a cost at measured rates; 0 where none was measured."""
    read_s = cost.bytes / (ceilings.read_bytes_per_s or float("inf"))
    return max(read_s, cost.flops / (ceilings.matmul_flops_per_s or float("inf")))


def row(models: Preset, context: int, backend: str, layout: Layout, ceilings: Ceilings) -> Row:
    """Measure the step of one context and backend, and check what it says."""
    planted = Planted.of(models, context, backend, layout)
    engine = planted.engine
    times_s = [planted.step() for _ in range(WARM_UP_STEPS + layout.num_steps)]
    result, stages_s = observed(engine, planted.batch, planted.snapshot, layout.num_steps)
    if result.commit_lengths != (layout.commit_length,):
        raise SuiteError(
            f"commit length: expected {layout.commit_length}, got {result.commit_lengths} (planted)"
        )
    shape = StepShape(context, 1 + result.num_nodes[0], itemsize=engine.target.dtype.itemsize)
    if engine.drafter is None:
        raise SuiteError("step: expected a drafter, got none")
    chosen = step_choices(engine, planted.batch, planted.snapshot)
    hit = mean_hit(chosen, engine.target.config)
    costs = stage_costs(engine.target, engine.drafter, shape, experts_hit=hit)
    chunk = layout.prefill_chunk
    measured = Row(
        context=context,
        backend=backend,
        commit_length=result.commit_lengths[0],
        step_times_s=tuple(times_s[WARM_UP_STEPS:]),
        stages_s=stages_s,
        floors_s={stage: floor_s(cost, ceilings) for stage, cost in costs.items()},
        experts_by_layer=hit_by_layer(chosen, engine.target.config),
        experts_expected=expected_experts_hit(engine.target.config, shape.num_rows),
        prefill_tokens=chunk,
        prefill_s=min(planted.prefill(chunk) for _ in range(PREFILLS)) if chunk else 0.0,
    )
    check(planted)
    return measured


def fill_s(models: Preset, num_tokens: int, backend: str, layout: Layout) -> float:
    """Prefill a drawn prompt, its cache and drafter rows, and return the seconds it took."""
    config = replace(layout.config(backend, num_tokens + 1), prefill_chunk=layout.prefill_chunk)
    engine = Engine(models.target, models.drafter, config)
    tokens = drawn_tokens(models.target.config.vocab_size, num_tokens + 1)
    engine.release(engine.prefill([tokens[: 1 + 2 * layout.prefill_chunk]]))  # which compiles
    wait_for(engine.target.device)
    started_s = time.perf_counter()
    batch = engine.prefill([tokens])
    wait_for(engine.target.device)
    seconds = time.perf_counter() - started_s
    batch.cache.check_integrity()
    return seconds


def drawn_tokens(vocab_size: int, num_tokens: int) -> list[int]:
    """Return tokens of a prompt, most of which differ: equal ones would choose equal experts."""
    draws = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(vocab_size, (num_tokens,), generator=draws).tolist()
    return tokens


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


def measure(name: str, models: Preset, asked: argparse.Namespace, report: Report) -> list[Row]:
    """Measure all rows of one preset; one that fails is told, and its memory is free again."""
    layout, measured = layout_of(asked), []
    say(title())
    for context in asked.contexts:
        for backend in asked.backends:
            try:
                measured.append(row(models, context, backend, layout, report.ceilings))
                report.add(name, measured[-1])
            except failures() as error:
                report.add_failure(name, context, backend, error)
            forget()
    if asked.fill:
        backend = asked.backends[-1]
        try:
            report.add_fill(name, asked.fill, backend, fill_s(models, asked.fill, backend, layout))
        except failures() as error:
            report.add_failure(name, asked.fill, backend, error)
        forget()
    return measured


def count(name: str, measured: Sequence[Row], layout: Layout, report: Report) -> None:
    """Profile one step of every row.

    After all steps were timed: behind the first profile of a process its host stages took up to
    twice as long on an H200, the device busy as long as before.
    """
    models = draw(name)
    for one in measured:
        planted = Planted.of(models, one.context, one.backend, layout)
        for _ in range(WARM_UP_STEPS):
            planted.step()
        work = device_work(planted.step, own_waits=2, most_kernels=layout.most_kernels)
        report.add_work(name, one, work)
        del planted
        forget()


def draw(name: str) -> Preset:
    """Draw the weights of a preset."""
    models = random_rank(RANKS[name], device=DEVICE, dtype=torch.bfloat16, seed=0)
    wait_for(models.target.device)
    return models


def forget() -> None:
    """Free the memory of engines that are gone: they and their graphs hold each other."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def failures() -> tuple[type[Exception], ...]:
    """Return what ends a row and not the table; of the device, whatever torch says of it."""
    ours = (EngineError, SuiteError, RuntimeError)
    if DEVICE == "cpu":
        return ours
    from triton.errors import TritonError  # noqa: PLC0415 - needs Triton

    return (*ours, TritonError)


def layout_of(asked: argparse.Namespace) -> Layout:
    """Return what all steps have in common of what was asked for."""
    return Layout(
        page_size=asked.page_size,
        cache_layout=asked.cache_layout,
        commit_length=asked.commit_length,
        moe_backend=asked.moe_backend,
        num_steps=asked.steps,
        graphs=asked.graphs,
        tree_backend=asked.tree_backend,
        prefill_chunk=asked.prefill_chunk,
        most_kernels=asked.kernels,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the presets that were asked for and print their steps."""
    parser = argparse.ArgumentParser(description="a rank's step, stage by stage, beside its floor")
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=", ".join(RANKS))
    parser.add_argument("--contexts", type=int, nargs="+", default=INCIDENT_CONTEXTS)
    parser.add_argument("--backends", nargs="+", default=BACKENDS[DEVICE])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--cache-layout", default="paged")
    parser.add_argument("--commit-length", type=int, default=8)
    parser.add_argument("--moe-backend", default="cuda" if DEVICE == "cuda" else "reference")
    parser.add_argument("--graphs", default="cuda" if DEVICE == "cuda" else "off")
    parser.add_argument("--tree-backend", default="cuda" if DEVICE == "cuda" else "host")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--prefill-chunk", type=int, default=2048, help="tokens; 0 leaves it out")
    parser.add_argument(
        "--fill", type=int, default=0, help="tokens of a prompt for the last backend to prefill"
    )
    parser.add_argument("--kernels", type=int, default=0, help="slowest ones to list of a step")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    asked = parser.parse_args(arguments)
    names = asked.presets or list(RANKS)[:1]
    if asked.fill and asked.prefill_chunk < 1:
        parser.error(f"fill: expected a prefill chunk of at least 1, got {asked.prefill_chunk}")
    unknown = [name for name in names if name not in RANKS]
    if unknown:
        parser.error(f"presets: expected some of {', '.join(RANKS)}, got {unknown[0]!r}")
    backends = OPS["tree_attention"].implementations
    unknown = [name for name in asked.backends if name not in backends]
    if unknown:
        parser.error(f"backends: expected some of {', '.join(backends)}, got {unknown[0]!r}")
    common = {"layout": asdict(layout_of(asked)), "node_budget": NODE_BUDGET}
    report = Report(asked.json, common, measure_ceilings())
    measured = {}
    for name in names:
        started_s = time.perf_counter()
        models = draw(name)
        say(f"{name}: drawn in {time.perf_counter() - started_s:.1f} s")
        say(memory(models, max(asked.contexts), layout_of(asked)))
        measured[name] = measure(name, models, asked, report)
        del models
        forget()
        if DEVICE == "cuda":
            say(f"most allocated: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB\n")
    if DEVICE == "cuda":
        for name, its_rows in measured.items():
            count(name, its_rows, layout_of(asked), report)
            forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())
