"""Adaptive budgets against fixed ones, without asv: ``python -m benchmarks._budget_table``.

Texts of the trained pair are the main evidence: there commits come from the text and steps differ.
Then a rank's planted contexts, with a drafter whose probabilities are right. Each regime has an
engine for every fixed budget and one that may have as many nodes as the largest of them and weighs
them by a cost table measured just before. All decode the same tokens, in turns; a sample is the
seconds of a run by the tokens it committed, and a ratio compares the two runs of one round.

The adaptive engine is the same one in all rounds, so what it learns of a text's odds in the warm-up
it knows in the others, as one that serves many such texts would. It pays for its search, which goes
a bucket farther than what it verifies, and for weighing, after the draft is done; its table has
commits of a root alone. Beside each budget stand its stages and what its trees committed of what
they promised, behind all of them the cost table and the odds: they say which of these it was.

The best fixed budget is the one that was the fastest here, so it has luck on its side; nobody knows
it beforehand. One window of a text is some dozen steps, of which one more or less is 8 %: three say
more. Decoding without drafts is no budget. At temperature 0 trees commit more than they promise,
since a target then says its likeliest token always; at 1 promises hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks._budget_regimes import (
    MOST_WINDOWS,
    Regime,
    planted_regime,
    text_regime,
)
from benchmarks._device import DEVICE, cpu_device, cuda_device
from benchmarks._interleaved import WARM_UP_ROUNDS, visiting_order
from engine import (
    STAGES,
    CostTable,
    Engine,
    EngineConfig,
    Preset,
    Snapshot,
    StageClock,
    StepBatch,
    measure_costs,
    preset,
)
from engine.device import wait_for
from engine.pass_graphs import tree_bucket
from engine.presets import RANKS, TEXTS, random_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ADAPTIVE: Final = "adaptive"
BUDGETS: Final = (1, 4, 8, 16, 32, 64)
ALLOWED: Final = 1.03  # what an adaptive budget may take of the best fixed one's time
BACKENDS: Final = {"cuda": "triton_split", "cpu": "reference"}
MOE_BACKENDS: Final = {"cuda": "triton", "cpu": "reference"}


@dataclass(frozen=True, slots=True)
class Run:
    """What one run took and gave."""

    seconds: float
    tokens: float
    steps: int
    nodes: int  # verified in all steps, roots left out

    @property
    def token_s(self) -> float:
        """Seconds for a token."""
        return self.seconds / self.tokens


class Racer:
    """An engine before the runs of a regime, and how they went."""

    def __init__(self, regime: Regime, config: EngineConfig, table: CostTable | None) -> None:
        self.regime = regime
        self.engine = Engine(regime.target, regime.drafter, config, cost_table=table)
        self.starts: list[tuple[StepBatch, Snapshot]] = []
        for batch in regime.begin(self.engine):
            self.engine.step(batch)  # so that a run, too, begins with new context rows
            self.starts.append((batch, self.engine.snapshot(batch)))
        self.runs: list[Run] = []

    def run(self) -> Run:
        """Decode all of the regime once, the device idle at both ends of each part."""
        seconds, tokens, steps, nodes = 0.0, 0.0, 0, 0
        for batch, snapshot in self.starts:
            self.engine.rewind(batch, snapshot)
            wait_for(self.engine.target.device)
            started_s, before = time.perf_counter(), steps
            while not self.regime.is_done(batch, steps - before):
                result = self.engine.step(batch)
                tokens += self.regime.worth(result)
                nodes += sum(result.num_nodes)
                steps += 1
            wait_for(self.engine.target.device)
            seconds += time.perf_counter() - started_s
        return Run(seconds, tokens, steps, nodes)

    def observed(self) -> tuple[dict[str, float], float]:
        """Run once with an observer; return the median of each stage and the promise of a tree."""
        engine, promised = self.engine, []
        times: defaultdict[str, list[float]] = defaultdict(list)
        engine.observer = clock = StageClock(engine.target.device)
        for batch, snapshot in self.starts:
            engine.rewind(batch, snapshot)
            steps = 0
            while not self.regime.is_done(batch, steps):
                (tree,) = trees = engine.build(batch, engine.draft(batch))
                promised.append(tree.expected_commit_length)
                engine.commit(batch, trees, engine.verify(batch, trees))
                for stage, seconds in clock.seconds().items():
                    times[stage].append(seconds)
                steps += 1
        engine.observer = None
        stages_s = {stage: statistics.median(times[stage]) for stage in STAGES}
        return stages_s, statistics.fmean(promised)


@dataclass(frozen=True, slots=True)
class Row:
    """All figures of one regime: samples of each budget by its name, one a round."""

    regime: str
    token_times_s: dict[str, tuple[float, ...]]
    commit_lengths: dict[str, float]
    promised: dict[str, float]  # commit lengths, by the drafter's probabilities
    num_nodes: dict[str, float]  # of a step, mean
    stages_s: dict[str, dict[str, float]]
    costs_s: dict[int, float]  # of a step, by bucket of rows: what the adaptive budget weighs by
    odds: tuple[float, ...]  # what it learnt in the end: accepted of a promised token, by place

    def token_s(self, name: str) -> float:
        """The median of a budget."""
        return statistics.median(self.token_times_s[name])

    @property
    def best(self) -> str:
        """The fixed budget with the least time for a token."""
        return min((name for name in self.token_times_s if name != ADAPTIVE), key=self.token_s)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The adaptive budget's time for a token by the best fixed one's, round by round."""
        pairs = zip(self.token_times_s[ADAPTIVE], self.token_times_s[self.best], strict=True)
        return tuple(adaptive / fixed for adaptive, fixed in pairs)

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)

    def lines(self) -> Iterator[str]:
        """Yield the line of the regime, one for each budget, and the cost table."""
        low, high = _quartiles(self.ratios)
        verdict = "" if self.ratio <= ALLOWED else "  SLOWER"
        yield (
            f"{self.regime}: best fixed {self.best} {1 / self.token_s(self.best):.1f} tokens/s, "
            f"adaptive {1 / self.token_s(ADAPTIVE):.1f} ({self.num_nodes[ADAPTIVE]:.1f} nodes), "
            f"time ratio {self.ratio:.3f} ({low:.3f} to {high:.3f}){verdict}"
        )
        for name, times_s in self.token_times_s.items():
            low, high = _quartiles(times_s)
            stages = "  ".join(f"{s} {1e3 * self.stages_s[name][s]:.3f}" for s in STAGES)
            yield (
                f"  {name:>8} {1e3 * self.token_s(name):8.3f} ms/token "
                f"({1e3 * low:.3f} to {1e3 * high:.3f})  commits {self.commit_lengths[name]:5.2f} "
                f"of {self.promised[name]:5.2f}  "
                f"nodes {self.num_nodes[name]:5.1f}  {stages} ms"
            )
        costs = "  ".join(f"{n} {1e3 * cost_s:.3f}" for n, cost_s in self.costs_s.items())
        odds = " ".join(f"{ratio:.2f}" for ratio in self.odds)
        yield f"  weighed by ms of a step, by rows: {costs}"
        yield f"  accepted of a promised token, by place of a node (1, 2, to 4, to 8, ...): {odds}"


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def race(
    regime: Regime, budgets: Sequence[int], base: EngineConfig, rounds: int, repetitions: int
) -> Row:
    """Measure the costs of a regime's steps, then all budgets in turns."""
    base = replace(base, node_budget=max(budgets), max_context=regime.max_context)
    table = costs(regime, base, repetitions)
    racers = {
        str(budget): Racer(regime, replace(base, node_budget=budget), None) for budget in budgets
    }
    racers[ADAPTIVE] = Racer(regime, replace(base, budget_policy="adaptive"), table)
    for racer in list(racers.values()) * WARM_UP_ROUNDS:
        racer.run()
    gc.collect()
    in_order = list(racers.values())
    for number in range(rounds):
        for index in visiting_order(len(in_order), number):
            in_order[index].runs.append(in_order[index].run())

    observed = {name: one.observed() for name, one in racers.items()}
    return Row(
        regime=regime.name,
        token_times_s={name: tuple(r.token_s for r in one.runs) for name, one in racers.items()},
        commit_lengths={
            name: _per_step(one.runs, [run.tokens for run in one.runs])
            for name, one in racers.items()
        },
        num_nodes={
            name: _per_step(one.runs, [run.nodes for run in one.runs])
            for name, one in racers.items()
        },
        promised={name: promised for name, (_, promised) in observed.items()},
        stages_s={name: stages_s for name, (stages_s, _) in observed.items()},
        costs_s=dict(zip(table.num_rows, table.step_seconds[0], strict=True)),
        odds=tuple(racers[ADAPTIVE].engine.budget.odds.ratios()[: 1 + max(budgets).bit_length()]),
    )


def _per_step(runs: Sequence[Run], values: Sequence[float]) -> float:
    return sum(values) / sum(run.steps for run in runs)


def costs(regime: Regime, config: EngineConfig, repetitions: int) -> CostTable:
    """Measure the ends of the buckets that trees are filled up to, at the regime's context."""
    largest = 1 + config.node_budget
    rows = sorted({tree_bucket(size, largest) for size in range(1, 1 + largest)})
    return measure_costs(
        Engine(regime.target, regime.drafter, config),
        num_rows=rows,
        context_tokens=[regime.context],
        repetitions=repetitions,
    )


def regimes(asked: argparse.Namespace) -> Iterator[Regime]:
    """Yield what was asked for, each when it is its turn."""
    if asked.texts:
        models = preset("tiny", device=DEVICE, dtype=torch.float32)
        for text in asked.texts:
            for temperature in asked.temperatures:
                yield text_regime(models, text, temperature, asked.windows, asked.new_tokens)
    if asked.contexts and asked.confidences:
        models = rank(asked.preset)
        for context in asked.contexts:
            for confidence in asked.confidences:
                yield planted_regime(models, context, confidence, asked.steps, max(asked.budgets))


def rank(name: str) -> Preset:
    """Draw a rank on the device."""
    return random_rank(RANKS[name], device=DEVICE, dtype=torch.bfloat16, seed=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the regimes that were asked for, and whether the adaptive budget held in all."""
    asked = _parser().parse_args(arguments)
    device = cpu_device() if DEVICE == "cpu" else cuda_device()[0]
    facts: dict[str, Any] = {"device": asdict(device), "options": vars(asked) | {"json": None}}
    rows = facts["rows"] = []
    base = EngineConfig(
        page_size=asked.page_size,
        attention_backend=asked.attention_backend,
        moe_backend=asked.moe_backend,
        graphs=asked.graphs,
        prefill_chunk=512,
    )
    for regime in regimes(asked):
        started_s = time.perf_counter()
        row = race(regime, asked.budgets, base, asked.rounds, asked.repetitions)
        for line in row.lines():
            _say(line)
        _say(f"  took {time.perf_counter() - started_s:.1f} s")
        rows.append(asdict(row) | {"best": row.best, "ratio": row.ratio})
        if asked.json is not None:
            asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        gc.collect()  # engines and their graphs hold each other
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    slower = sum(row["ratio"] > ALLOWED for row in rows)
    _say(f"adaptive slower by more than {ALLOWED - 1:.0%} in {slower} of {len(rows)} regimes")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="an adaptive budget against fixed ones")
    add = parser.add_argument
    add("--budgets", type=int, nargs="+", default=BUDGETS, help="fixed ones, in nodes")
    add("--texts", nargs="*", choices=TEXTS, default=TEXTS)
    add("--temperatures", type=float, nargs="+", default=[0.0])
    add("--windows", type=int, choices=range(1, MOST_WINDOWS + 1), default=3, help="of a text")
    add("--new-tokens", type=int, default=40, help="behind each window, 48 at most")
    add("--preset", choices=sorted(RANKS), default="kimi-k2.6-tp8-rank-4-layers")
    add("--contexts", type=int, nargs="*", default=[8192], help="of the rank")
    add("--confidences", type=float, nargs="*", default=[0.2, 0.6, 0.9], help="between 0 and 1")
    add("--steps", type=int, default=4, help="of a rank's run, 6 at most")
    add("--rounds", type=int, default=7)
    add("--repetitions", type=int, default=30, help="of each bucket of the cost table")
    add("--page-size", type=int, default=64)
    add("--attention-backend", default=BACKENDS[DEVICE])
    add("--moe-backend", default=MOE_BACKENDS[DEVICE])
    add("--graphs", default="cuda" if DEVICE == "cuda" else "off")
    add("--json", type=Path, help="a file for all figures")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
