"""One pool of draft nodes for several sequences: the likeliest nodes first, whoever's they are.

Each tree lists its nodes in the order in which best-first search chose them. So one search over
all sequences is the merge of these lists, and its first n nodes are a prefix of every tree. This
module knows nothing about what a node costs. A tree alone has nothing to be merged with and needs
no tensor operation: for some dozens of nodes these would be most of the time. Where trees are not
built yet, their searches are merged node by node, for as long as somebody asks for one more.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat

import torch
from torch import Tensor

from engine.candidates import top_candidates
from engine.config import MAX_NODE_BUDGET, check_node_budget
from engine.draft_tree import Acceptance, DraftTree, tree_of
from engine.errors import BudgetError
from engine.kernels.draft_tree.reference import Node, best_first

NUM_PLACES = 1 + MAX_NODE_BUDGET.bit_length()  # in the order of choice: 1, 2, 3 to 4, 5 to 8, ...
PRIOR_TOKENS = 4.0  # of a place whose promises are believed before anything is known of it
DECAY = 0.98  # of what is known, with every tree: some fifty trees are remembered


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


@dataclass(slots=True, eq=False)
class TreeSearch:
    """The search for one tree, which goes as far as it is iterated: once, node by node."""

    log_probs: Tensor  # [horizon, K] float32, descending; -inf = banned
    token_ids: Tensor  # [horizon, K] int64
    root_token: int
    node_budget: int
    found: list[Node] = field(default_factory=list)

    def __iter__(self) -> Iterator[float]:
        """Find one node after the other; yield minus their path log-probs, never descending."""
        costs = islice(best_first(self.log_probs, self.found), self.node_budget)
        # Rounding can make a node cheaper than one behind which it had to wait.
        return accumulate(costs, max)

    def tree(self, num_nodes: int) -> DraftTree:
        """Return the tree of the first `num_nodes` nodes that were found."""
        return tree_of(self.found[:num_nodes], self.token_ids, self.root_token)


def tree_searches(
    draft_logits: Tensor, root_tokens: Sequence[int], node_budget: int, *, is_chain: bool = False
) -> list[TreeSearch]:
    """Begin the searches for N trees of at most `node_budget` nodes, of chains if `is_chain`.

    Logits and errors are as in `build_draft_trees`; all are read back to the host at once.
    """
    check_node_budget(node_budget, least=0)
    candidates = top_candidates(draft_logits, 1 if is_chain else max(1, node_budget))
    parts = zip(candidates.log_probs, candidates.token_ids, root_tokens, strict=True)
    return [TreeSearch(*part, node_budget) for part in parts]


def merged(costs: Sequence[Iterable[float]]) -> Iterator[tuple[float, int]]:
    """Yield minus the path log-prob, and the owner, of nodes in the order of one pool.

    `costs` are those of each tree's nodes, as a `TreeSearch` finds them. Ties go by owner, as in
    `pool_nodes`. Each tree is at most one node ahead.
    """
    owned = [zip(nodes, repeat(owner)) for owner, nodes in enumerate(costs)]
    return owned[0] if len(owned) == 1 else heapq.merge(*owned)


@dataclass(slots=True, eq=False)
class Odds:
    """What nodes promised and what the target accepted of them, by their place in the order.

    Places are the powers of two that buckets end at, so that one number for each says whether the
    next bucket keeps its promise. Old trees fade: what is not tried for long is believed again.
    """

    promised: list[float] = field(default_factory=lambda: [0.0] * NUM_PLACES)
    accepted: list[float] = field(default_factory=lambda: [0.0] * NUM_PLACES)

    def tell(self, trees: Sequence[DraftTree], outcomes: Sequence[Acceptance]) -> None:
        """Add what became of trees that were verified."""
        for tree, outcome in zip(trees, outcomes, strict=True):
            promises = list(map(math.exp, tree.path_log_probs.tolist()[1:]))
            self.accepted = [DECAY * value for value in self.accepted]
            self.promised = [DECAY * value for value in self.promised]
            for place in range(len(promises).bit_length() + 1):
                self.promised[place] += sum(promises[1 << place >> 1 : 1 << place])
            for node in outcome.path.tolist():
                self.accepted[(node - 1).bit_length()] += 1.0

    def ratios(self) -> list[float]:
        """Return the tokens to expect of a promised one, for each place."""
        return [
            (accepted + PRIOR_TOKENS) / (promised + PRIOR_TOKENS)
            for accepted, promised in zip(self.accepted, self.promised, strict=True)
        ]
