"""What an adaptive budget loses to the best fixed one: ``python -m benchmarks._budget_replay``.

Of a text of the trained pair every position's draft is kept, and which of its nodes the text
accepts. With that and the seconds of a step by rows, any policy's run is known without a clock or a
GPU: a step verifies some nodes, commits what the text accepts of them and goes on where that ends.
The policy is the engine's own (`choose_nodes`, `Odds`), so what is told is its regret: by a table
that is right, by one that is off by 20 % in all buckets, along them, or in each by chance.

Seconds of a step come from a file of `_budget_table`, or are those of an H200 given below.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from benchmarks._budget_regimes import TEXT_TOKENS
from engine import Acceptance, CostOrigin, CostTable, DraftTree, Engine, EngineConfig, Sampling
from engine.budget import choose_nodes
from engine.node_pool import Odds
from engine.presets import TEXTS, preset, sample_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engine.presets import Preset

# Milliseconds of a step of the trained pair by rows on an H200 (`_budget_table`, predictable T=0:
# time of a token by commit length; of 1 and 3 rows between their neighbours). 9 rows are no slip.
STEP_MS: Final = {
    1: 1.75, 2: 1.822, 3: 1.85, 5: 1.88, 9: 2.387, 17: 2.067, 33: 2.184, 65: 2.264,
}  # fmt: skip
SEARCHED_MS: Final = 0.0013  # assumed, of a node that is searched and not verified, on the host
WEIGHED_MS: Final = 0.03  # assumed, of a step's weighing; recorded steps took 0.03 to 0.35
NO_ORIGIN: Final = CostOrigin("", "", "", "", "", "", 1, "", "")
RUNS = 9  # of `_budget_table`, two of them to warm up: what is learnt there is known afterwards


@dataclass(frozen=True, slots=True)
class Position:
    """The draft behind a token, and what the text makes of it."""

    path_log_probs: tuple[float, ...]  # of its nodes in their order
    accepted: tuple[int, ...]  # nodes from the root down, counted from 1

    def commits(self, num_nodes: int) -> int:
        """Tokens that a step with the first nodes commits."""
        return 1 + sum(node <= num_nodes for node in self.accepted)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy's runs took and gave."""

    ms: float
    tokens: int
    nodes: int
    steps: int

    @property
    def token_ms(self) -> float:
        """Milliseconds for a token."""
        return self.ms / self.tokens


def record(
    models: Preset, prompt: Sequence[int], num_tokens: int, num_nodes: int, temperature: float
) -> list[Position]:
    """Return the drafts behind each token of a continuation, one token after the other."""
    config = EngineConfig(node_budget=num_nodes, max_context=len(prompt) + 2 * num_tokens)
    engine = Engine(models.target, models.drafter, config)
    batch = engine.prefill([prompt], sampling=Sampling(temperature=temperature))
    trees: list[DraftTree] = []
    ahead = models.drafter.config.horizon
    for _ in range(num_tokens + ahead):
        trees += engine.build(batch, engine.draft(batch))
        root = [trees[-1].prefix(0)]
        engine.commit(batch, root, engine.verify(batch, root))
    said = list(batch.sequences[0].new_token_ids)
    engine.release(batch)
    return [_position(tree, said[n:]) for n, tree in enumerate(trees[:num_tokens])]


def _position(tree: DraftTree, said: Sequence[int]) -> Position:
    nodes = list(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
    accepted, at = [], 0
    for token in said:
        if (at, token) not in nodes:
            break
        at = nodes.index((at, token))
        accepted.append(at)
    return Position(tuple(tree.path_log_probs.tolist()[1:]), tuple(accepted))


def fixed(
    texts: Sequence[Sequence[Position]], num_nodes: int, step_ms: Mapping[int, float]
) -> Replay:
    """Replay a fixed budget over some texts."""
    ms, tokens, steps = 0.0, 0, 0
    for positions in texts:
        at = 0
        while at < len(positions):
            at += (committed := positions[at].commits(num_nodes))
            tokens += committed
            steps += 1
            ms += cost_of(step_ms, 1 + num_nodes)
    return Replay(ms, tokens, num_nodes * steps, steps)


def adaptive(
    texts: Sequence[Sequence[Position]],
    table: CostTable,
    step_ms: Mapping[int, float],
    odds: Odds | None = None,
    *,
    runs: int = RUNS,
) -> Replay:
    """Replay the engine's policy, which weighs by `table` where steps take `step_ms`.

    Counted are all `runs` but the first two, or of two the second: the others warm up.
    """
    odds = odds or Odds()
    ms, tokens, nodes, steps = 0.0, 0, 0, 0
    for run in range(runs):
        for positions in texts:
            at = 0
            while at < len(positions):
                position = positions[at]
                chosen, searched = _choose(position, table, odds)
                at += (committed := position.commits(chosen))
                if run >= min(2, runs - 1):
                    ms += cost_of(step_ms, 1 + chosen)
                    ms += WEIGHED_MS + SEARCHED_MS * (searched - chosen)
                    tokens, nodes, steps = tokens + committed, nodes + chosen, steps + 1
    return Replay(ms, tokens, nodes, steps)


def _choose(position: Position, table: CostTable, odds: Odds) -> tuple[int, int]:
    """Return how many nodes are verified and how many were searched; tell the odds."""
    log_probs, searched = position.path_log_probs, 0

    def costs() -> Iterator[float]:
        nonlocal searched
        for log_prob in log_probs:
            searched += 1
            yield -log_prob

    (chosen,) = choose_nodes([costs()], len(log_probs), table, odds, 0.0)
    weights = torch.tensor((0.0, *log_probs[:chosen]), dtype=torch.float64)
    ids = torch.arange(1 + chosen, dtype=torch.int32)
    tree = DraftTree(ids.long(), ids - 1, ids, weights)
    path = torch.tensor([n for n in position.accepted if n <= chosen], dtype=torch.int32)
    odds.tell([tree], [Acceptance(path, 0)])
    return chosen, searched


def cost_of(step_ms: Mapping[int, float], num_rows: int) -> float:
    """Return what a step costs in the bucket of so many rows."""
    return step_ms[min(rows for rows in step_ms if rows >= num_rows)]


def table_of(step_ms: Mapping[int, float]) -> CostTable:
    """Return the cost table that says so."""
    seconds = tuple(1e-3 * ms for ms in step_ms.values())
    return CostTable(tuple(step_ms), (0,), (seconds,), (0.0,), NO_ORIGIN)


def off_by(step_ms: Mapping[int, float], share: float, kind: str) -> dict[int, float]:
    """Return costs that are off: by that `share` in "all", along the "rows", or by a seed each."""
    factors = {
        "all": [1.0 + share] * len(step_ms),
        "rows": [1.0 + share * (2 * n / (len(step_ms) - 1) - 1) for n in range(len(step_ms))],
    }.get(kind)
    if factors is None:
        source = random.Random(kind)  # noqa: S311 - any errors will do, but always the same
        factors = [source.uniform(1.0 - share, 1.0 + share) for _ in step_ms]
    return {rows: f * ms for (rows, ms), f in zip(step_ms.items(), factors, strict=True)}


def regret(
    texts: Sequence[Sequence[Position]],
    told_ms: Mapping[int, float],
    step_ms: Mapping[int, float],
    *,
    runs: int = RUNS,
) -> tuple[float, float]:
    """Return the adaptive budget's time for a token by the best fixed one's, and its mean nodes."""
    best = min(fixed(texts, rows - 1, step_ms).token_ms for rows in step_ms if rows > 1)
    found = adaptive(texts, table_of(told_ms), step_ms, runs=runs)
    return found.token_ms / best, found.nodes / found.steps


OFF: Final = [(0.2, "all"), (0.2, "rows"), (-0.2, "rows"), (0.05, "rows"), (-0.05, "rows")]
OFF_BY_CHANCE: Final = [(share, f"seed {n}") for share in (0.2, 0.03) for n in range(4)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the regret of each regime by tables that are right and off."""
    parser = argparse.ArgumentParser(description="what an adaptive budget loses, replayed")
    parser.add_argument("--texts", nargs="*", choices=TEXTS, default=TEXTS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--json", type=Path, help="a file of _budget_table, for the costs")
    asked = parser.parse_args(arguments)
    models = preset("tiny", device="cpu", dtype=torch.float32)
    costs = {} if asked.json is None else _costs(asked.json)
    for text in asked.texts:
        source = sample_text(text)
        stride = (len(source) - TEXT_TOKENS) // max(asked.windows, 1)
        starts = [n * stride for n in range(asked.windows)]
        for temperature in asked.temperatures:
            name = f"{text} T={temperature:g}"
            step_ms = costs.get(name, STEP_MS)
            texts = [
                record(models, list(source[n : n + TEXT_TOKENS]), asked.new_tokens, 64, temperature)
                for n in starts
            ]
            ratio, nodes = regret(texts, step_ms, step_ms)
            off = "  ".join(
                f"{share:+.0%} {kind} {regret(texts, off_by(step_ms, share, kind), step_ms)[0]:.3f}"
                for share, kind in (*OFF, *OFF_BY_CHANCE)
            )
            sys.stdout.write(f"{name}: right table {ratio:.3f} ({nodes:.1f} nodes)  {off}\n")
    return 0


def _costs(file: Path) -> dict[str, dict[int, float]]:
    """Return the milliseconds of a step by regime and rows that a file of `_budget_table` has."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {
        row["regime"]: {int(n): 1e3 * seconds for n, seconds in row["costs_s"].items()}
        for row in rows
    }


if __name__ == "__main__":
    sys.exit(main())
