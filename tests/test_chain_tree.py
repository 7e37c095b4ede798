"""The draft tree's smaller forms: a chain, the root alone, the first nodes of a larger tree."""

import math

import pytest
import torch

from engine.draft_tree import (
    DraftTree,
    build_draft_tree,
    build_from_log_probs,
    chain_tree,
    root_tree,
)
from engine.errors import BudgetError, ShapeError

ROOT = 7


def random_logits(horizon, vocabulary):
    return torch.randn(horizon, vocabulary, generator=torch.Generator().manual_seed(3)) * 2


def test_a_chain_takes_the_likeliest_token_of_each_depth():
    logits = random_logits(7, 1000)

    chain = chain_tree(logits, root_token=ROOT, node_budget=5)

    assert chain.token_ids.tolist() == [ROOT, *logits.argmax(1)[:5].tolist()]
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3, 4]
    assert chain.depths.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_chain_weighs_what_its_nodes_weigh_in_the_tree():
    logits = random_logits(4, 20)

    chain = chain_tree(logits, root_token=ROOT, node_budget=64)

    tree = build_draft_tree(logits, root_token=ROOT, node_budget=512)
    weights = dict(zip(token_paths(tree), tree.path_log_probs.tolist(), strict=True))
    assert chain.num_nodes == 4
    assert chain.path_log_probs.tolist() == [weights[path] for path in token_paths(chain)]


def token_paths(tree):
    paths = []
    for parent, token in zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True):
        paths.append((*(paths[parent] if paths else ()), token))
    return paths


def test_a_chain_of_equals_takes_the_lowest_ids_and_ends_where_all_is_banned():
    logits = torch.zeros(4, 9)
    logits[1, :3] = -torch.inf
    logits[3] = -torch.inf

    chain = chain_tree(logits, root_token=ROOT, node_budget=64)

    assert chain.token_ids.tolist() == [ROOT, 0, 3, 0]


@pytest.mark.parametrize("budget", [-1, 513])
def test_a_chain_refuses_what_a_tree_refuses(budget):
    with pytest.raises(BudgetError, match="node_budget"):
        chain_tree(torch.zeros(2, 3), root_token=ROOT, node_budget=budget)
    with pytest.raises(ShapeError, match="NaN"):
        chain_tree(torch.full((1, 2), math.nan), root_token=ROOT, node_budget=4)


@pytest.mark.parametrize(
    "tree",
    [
        root_tree(ROOT),
        chain_tree(torch.zeros(7, 10), root_token=ROOT, node_budget=0),
        chain_tree(torch.zeros(0, 10), root_token=ROOT, node_budget=8),
        chain_tree(torch.full((2, 10), -torch.inf), root_token=ROOT, node_budget=8),
        build_draft_tree(random_logits(3, 10), root_token=ROOT, node_budget=9).prefix(0),
    ],
    ids=["root tree", "no budget", "no depth", "all banned", "no nodes kept"],
)
def test_the_root_alone_is_one_and_the_same_tree(tree):
    empty = build_from_log_probs(
        torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64), root_token=ROOT, node_budget=0
    )

    for field in DraftTree.__dataclass_fields__:
        assert torch.equal(getattr(tree, field), getattr(empty, field))


@pytest.mark.parametrize("num_nodes", [-1, 9])
def test_a_prefix_beyond_the_tree_is_refused(num_nodes):
    tree = build_draft_tree(random_logits(3, 10), root_token=ROOT, node_budget=8)

    with pytest.raises(BudgetError, match=r"num_nodes: expected 0\.\.8, got"):
        tree.prefix(num_nodes)
