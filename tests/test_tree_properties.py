"""Laws of draft trees, held against oracles that build and walk in other ways.

The order of choice is checked by repeated selection over integers, many cases at once; large
vocabularies by a beam over fully sorted rows; masks and walks by their definitions.
"""

import itertools

import numpy as np
import pytest
import torch

from engine.draft_tree import DraftTree, accept, build_draft_tree, build_from_log_probs
from tests.trees import ranks_of

ROOT = 7
HORIZON, WIDTH, LARGEST = 15, 200, 512  # of the random cases
NUM_BATCHES, BATCH = 20, 500
BANNED = np.iinfo(np.int64).max
DIGIT = WIDTH + 2  # digits are ranks plus one, so that nothing comes before rank 0
# The order of ranks as two numbers: six digits behind the cost, eight in the tail. The fifteenth
# is not needed: of the children of one node only the next is ever open.
HEAD = np.array([0] + [DIGIT ** (6 - depth) if depth <= 6 else 0 for depth in range(1, 17)])
TAIL = np.array([0] + [DIGIT ** (14 - depth) if 6 < depth <= 14 else 0 for depth in range(1, 17)])


def select_repeatedly(costs, num_steps):
    """Take the best of all open prefixes again and again: (cost, parent, depth, rank) by step.

    A prefix is open if its parent and its better sibling were taken. Costs are integers,
    [cases, depths, ranks], ascending in rank, BANNED where there is nothing.
    """
    num_cases = len(costs)
    padded = np.pad(costs, ((0, 0), (0, 2), (0, 1)), constant_values=BANNED)
    cases = np.arange(num_cases)
    key, tail, above, parent, depth, rank, head = (
        np.zeros((num_cases, num_steps + 1), dtype=np.int64) for _ in range(7)
    )
    taken = np.zeros((num_steps, 4, num_cases), dtype=np.int64)

    def put(slot, values):
        above[cases, slot], head[cases, slot], tail[cases, slot] = values[:3]
        parent[cases, slot], depth[cases, slot], rank[cases, slot] = values[3:]
        step = padded[cases, np.minimum(values[4], padded.shape[1]) - 1, values[5]]
        is_banned = (step == BANNED) | (values[0] == BANNED)
        total = np.where(is_banned, 0, values[0] + step)
        key[cases, slot] = np.where(is_banned, BANNED, total * DIGIT**6 + values[1])

    zero = np.zeros(num_cases, dtype=np.int64)
    put(0, (zero, zero + HEAD[1], zero + TAIL[1], zero, zero + 1, zero))
    for step in range(num_steps):
        open_keys = key[:, : step + 1]
        is_best = open_keys == open_keys.min(1, keepdims=True)
        slot = np.where(is_best, tail[:, : step + 1], BANNED).argmin(1)
        best = [field[cases, slot] for field in (above, head, tail, parent, depth, rank)]
        is_open = key[cases, slot] != BANNED
        cost = np.where(is_open, key[cases, slot] // DIGIT**6, BANNED)
        taken[step] = cost, best[3], best[4], best[5]
        d = best[4]
        next_rank = np.minimum(best[5] + 1, costs.shape[2])
        put(slot, (best[0], best[1] + HEAD[d], best[2] + TAIL[d], best[3], d, next_rank))
        deeper = np.minimum(d + 1, HORIZON + 1)
        child = (cost, best[1] + HEAD[deeper], best[2] + TAIL[deeper])
        put(step + 1, (*child, zero + step + 1, deeper, zero))
    return taken


def random_costs(chooser):
    """Random ascending integers for one case, coarse ones for ties, some of them banned."""
    horizon, width = chooser.integers(1, HORIZON + 1), chooser.integers(1, WIDTH + 1)
    coarseness = chooser.choice([1, 2, 5, 30, 400])
    costs = np.sort(chooser.integers(0, coarseness + 1, (horizon, width)), axis=1)
    if chooser.random() < 0.2:
        allowed = chooser.integers(0, width + 1, horizon)
        costs[np.arange(width) >= allowed[:, None]] = BANNED
    return costs


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_ten_thousand_trees_come_in_the_order_of_repeated_selection(batch):
    chooser = np.random.default_rng(batch)
    # Cubes: small budgets are many, and the steps that a batch shares stay few.
    budgets = (LARGEST * ((batch + chooser.random(BATCH)) / NUM_BATCHES) ** 3).round().astype(int)
    if batch + 1 == NUM_BATCHES:
        budgets[-1] = LARGEST
    costs = np.full((BATCH, HORIZON, WIDTH), BANNED)
    trees = []
    for case, budget in enumerate(budgets):
        own = random_costs(chooser)
        costs[case, : own.shape[0], : own.shape[1]] = own
        unit = 2.0 ** -chooser.integers(0, 12)  # sums stay exact in binary
        log_probs = np.where(own == BANNED, -np.inf, own * -unit)
        token_ids = chooser.permutation(own.size).reshape(own.shape)
        tree = build_from_log_probs(
            torch.from_numpy(log_probs.astype(np.float32)),
            torch.from_numpy(token_ids),
            root_token=ROOT,
            node_budget=int(budget),
        )
        trees.append((tree, token_ids, unit))

    taken = select_repeatedly(costs, int(budgets.max()))

    for case, (tree, token_ids, unit) in enumerate(trees):
        cost, parent, depth, rank = taken[: budgets[case], :, case].T
        size = int((cost != BANNED).sum())
        assert np.array_equal(tree.parents[1:], parent[:size])
        assert np.array_equal(tree.depths[1:], depth[:size])
        assert np.array_equal(tree.token_ids[1:], token_ids[depth[:size] - 1, rank[:size]])
        assert np.array_equal(tree.path_log_probs[1:], cost[:size] * -unit)


@pytest.mark.parametrize("seed", range(100))
def test_trees_from_real_log_probs_hold_the_heaviest_prefixes(seed):
    chooser = torch.Generator().manual_seed(seed)
    horizon, vocabulary = 1 + seed % 4, 1 + seed % 6
    logits = torch.randn(horizon, vocabulary, generator=chooser) * 2
    log_probs = logits.log_softmax(1).sort(1, descending=True).values
    weights = {}
    for depth in range(1, horizon + 1):
        for ranks in itertools.product(range(vocabulary), repeat=depth):
            row, rank = log_probs[depth - 1].tolist(), ranks[-1]
            above = weights.get(ranks[:-1], 0.0)
            better = weights.get((*ranks[:-1], rank - 1))  # added up in the published order
            weights[ranks] = above + row[0] if not rank else better - row[rank - 1] + row[rank]
    best = sorted(weights, key=lambda ranks: (-weights[ranks], ranks))

    masses = []
    for budget in range(min(len(best), 60) + 1):
        tree = build_from_log_probs(
            log_probs,
            torch.arange(vocabulary).repeat(horizon, 1),
            root_token=ROOT,
            node_budget=budget,
        )
        assert ranks_of(tree) == best[:budget]
        masses.append(tree.expected_commit_length)
    assert all(less < more for less, more in itertools.pairwise(masses))


def beam_weights(log_probs, budget):
    """Weights of the heaviest prefixes: the best of each depth come from the best of the last."""
    level, everything = log_probs.new_zeros(1), []
    for row in log_probs:
        level = (level[:, None] + row[:budget]).flatten()
        level = level.topk(min(budget, level.numel())).values
        everything.append(level)
    return torch.cat(everything).topk(budget).values


@pytest.mark.parametrize("vocabulary", [1000, 151_936])
@pytest.mark.parametrize(("horizon", "budget"), [(1, 512), (3, 64), (7, 1), (7, 256), (15, 512)])
@pytest.mark.parametrize("step", [None, 0.5], ids=["distinct", "tied"])
def test_large_vocabularies_give_the_best_set_with_the_lowest_ids_of_equals(
    vocabulary, horizon, budget, step
):
    logits = torch.randn(horizon, vocabulary, generator=torch.Generator().manual_seed(budget))
    logits = logits * 2 if step is None else (logits / step).round() * step

    tree = build_draft_tree(logits, root_token=ROOT, node_budget=budget)

    by_rank = logits.sort(dim=1, descending=True, stable=True)  # equal logits by ascending id
    log_probs = by_rank.values.double() - logits.double().logsumexp(1, keepdim=True)
    weights = tree.path_log_probs[1:]
    assert (weights.diff() <= 0).all()
    # float32 log-probs near 10 are known to 5e-7, and a path adds up to 15 of them.
    torch.testing.assert_close(weights, beam_weights(log_probs, budget), atol=1e-5, rtol=0)
    assert_ranks_lead(tree, by_rank.indices)


def best_of_the_open(costs, budget):
    """Take the cheapest of all open prefixes again and again; costs add up as published."""
    open_costs, taken = {(0,): costs[0][0]}, []
    while open_costs and len(taken) < budget:
        ranks = min(open_costs, key=lambda ranks: (open_costs[ranks], ranks))
        cost, row, rank = open_costs.pop(ranks), costs[len(ranks) - 1], ranks[-1]
        taken.append(ranks)
        if rank + 1 < len(row):
            open_costs[*ranks[:-1], rank + 1] = cost - row[rank] + row[rank + 1]
        if len(ranks) < len(costs):
            open_costs[*ranks, 0] = cost + costs[len(ranks)][0]
    return taken


# Source: rmagur1203/vllm-ddtree tests/ddtree/t4_tree_build.py; a seed is the place in this list.
TWELVE = [
    *((7, 1000, budget) for budget in (16, 32, 64, 128, 256)),
    *((7, 151_936, budget) for budget in (64, 256)),
    (3, 1000, 16),
    (15, 1000, 512),
    *((7, 1000, budget) for budget in (1, 2)),
    (1, 1000, 64),
]


@pytest.mark.parametrize("sharpness", [1, 6], ids=["as published, flat", "deep"])
@pytest.mark.parametrize("number", range(12))
def test_the_twelve_trees_of_vllm_ddtree_come_in_the_published_order(number, sharpness):
    horizon, vocabulary, budget = TWELVE[number]
    logits = torch.randn(horizon, vocabulary, generator=torch.Generator().manual_seed(number))
    logits *= sharpness  # even distributions give trees that are hardly deeper than one node

    tree = build_draft_tree(logits, root_token=ROOT, node_budget=budget)

    by_rank = (logits - logits.logsumexp(1, keepdim=True)).sort(1, descending=True)
    order = by_rank.indices.tolist()
    expected = best_of_the_open((-by_rank.values[:, :budget]).tolist(), budget)
    node_of = {(): 0} | {ranks: node for node, ranks in enumerate(expected, start=1)}
    assert tree.token_ids[1:].tolist() == [order[len(r) - 1][r[-1]] for r in expected]
    assert tree.parents[1:].tolist() == [node_of[ranks[:-1]] for ranks in expected]
    assert tree.depths[1:].tolist() == [*map(len, expected)]


def assert_ranks_lead(tree, order):
    """Assert that the tokens below each node are the first ones of their depth, in order."""
    first, tokens = order[:, : tree.num_nodes].tolist(), tree.token_ids.tolist()
    below = {}
    for node, parent in enumerate(tree.parents[1:].tolist(), start=1):
        below.setdefault(parent, []).append(tokens[node])
    for node, children in below.items():
        assert children == first[tree.depths[node]][: len(children)]


def test_banned_tokens_at_the_edge_of_the_top_are_left_out():
    logits = torch.full((2, 150_000), -torch.inf)
    logits[:, [149_999, 3, 70_000]] = 0.0

    tree = build_draft_tree(logits, root_token=ROOT, node_budget=512)

    assert tree.num_nodes == 3 + 9
    assert set(tree.token_ids[1:].tolist()) == {3, 70_000, 149_999}


@pytest.fixture(scope="module")
def largest_tree():
    logits = torch.randn(7, 600, generator=torch.Generator().manual_seed(1)) * 2
    return logits, build_draft_tree(logits, root_token=ROOT, node_budget=LARGEST)


def test_every_budget_gives_the_prefix_of_the_largest_tree(largest_tree):
    logits, largest = largest_tree

    for budget in range(LARGEST + 1):
        tree, prefix = (
            build_draft_tree(logits, root_token=ROOT, node_budget=budget),
            largest.prefix(budget),
        )
        for field in DraftTree.__dataclass_fields__:
            assert torch.equal(getattr(tree, field), getattr(prefix, field))


def test_masks_of_every_tree_size_are_the_closure_of_the_parents(largest_tree):
    _, largest = largest_tree
    nodes = torch.arange(1, largest.tree_size)
    reach = torch.eye(largest.tree_size)
    reach[nodes, largest.parents[1:].long()] = 1.0
    for _ in range(3):  # paths of up to 2 ** 3 edges, and no tree is deeper than 7
        reach = (reach @ reach).clamp(max=1.0)
    closure = reach.bool()

    for size in range(1, largest.tree_size + 1):
        tree = largest.prefix(size - 1)
        bits = tree.ancestor_bits()
        places = torch.arange(32 * bits.shape[1])
        unpacked = (bits[:, places // 32] >> (places % 32) & 1).bool()
        assert bits.shape == (size, -(-size // 32))
        assert torch.equal(unpacked[:, :size], closure[:size, :size])
        assert not unpacked[:, size:].any()
    assert torch.equal(largest.ancestor_mask(), closure)


def reorder(tree, chooser):
    """The same tree with its nodes in another order, parents first; gives the order too."""
    parents = tree.parents.tolist()
    order, waiting = [0], [node for node in range(1, len(parents)) if parents[node] == 0]
    while waiting:
        node = waiting.pop(int(torch.randint(len(waiting), (), generator=chooser)))
        order.append(node)
        waiting += [child for child in range(1, len(parents)) if parents[child] == node]
    place = {node: index for index, node in enumerate(order)}
    moved = DraftTree(
        token_ids=tree.token_ids[order],
        parents=torch.tensor(
            [-1, *(place[parents[node]] for node in order[1:])], dtype=torch.int32
        ),
        depths=tree.depths[order],
        path_log_probs=tree.path_log_probs[order],
    )
    return moved, torch.tensor(order)


def agreeing_tokens(tree, chooser):
    """What a target says that mostly agrees with the tree, with tokens that occur twice in it."""
    said = torch.randint(0, 6, (tree.tree_size,), generator=chooser)
    for node in range(1, tree.tree_size):
        if torch.rand((), generator=chooser) < 0.6:
            said[tree.parents[node]] = tree.token_ids[node]
    return said


@pytest.mark.parametrize("seed", range(60))
def test_the_accepted_path_is_every_node_the_target_led_to(seed):
    chooser = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 6, generator=chooser)
    tree = build_draft_tree(logits, root_token=ROOT, node_budget=1 + 2 * seed)
    said = agreeing_tokens(tree, chooser)

    acceptance = accept(tree, said)

    is_reached = [True]
    for node in range(1, tree.tree_size):
        parent = tree.parents[node]
        is_reached.append(is_reached[parent] and bool(said[parent] == tree.token_ids[node]))
    reached = [node for node in range(1, tree.tree_size) if is_reached[node]]
    assert acceptance.path.tolist() == reached
    assert acceptance.bonus_token == said[[0, *reached][-1]]


@pytest.mark.parametrize("seed", range(60))
def test_the_order_of_nodes_changes_neither_mask_nor_outcome(seed):
    chooser = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 6, generator=chooser)
    tree = build_draft_tree(logits, root_token=ROOT, node_budget=5 + 2 * seed)
    said = agreeing_tokens(tree, chooser)

    moved, order = reorder(tree, chooser)

    here, there = accept(tree, said), accept(moved, said[order])
    assert order.tolist() != sorted(order.tolist())
    assert torch.equal(moved.ancestor_mask(), tree.ancestor_mask()[order][:, order])
    assert order[there.path.long()].tolist() == here.path.tolist()
    assert there.bonus_token == here.bonus_token
