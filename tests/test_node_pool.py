"""Several trees in one pool of nodes, against one heap over all sequences."""

import heapq

import numpy as np
import pytest
import torch

from engine.draft_tree import DraftTree, build_draft_tree, build_from_log_probs, root_tree
from engine.errors import BudgetError
from engine.node_pool import pool_nodes, share_nodes


def random_log_probs(chooser):
    """Descending multiples of an eighth: sums are exact in binary, and ties are frequent."""
    shape = chooser.integers(0, 5), chooser.integers(1, 7)
    steps = chooser.integers(0, chooser.choice([2, 8, 40]), shape)
    return -np.sort(steps, axis=1) / 8


def tree_of(log_probs, node_budget):
    horizon, width = log_probs.shape
    return build_from_log_probs(
        torch.from_numpy(log_probs.astype(np.float32)),
        torch.arange(width).repeat(horizon, 1),
        root_token=7,
        node_budget=node_budget,
    )


def one_heap(all_log_probs, num_nodes):
    """How many nodes each sequence gets from one best-first search over all of them."""
    heap = [(-rows[0][0], n, (0,)) for n, rows in enumerate(all_log_probs) if len(rows)]
    heapq.heapify(heap)
    counts = [0] * len(all_log_probs)
    while heap and sum(counts) < num_nodes:
        cost, n, ranks = heapq.heappop(heap)
        counts[n] += 1
        rows, depth, rank = all_log_probs[n], len(ranks), ranks[-1]
        if rank + 1 < rows.shape[1]:
            sibling = cost + rows[depth - 1][rank] - rows[depth - 1][rank + 1]
            heapq.heappush(heap, (sibling, n, (*ranks[:-1], rank + 1)))
        if depth < len(rows):
            heapq.heappush(heap, (cost - rows[depth][0], n, (*ranks, 0)))
    return counts


@pytest.mark.parametrize("seed", range(200))
def test_a_shared_pool_is_one_heap_over_all_sequences(seed):
    chooser = np.random.default_rng(seed)
    all_log_probs = [random_log_probs(chooser) for _ in range(chooser.integers(1, 9))]
    num_nodes = int(chooser.integers(0, 200))
    trees = [tree_of(log_probs, num_nodes) for log_probs in all_log_probs]

    shared = share_nodes(trees, num_nodes)

    assert [tree.num_nodes for tree in shared] == one_heap(all_log_probs, num_nodes)
    for tree, whole in zip(shared, trees, strict=True):
        for field in DraftTree.__dataclass_fields__:
            assert torch.equal(getattr(tree, field), getattr(whole, field)[: tree.tree_size])


def test_equal_nodes_go_to_the_earlier_sequence_and_within_it_to_the_earlier_node():
    trees = [tree_of(np.full((2, 2), -1.0), 6) for _ in range(3)]

    sizes = [[tree.num_nodes for tree in share_nodes(trees, n)] for n in range(9)]

    # Each tree holds two nodes of weight -1, then four of weight -2.
    assert sizes == [
        [0, 0, 0],
        [1, 0, 0],
        [2, 0, 0],
        [2, 1, 0],
        [2, 2, 0],
        [2, 2, 1],
        [2, 2, 2],
        [3, 2, 2],
        [4, 2, 2],
    ]


def test_a_node_never_comes_before_one_that_it_had_to_wait_for():
    rounded_up = DraftTree(
        token_ids=torch.arange(4),
        parents=torch.tensor([-1, 0, 1, 2], dtype=torch.int32),
        depths=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        path_log_probs=torch.tensor([0.0, -2.0, -1.9, -3.0], dtype=torch.float64),
    )
    plain = tree_of(np.array([[-1.95, -2.0, -2.5]]), 3)

    sizes = [[tree.num_nodes for tree in share_nodes([rounded_up, plain], n)] for n in range(5)]

    # A heap sees -1.9 only once -2.0 is taken, and -2.0 only once it is the best.
    assert sizes == [[0, 0], [0, 1], [1, 1], [2, 1], [2, 2]]


def test_sharing_expects_more_tokens_than_equal_parts():
    chooser = torch.Generator().manual_seed(0)
    logits = [torch.randn(7, 100, generator=chooser) * scale for scale in (0.5, 2, 8)]
    trees = [build_draft_tree(rows, root_token=7, node_budget=48) for rows in logits]

    shared = share_nodes(trees, 48)

    equal = [tree.prefix(16) for tree in trees]
    expected = [sum(t.expected_commit_length for t in part) for part in (shared, equal)]
    assert sum(tree.num_nodes for tree in shared) == 48
    assert expected[0] > expected[1]


def test_thirty_two_full_trees_are_shared_to_the_last_node():
    chooser = torch.Generator().manual_seed(1)
    logits = torch.randn(32, 7, 600, generator=chooser) * 2
    trees = [build_draft_tree(rows, root_token=7, node_budget=512) for rows in logits]

    shared = share_nodes(trees, 512)

    weights = torch.cat([tree.path_log_probs[1:] for tree in trees])
    kept = torch.cat([tree.path_log_probs[1:] for tree in shared])
    assert torch.equal(kept.sort(descending=True).values, weights.topk(512).values)


def test_a_pool_gives_no_more_than_it_has():
    pool = pool_nodes([root_tree(3), tree_of(np.array([[-1.0, -2.0]]), 2)])

    assert pool.num_nodes == 2
    assert [tree.num_nodes for tree in pool.take(100)] == [0, 2]
    assert pool.path_log_probs == [-1.0, -2.0]
    assert share_nodes([], 100) == []


def test_a_negative_pool_is_refused():
    with pytest.raises(BudgetError, match="num_nodes: expected 0 or more, got -1"):
        share_nodes([root_tree(3)], -1)
