"""One pool of draft nodes for several sequences: the likeliest nodes first, whoever's they are.

Each tree lists its nodes in the order in which best-first search chose them. So one search over
all sequences is the merge of these lists, and its first n nodes are a prefix of every tree. This
module knows nothing about what a node costs. A tree alone has nothing to be merged with and needs
no tensor operation: for some dozens of nodes these would be most of the time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.draft_tree import DraftTree
from engine.errors import BudgetError


@dataclass(frozen=True, slots=True, eq=False)
class NodePool:
    """The draft nodes of all trees in the order in which one search would choose them."""

    trees: tuple[DraftTree, ...]
    owners: Sequence[int]  # index of each node's tree
    path_log_probs: Sequence[float]  # descending

    @property
    def num_nodes(self) -> int:
        """Draft nodes of all trees, roots excluded."""
        return len(self.owners)

    def take(self, num_nodes: int) -> list[DraftTree]:
        """Return every tree cut to its nodes among the first `num_nodes` of the pool.

        A pool with fewer nodes gives all it has.

        Raises
        ------
        BudgetError
            `num_nodes` is negative.
        """
        if num_nodes < 0:
            raise BudgetError(
                f"num_nodes: expected 0 or more, got {num_nodes} (draft nodes of all trees)"
            )
        counts = Counter(self.owners[:num_nodes])
        return [tree.prefix(counts[index]) for index, tree in enumerate(self.trees)]


def pool_nodes(trees: Sequence[DraftTree], most: int | None = None) -> NodePool:
    """Put the nodes of all trees in one order: the heaviest first, ties by tree, then by node id.

    It is the order of one heap over all sequences as far as each tree was built: a tree must hold
    as many nodes as the pool may give it. O(n log n) in the nodes of all trees, which are on the
    host. The pool ends after `most` nodes, if given.
    """
    # Rounding can make a node heavier than one before it, behind which it had to wait.
    if len(trees) == 1:  # in order already
        weights = trees[0].path_log_probs.tolist()[1:]
        return NodePool(
            tuple(trees), [0] * len(weights[:most]), list(accumulate(weights, min))[:most]
        )
    waited = [tree.path_log_probs[1:].cummin(0).values for tree in trees]
    pooled = torch.cat([torch.empty(0, dtype=torch.float64), *waited])
    path_log_probs, order = pooled.sort(descending=True, stable=True)
    sizes = torch.tensor([tree.num_nodes for tree in trees], dtype=torch.int64)
    owners = torch.arange(len(trees)).repeat_interleave(sizes)[order[:most]]
    return NodePool(tuple(trees), owners.tolist(), path_log_probs[:most].tolist())


def share_nodes(trees: Sequence[DraftTree], num_nodes: int) -> list[DraftTree]:
    """Cut the trees to the `num_nodes` likeliest draft nodes among them all, in `trees`' order.

    Raises
    ------
    BudgetError
        `num_nodes` is negative.
    """
    return pool_nodes(trees, num_nodes).take(num_nodes)
