"""Walks through a draft tree: published vectors, batches and what is refused."""

import math

import pytest
import torch

from engine.draft_tree import accept, accept_batch, build_draft_tree, build_from_log_probs
from engine.errors import ShapeError
from engine.sequence import Cut, cut_at_stop

ROOT = 7


def walk_tree():
    """The published tree of nine nodes, in which two tokens occur twice."""
    marginals = [(0.6, 0.3, 0.1), (0.7, 0.2, 0.1), (0.5, 0.4, 0.1)]
    return build_from_log_probs(
        torch.tensor([[math.log(p) for p in row] for row in marginals]),
        torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]]),
        root_token=ROOT,
        node_budget=8,
    )


def chain_of(*tokens):
    token_ids = torch.tensor(tokens, dtype=torch.int64)[:, None]
    return build_from_log_probs(
        torch.full(token_ids.shape, -1.0), token_ids, root_token=ROOT, node_budget=8
    )


def test_the_aphrodite_example_commits_one_draft_token():
    logits = torch.tensor([[9.0, 2, 1], [8, 7, 1], [6, 5, 4]])
    tree = build_draft_tree(logits, root_token=ROOT, node_budget=3)
    first = int(tree.token_ids[1])

    acceptance = accept(tree, torch.tensor([first, 1, 2, 0]))

    assert tree.tree_size == 4
    assert (acceptance.path.tolist(), acceptance.bonus_token) == ([1], 1)


@pytest.mark.parametrize(
    ("said", "path", "bonus"),
    [
        ({0: 10, 1: 20, 2: 77}, [1, 2], 77),
        ({0: 10, 1: 999, 2: 77}, [1], 999),
        ({0: 5, 1: 20, 2: 77}, [], 5),
    ],
)
def test_a_chain_is_walked_up_to_the_first_disagreement(said, path, bonus):
    tree = chain_of(10, 20)

    acceptance = accept(tree, torch.tensor([said[node] for node in range(3)]))

    assert (acceptance.path.tolist(), acceptance.bonus_token) == (path, bonus)


@pytest.mark.parametrize(
    ("said", "path"),
    [(["cat", "sat", "?", "?", "?"], [1, 2]), (["dog", "?", "?", "sat", "?"], [3, 4])],
)
def test_the_vllm_example_tells_the_two_sats_apart(said, path):
    # Source: vllm-project/vllm vllm/v1/spec_decode/ddtree.py, docstring of DDTreeProposer.
    words = ["?", "cat", "dog", "sat", "ran"]
    tree = build_from_log_probs(
        torch.tensor([[0.6, 0.35], [0.7, 0.2]]).log(),
        torch.tensor([[1, 2], [3, 4]]),
        root_token=ROOT,
        node_budget=4,
    )

    acceptance = accept(tree, torch.tensor([words.index(word) for word in said]))

    assert acceptance.path.tolist() == path


WALKS = {
    "W1": ({0: 12, 3: 21, 5: 31, 8: 77}, [0, 3, 5, 8], 77, [12, 21, 31, 77]),
    "W2": ({0: 11, 1: 22, 7: 31}, [0, 1, 7], 31, [11, 22, 31]),
    "W3": ({0: 13}, [0], 13, [13]),
    "W4": ({0: 11, 1: 21, 2: 32, 6: 5}, [0, 1, 2, 6], 5, [11, 21, 32, 5]),
}


def target_tokens_of(said):
    return torch.tensor([said.get(node, -5) for node in range(9)])


@pytest.mark.parametrize("name", WALKS)
def test_golden_walks_accept_exactly_the_published_nodes(name):
    said, accepted, bonus, emitted = WALKS[name]
    tree = walk_tree()

    acceptance = accept(tree, target_tokens_of(said))

    assert tree.token_ids.tolist() == [7, 11, 21, 12, 31, 21, 32, 22, 31]
    assert [0, *acceptance.path.tolist()] == accepted
    assert acceptance.path.dtype == torch.int32
    assert acceptance.bonus_token == bonus
    assert [*tree.token_ids[acceptance.path].tolist(), bonus] == emitted
    assert acceptance.commit_length == len(emitted)


def test_walk_five_ends_after_the_stop_token():
    emitted = WALKS["W1"][3]

    assert cut_at_stop(emitted, {21}, room=100) == Cut(2, "stop")


def test_a_batch_is_walked_like_its_trees_and_padding_is_not_looked_at():
    trees = [walk_tree(), chain_of(), chain_of(0, 1, 2)]
    rows = torch.full((3, 12), 11)
    rows[0, :9] = target_tokens_of(WALKS["W1"][0])
    rows[2, :4] = torch.tensor([0, 0, 0, 0])

    batch = accept_batch(trees, rows)

    alone = [accept(tree, row[: tree.tree_size]) for tree, row in zip(trees, rows, strict=True)]
    assert [a.path.tolist() for a in batch] == [a.path.tolist() for a in alone]
    assert [a.bonus_token for a in batch] == [a.bonus_token for a in alone] == [77, 11, 0]


def test_a_tree_of_the_root_alone_commits_the_bonus():
    acceptance = accept(chain_of(), torch.tensor([3]))

    assert (acceptance.num_accepted, acceptance.commit_length, acceptance.bonus_token) == (0, 1, 3)


@pytest.mark.parametrize("tokens", [torch.zeros(8), torch.zeros(9), torch.zeros(1, 9).long()])
def test_target_tokens_of_another_tree_are_refused(tokens):
    with pytest.raises(ShapeError, match=r"target_tokens: expected \[9\]"):
        accept(walk_tree(), tokens)


@pytest.mark.parametrize("shape", [(2, 8), (1, 9), (9,)])
def test_target_tokens_of_another_batch_are_refused(shape):
    with pytest.raises(ShapeError, match="target_tokens"):
        accept_batch([walk_tree(), walk_tree()], torch.zeros(shape, dtype=torch.int64))
