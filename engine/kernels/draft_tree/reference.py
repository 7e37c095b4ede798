"""The definition of draft_tree: a heap on the host finds the heaviest prefixes in their order."""

from __future__ import annotations

import heapq
from itertools import count, islice
from typing import TYPE_CHECKING

import torch

from engine.errors import ShapeError
from engine.kernels.draft_tree.problem import NO_TREE, WORD_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from engine.kernels.draft_tree.problem import Problem

# A candidate on the heap or a chosen node: cost, ranks, parent, compared in this order. The cost
# is minus the path log-prob; the ranks, of the node and its ancestors within their depths, root
# excluded, are unique, so they settle equal costs: lexicographic, a prefix first.
Node = tuple[float, tuple[int, ...], int]


def run(problem: Problem) -> None:
    """Write the trees, one after the other; candidates on a device are read back."""
    trees, T = problem.trees, problem.num_rows
    is_sound = (problem.log_probs < torch.inf) & (problem.token_ids >= 0)  # no NaN, no +inf
    sound = is_sound.flatten(1).all(1).tolist()
    host = (problem.log_probs, problem.token_ids, problem.root_tokens, problem.root_positions)
    log_probs, token_ids, roots, positions = (one.cpu() for one in host)
    for n, (root, position) in enumerate(zip(roots.tolist(), positions.tolist(), strict=True)):
        nodes = best_nodes(log_probs[n], problem.node_budget) if sound[n] else []
        filled = T - 1 - len(nodes)
        chosen = [int(token_ids[n, len(ranks) - 1, ranks[-1]]) for _, ranks, _ in nodes]
        parents = [-1, *(parent for _, _, parent in nodes), *[0] * filled]
        depths = torch.tensor([0, *(len(ranks) for _, ranks, _ in nodes), *[1] * filled])
        weights = [0.0, *(-cost for cost, _, _ in nodes), *[-torch.inf] * filled]
        trees.token_ids[n] = torch.tensor([root, *chosen, *[root] * filled])
        trees.positions[n] = position + depths
        trees.parents[n] = torch.tensor(parents)
        trees.depths[n] = depths
        trees.path_log_probs[n] = torch.tensor(weights, dtype=torch.float64)
        trees.ancestor_bits[n] = ancestor_words(parents)
        trees.tree_sizes[n] = 1 + len(nodes) if sound[n] else NO_TREE


def best_nodes(log_probs: Tensor, node_budget: int) -> list[Node]:
    """Return the heaviest prefixes by log-probs [horizon, K], at most `node_budget`, in order."""
    # Rank r is chosen after r better siblings.
    found: list[Node] = []
    for _ in islice(best_first(log_probs[:, :node_budget], found), node_budget):
        pass  # each is found
    return found


def best_first(log_probs: Tensor, found: list[Node]) -> Iterator[float]:
    """Find the heaviest prefixes by log-probs [horizon, K] in order, for as long as one is asked.

    Each goes to the end of `found` (mutated) and is yielded by its cost, which is a float64 sum in
    the published order of operations: its rounding decides ties.
    """
    # What is -inf is dropped before the heap: a sibling's weight would be -inf - -inf.
    widths = (log_probs != -torch.inf).sum(1).tolist()
    costs = [row[:width] for row, width in zip((-log_probs).tolist(), widths, strict=True)]
    heap: list[Node] = [(row[0], (0,), 0) for row in costs[:1] if row]
    for number in count(1):
        if not heap:
            return
        found.append(heap[0])
        cost, ranks, parent = heap[0]
        yield cost
        depth, rank = len(ranks), ranks[-1]
        row = costs[depth - 1]
        if rank + 1 < len(row):
            sibling = cost - row[rank] + row[rank + 1]
            heapq.heapreplace(heap, (sibling, (*ranks[:-1], rank + 1), parent))
        else:
            heapq.heappop(heap)
        if depth < len(costs) and costs[depth]:
            heapq.heappush(heap, (cost + costs[depth][0], (*ranks, 0), number))


def ancestor_words(parents: Sequence[int]) -> Tensor:
    """Return the ancestor mask of T nodes in words, `[T, ceil(T / 32)] int32`.

    A parent that does not come before its child is a ShapeError.
    """
    rows = [1]
    for node in range(1, len(parents)):
        parent = parents[node]
        if not 0 <= parent < node:
            raise ShapeError(
                f"parents[{node}]: expected 0..{node - 1}, got {parent} (parents come first)"
            )
        rows.append(rows[parent] | 1 << node)
    num_words = -(-len(rows) // WORD_BITS)
    packed = bytearray().join(row.to_bytes(4 * num_words, "little") for row in rows)
    return torch.frombuffer(packed, dtype=torch.int32).reshape(len(rows), num_words)
