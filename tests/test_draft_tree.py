"""The draft tree against published vectors and brute force."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draft_tree import DraftTree, build_draft_tree, build_from_log_probs
from engine.errors import BudgetError, ShapeError
from tests.trees import ranks_of

ROOT = 7
G1 = [(-0.1, -1.0, -2.5), (-0.2, -1.5, -3.0), (-0.3, -1.8, -2.0)]
G2 = [[math.log(p) for p in row] for row in [(0.6, 0.3, 0.1), (0.7, 0.2, 0.1), (0.5, 0.4, 0.1)]]
G3 = [(-1, -1)] * 3
G4 = [(-1, -2, -3)] * 3
G5 = [(-0.5, -1.5, -2.5, -3.5)]
G6 = [(0, -40)] * 7

# name, log-probs, budget, parents, ranks from the root, 1 + sum of path probabilities
GOLDEN = [
    ("G1", G1, 8, [-1, 0, 1, 2, 0, 4, 5, 1, 7], "0 00 000 1 10 100 01 010", 4.4381362252610685),
    ("G1", G1, 5, [-1, 0, 1, 2, 0, 4], "0 00 000 1 10", 3.8635409278953485),
    ("G2", G2, 1, [-1, 0], "0", 1.6),
    ("G2", G2, 3, [-1, 0, 1, 0], "0 00 1", 2.32),
    ("G2", G2, 6, [-1, 0, 1, 0, 2, 3, 2], "0 00 1 000 10 001", 2.908),
    ("G2", G2, 8, [-1, 0, 1, 0, 2, 3, 2, 1, 5], "0 00 1 000 10 001 01 100", 3.133),
    ("G2", G2, 12, [-1, 0, 1, 0, 2, 3, 2, 1, 5, 0, 5, 9, 7], "0 00 1 000 10 001 01 100 2 101 20 010", 3.447),
    ("G3", G3, 5, [-1, 0, 0, 1, 1, 2], "0 1 00 01 10", None),
    ("G3", G3, 7, [-1, 0, 0, 1, 1, 2, 2, 3], "0 1 00 01 10 11 000", None),
    ("G3", G3, 20, [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], "0 1 00 01 10 11 000 001 010 011 100 101 110 111", None),
    ("G4", G4, 8, [-1, 0, 1, 0, 2, 1, 3, 0, 2], "0 00 1 000 01 10 2 001", None),
    ("G4", G4, 16, [-1, 0, 1, 0, 2, 1, 3, 0, 2, 5, 1, 6, 3, 7, 2, 5, 10], "0 00 1 000 01 10 2 001 010 02 100 11 20 002 011 020", 1.9678059554457854),
    ("G5", G5, 3, [-1, 0, 0, 0], "0 1 2", None),
    ("G6", G6, 16, [-1, 0, 1, 2, 3, 4, 5, 6, 6, 5, 9, 4, 11, 12, 3, 14, 15], "0 00 000 0000 00000 000000 0000000 0000001 000001 0000010 00001 000010 0000100 0001 00010 000100", None),
]  # fmt: skip


def tree_of(log_probs, node_budget, token_ids=None):
    log_probs = torch.tensor(log_probs, dtype=torch.float32)
    if token_ids is None:
        token_ids = torch.arange(log_probs.shape[1]).repeat(log_probs.shape[0], 1)
    return build_from_log_probs(
        log_probs, torch.as_tensor(token_ids), root_token=ROOT, node_budget=node_budget
    )


def tree_from_parents(parents):
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return DraftTree(
        token_ids=torch.arange(len(parents)),
        parents=torch.tensor(parents, dtype=torch.int32),
        depths=torch.tensor(depths, dtype=torch.int32),
        path_log_probs=torch.zeros(len(parents), dtype=torch.float64),
    )


def walked_mask(tree):
    parents = tree.parents.tolist()
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        ancestor = node
        while ancestor != -1:
            mask[node, ancestor] = True
            ancestor = parents[ancestor]
    return mask


@pytest.mark.parametrize(
    ("log_probs", "budget", "parents", "ranks", "expected"),
    [case[1:] for case in GOLDEN],
    ids=[f"{case[0]}-{case[2]}" for case in GOLDEN],
)
def test_golden_trees_come_out_exactly(log_probs, budget, parents, ranks, expected):
    tree = tree_of(log_probs, budget)

    assert tree.parents.tolist() == parents
    assert ranks_of(tree) == [tuple(map(int, rank)) for rank in ranks.split()]
    assert tree.depths.tolist() == [0, *map(len, ranks.split())]
    assert tree.token_ids[0] == ROOT
    if expected is not None:
        # Only G4 is exact in binary; elsewhere the vectors were computed before fp32 rounding.
        allowed = 0.0 if log_probs is G4 else 1e-7
        assert tree.expected_commit_length == pytest.approx(expected, abs=allowed, rel=0)


def test_golden_masks_are_the_published_integers():
    tree = tree_of(G2, 8)

    assert tree.ancestor_bits().tolist() == [[1], [3], [7], [9], [23], [41], [71], [131], [297]]


@pytest.mark.parametrize("budget", [39, 40, 512])
def test_a_large_budget_gives_the_whole_tree_and_all_of_the_mass(budget):
    tree = tree_of(G2, budget)

    assert tree.num_nodes == 39
    assert tree.expected_commit_length == pytest.approx(4.0, abs=1e-7)
    assert set(ranks_of(tree)) == {
        ranks for depth in (1, 2, 3) for ranks in itertools.product(range(3), repeat=depth)
    }


def test_the_nntrainer_example_chooses_a_d_g_b_d():
    tokens = [list(map(ord, row)) for row in ("ABC", "DEF", "GHI")]

    tree = tree_of(G1, 5, tokens)

    assert "".join(map(chr, tree.token_ids[1:])) == "ADGBD"
    assert tree.parents.tolist() == [-1, 0, 1, 2, 0, 4]


def test_the_nntrainer_logits_start_with_token_zero():
    logits = torch.tensor([[2.0, 1, 0], [0, -1, 1]])

    tree = build_draft_tree(logits, root_token=99, node_budget=3)

    assert (int(tree.token_ids[1]), int(tree.depths[1])) == (0, 1)
    assert build_draft_tree(logits, root_token=99, node_budget=100).num_nodes == 3 + 9


def test_the_vllm_example_puts_sat_below_cat_and_dog():
    # Source: vllm-project/vllm vllm/v1/spec_decode/ddtree.py, docstring of DDTreeProposer.
    cat, dog, sat, ran, red = range(10, 15)
    log_probs = [[math.log(p) for p in row] for row in [(0.6, 0.35, 0.05), (0.7, 0.2, 0.1)]]

    tree = tree_of(log_probs, 4, [[cat, dog, red], [sat, ran, red]])

    children = [{} for _ in range(5)]
    for node in range(1, 5):
        children[tree.parents[node]][int(tree.token_ids[node])] = node
    assert tree.token_ids.tolist() == [ROOT, cat, sat, dog, sat]
    assert children == [{cat: 1, dog: 3}, {sat: 2}, {}, {sat: 4}, {}]
    assert tree.ancestor_mask().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]


def test_float32_rounding_of_log_probs_decides_ties_when_the_budget_exceeds_the_vocabulary():
    logits = torch.tensor([[0.1, 0.0, 0.3], [0.2, 0.1, 0.4]])

    tree = build_draft_tree(logits, root_token=ROOT, node_budget=100)

    log_probs = logits - logits.logsumexp(1, keepdim=True)
    assert tree.num_nodes == 3 + 9
    for node in range(1, tree.tree_size):
        parent, depth = tree.parents[node], tree.depths[node] - 1
        own = log_probs[depth, tree.token_ids[node]].double()
        # Sums of two float32 numbers of like size are exact in float64, whatever the order.
        assert tree.path_log_probs[node] == tree.path_log_probs[parent] + own


def test_a_width_of_one_gives_a_chain():
    tree = build_from_log_probs(
        torch.tensor(G2)[:, :1],
        torch.tensor([[10], [20], [30]]),
        root_token=9,
        node_budget=8,
    )

    assert tree.token_ids.tolist() == [9, 10, 20, 30]
    assert tree.parents.tolist() == [-1, 0, 1, 2]


descending = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        # Multiples of an eighth: sums are exact in binary, and ties are frequent.
        st.lists(st.integers(-24, 0), min_size=width, max_size=width).map(
            lambda row: [value / 8 for value in sorted(row, reverse=True)]
        ),
        min_size=1,
        max_size=4,
    )
)


@settings(deadline=None, max_examples=150)
@given(log_probs=descending, budget=st.integers(0, 60))
def test_the_nodes_are_the_heaviest_prefixes_in_order(log_probs, budget):
    tree = tree_of(log_probs, budget)

    widths = [range(len(row)) for row in log_probs]
    everything = [
        ranks for depth in range(1, len(widths) + 1) for ranks in itertools.product(*widths[:depth])
    ]
    weights = {
        ranks: sum(row[rank] for row, rank in zip(log_probs, ranks, strict=False))
        for ranks in everything
    }
    best = sorted(everything, key=lambda ranks: (-weights[ranks], ranks))[:budget]
    assert ranks_of(tree) == best
    assert tree.path_log_probs[1:].tolist() == [weights[ranks] for ranks in best]


def test_weights_are_summed_in_the_reference_order():
    ulp = 2.0**-52  # of 1 in float64
    second = [-0.375 * ulp, -ulp]

    tree = tree_of([[-1.0, -50.0], second], 3)

    assert ranks_of(tree) == [(0,), (0, 0), (0, 1)]
    # From left to right this rounds to -1; as a plain sum, or by the difference first, it does not.
    assert tree.path_log_probs.tolist() == [0.0, -1.0, -1.0, -1.0]
    assert -1.0 + second[1] == -1.0 + second[0] + (second[1] - second[0]) == -1.0 - ulp


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), horizon=st.integers(0, 7), budget=st.integers(0, 80))
def test_every_tree_from_logits_keeps_the_laws(seed, horizon, budget):
    logits = torch.randn(horizon, 50, generator=torch.Generator().manual_seed(seed)) * 3

    tree = build_draft_tree(logits, root_token=ROOT, node_budget=budget)

    parents, depths = tree.parents.long(), tree.depths
    nodes = torch.arange(tree.tree_size)
    assert tree.num_nodes == (budget if horizon > 1 else min(budget, 50 * horizon))
    assert (parents < nodes).all()
    assert parents[0] == -1
    assert (depths[1:] == depths[parents[1:]] + 1).all()
    assert (tree.path_log_probs.diff() <= 0).all()
    siblings = list(zip(parents.tolist(), tree.token_ids.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)
    assert torch.equal(tree.ancestor_mask(), walked_mask(tree))


@pytest.mark.parametrize("tree_size", [1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 513])
@pytest.mark.parametrize("shape", ["chain", "star", "random"])
def test_bits_and_mask_agree_with_a_walk_across_word_limits(tree_size, shape):
    chooser = torch.Generator().manual_seed(tree_size)
    parent_of = {
        "chain": lambda node: node - 1,
        "star": lambda _: 0,
        "random": lambda node: int(torch.randint(node, (), generator=chooser)),
    }[shape]
    tree = tree_from_parents([-1, *map(parent_of, range(1, tree_size))])

    bits, mask = tree.ancestor_bits(), tree.ancestor_mask()

    assert bits.shape == (tree_size, math.ceil(tree_size / 32))
    assert bits.dtype == torch.int32
    assert torch.equal(mask, walked_mask(tree))
    by_hand = [
        sum(1 << j for j in range(tree_size) if row[j]) & (2 ** (32 * bits.shape[1]) - 1)
        for row in mask.tolist()
    ]
    words = [
        sum((word & 0xFFFFFFFF) << 32 * place for place, word in enumerate(row))
        for row in bits.tolist()
    ]
    assert words == by_hand


def test_equal_logits_go_to_the_lower_token_id():
    tree = build_draft_tree(torch.zeros(2, 1000), root_token=ROOT, node_budget=5)

    assert tree.token_ids[1:].tolist() == [0, 1, 2, 3, 4]
    assert tree.depths[1:].tolist() == [1] * 5


@settings(deadline=None, max_examples=100)
@given(
    row=st.lists(
        st.sampled_from([-math.inf, -1e38, -2.5, -1e-45, -0.0, 0.0, 1e-45, 0.5, 1e38]),
        min_size=1,
        max_size=40,
    ),
    budget=st.integers(1, 45),
)
def test_the_order_within_a_depth_is_logit_then_token_id(row, budget):
    tree = build_draft_tree(torch.tensor([row]), root_token=ROOT, node_budget=budget)

    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    allowed = [token for token in order if row[token] - max(row) > -math.inf]
    assert tree.token_ids[1:].tolist() == allowed[:budget]


def test_log_probs_are_logits_less_their_log_sum_in_fp32():
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))

    tree = build_draft_tree(logits, root_token=ROOT, node_budget=20)

    normalised = logits - logits.logsumexp(1, keepdim=True)
    values, ids = normalised.sort(dim=1, descending=True)
    same = build_from_log_probs(values, ids, root_token=ROOT, node_budget=20)
    assert torch.equal(tree.path_log_probs, same.path_log_probs)
    assert torch.equal(tree.token_ids, same.token_ids)


def test_banned_tokens_are_never_chosen():
    log_probs = [(-1.0, -math.inf, -math.inf), (-1.0, -2.0, -math.inf), (-math.inf,) * 3]

    tree = tree_of(log_probs, 100)

    assert ranks_of(tree) == [(0,), (0, 0), (0, 1)]
    assert tree.path_log_probs.isfinite().all()


def test_a_depth_without_any_allowed_token_ends_the_tree():
    logits = torch.zeros(3, 4)
    logits[1] = -torch.inf

    tree = build_draft_tree(logits, root_token=ROOT, node_budget=100)

    assert tree.depths.tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "tree",
    [
        build_draft_tree(torch.zeros(7, 10), root_token=ROOT, node_budget=0),
        build_draft_tree(torch.zeros(0, 10), root_token=ROOT, node_budget=8),
        tree_of([[-1.0]], 0),
    ],
    ids=["no budget", "no depth", "no budget from log-probs"],
)
def test_nothing_to_choose_leaves_the_root_alone(tree):
    assert tree.token_ids.tolist() == [ROOT]
    assert tree.parents.tolist() == [-1]
    assert tree.ancestor_mask().tolist() == [[True]]


@pytest.mark.parametrize("budget", [-1, 513, True, 2.0])
def test_a_budget_outside_its_range_is_refused(budget):
    with pytest.raises(BudgetError, match=r"node_budget: expected an integer in 0\.\.512, got"):
        build_draft_tree(torch.zeros(2, 3), root_token=ROOT, node_budget=budget)
    with pytest.raises(BudgetError, match="node_budget"):
        tree_of([[-1.0]], budget)


def test_the_largest_budget_is_filled():
    tree = build_draft_tree(torch.zeros(3, 1000), root_token=ROOT, node_budget=512)

    assert tree.num_nodes == 512


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(3), "expected .*horizon, V"),
        (torch.zeros(2, 3, dtype=torch.float64), "float64"),
        (torch.tensor([[0.0, math.nan]]), "NaN"),
        (torch.tensor([[0.0, math.inf]]), "inf"),
    ],
)
def test_logits_without_a_distribution_are_refused(logits, message):
    with pytest.raises(ShapeError, match=message):
        build_draft_tree(logits, root_token=ROOT, node_budget=4)


@pytest.mark.parametrize(
    ("log_probs", "token_ids", "message"),
    [
        (torch.tensor([-1.0]), torch.tensor([[0]]), "log_probs: expected"),
        (torch.tensor([[-1.0]]).double(), torch.tensor([[0]]), "float64"),
        (torch.tensor([[-1.0]]), torch.tensor([[0]], dtype=torch.int32), "int32"),
        (torch.tensor([[-1.0]]), torch.tensor([[0, 1]]), r"token_ids: expected \[1, 1\]"),
        (torch.tensor([[-1.0, math.nan]]), torch.tensor([[0, 1]]), "NaN"),
        (torch.tensor([[math.inf, -1.0]]), torch.tensor([[0, 1]]), "inf"),
        (torch.tensor([[-2.0, -1.0]]), torch.tensor([[0, 1]]), "descending"),
        (torch.tensor([[-1.0, -2.0]]), torch.tensor([[4, 4]]), "distinct"),
    ],
)
def test_log_probs_that_are_no_sorted_candidates_are_refused(log_probs, token_ids, message):
    with pytest.raises(ShapeError, match=message):
        build_from_log_probs(log_probs, token_ids, root_token=ROOT, node_budget=4)


def test_a_tree_of_uneven_fields_is_refused():
    tree = tree_of(G2, 8)

    with pytest.raises(ShapeError, match="depths"):
        DraftTree(tree.token_ids, tree.parents, tree.depths[:-1], tree.path_log_probs)


def test_a_child_before_its_parent_is_refused():
    tree = tree_from_parents([-1, 0, 1])
    tree.parents[1] = 2

    with pytest.raises(ShapeError, match=r"parents\[1\]"):
        tree.ancestor_bits()
