"""Made-up cost tables, what is chosen by them, and odds that heard of many trees."""

import bisect
import math

import torch

from engine.budget import Budget, CostOrigin, CostTable, choose_nodes, tree_budget
from engine.config import EngineConfig
from engine.draft_tree import Acceptance, DraftTree
from engine.node_pool import Odds

ORIGIN = CostOrigin(
    device_name="some device",
    torch_version="2.13.0",
    dtype="float32",
    attention_backend="reference",
    moe_backend="reference",
    graphs="off",
    page_size=16,
    cache_layout="paged",
    model="tiny",
)


def table_of(num_rows, seconds, same_s=1.0):
    """A table for one context length, which holds for all."""
    return CostTable(
        tuple(num_rows), (0,), (tuple(same_s + time_s for time_s in seconds),), (0.0,), ORIGIN
    )


def step_time_s(table, num_rows, context=0, num_seqs=1):
    """A step of so many rows costs its bucket."""
    times_s = table.step_times_s(num_seqs, context)
    return times_s[bisect.bisect_left(table.num_rows, num_rows)]


def chosen_of(gains, num_seqs, table, context=0, odds=None):
    """How many nodes are chosen of a pool in which each is worth what it promises."""
    costs = [[-math.log(gain) for gain in gains[n::num_seqs]] for n in range(num_seqs)]
    return sum(choose_nodes(costs, len(gains), table, odds or Odds(), context))


def built(draft_logits, policy, node_budget, table=None, odds=None):
    """The trees of an engine's budget."""
    config = EngineConfig(budget_policy=policy, node_budget=node_budget)
    roots = [7] * len(draft_logits)
    most = tree_budget(policy, node_budget, len(roots))
    return Budget(config, table, odds or Odds()).build(draft_logits, roots, most, 3.0)


def told(odds, gains, path, times=1):
    """Odds that heard so often that of a tree of such nodes those of `path` were accepted."""
    depths = torch.arange(1 + len(gains), dtype=torch.int32)
    weights = torch.tensor([1.0, *gains], dtype=torch.float64).log()
    tree = DraftTree(depths.long(), depths - 1, depths, weights)
    for _ in range(times):
        odds.tell([tree], [Acceptance(torch.tensor(path, dtype=torch.int32), 0)])
    return odds
