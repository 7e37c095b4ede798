"""One pool of draft nodes for several sequences: the likeliest nodes first, whoever's they are.

Each tree lists its nodes in the order in which best-first search chose them. So one search over
all sequences is the merge of these lists, and its first n nodes are a prefix of every tree. This
module knows nothing about what a node costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.draft_tree import DraftTree
from engine.errors import BudgetError


@dataclass(frozen=True, slots=True, eq=False)
class NodePool:
    """The draft nodes of all trees in the order in which one search would choose them."""

    trees: tuple[DraftTree, ...]
    owners: Tensor  # [num_nodes] int64, index of each node's tree
    path_log_probs: Tensor  # [num_nodes] float64, descending

    @property
    def num_nodes(self) -> int:
        """Draft nodes of all trees, roots excluded."""
        return self.owners.shape[0]

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
        counts = torch.bincount(self.owners[:num_nodes], minlength=len(self.trees)).tolist()
        return [tree.prefix(count) for tree, count in zip(self.trees, counts, strict=True)]


def pool_nodes(trees: Sequence[DraftTree]) -> NodePool:
    """Put the nodes of all trees in one order: the heaviest first, ties by tree, then by node id.

    It is the order of one heap over all sequences as far as each tree was built: a tree must hold
    as many nodes as the pool may give it. O(n log n) in the nodes of all trees, which are on the
    host.
    """
    # Rounding can make a node heavier than one before it, behind which it had to wait.
    weights = [tree.path_log_probs[1:].cummin(0).values for tree in trees]
    sizes = torch.tensor([tree.num_nodes for tree in trees], dtype=torch.int64)
    pooled = torch.cat([torch.empty(0, dtype=torch.float64), *weights])
    path_log_probs, order = pooled.sort(descending=True, stable=True)
    owners = torch.arange(len(trees)).repeat_interleave(sizes)
    return NodePool(tuple(trees), owners[order], path_log_probs)


def share_nodes(trees: Sequence[DraftTree], num_nodes: int) -> list[DraftTree]:
    """Cut the trees to the `num_nodes` likeliest draft nodes among them all, in `trees`' order.

    Raises
    ------
    BudgetError
        `num_nodes` is negative.
    """
    return pool_nodes(trees).take(num_nodes)
