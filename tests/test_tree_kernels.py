"""Draft trees and walks as kernels: against the trees and walks of the host, bit for bit.

On a CPU the references run; on a CUDA device every backend does (marker gpu), where 10 000 steps of
random trees are built, walked and committed on both.
"""

from dataclasses import fields

import pytest
import torch

from engine.draft_tree import DraftTree, accept, build_from_log_probs
from engine.errors import BackendError, BudgetError, ShapeError
from engine.kernels import OPS, DraftTreeCase, WalkTreeCase, draft_tree, walk_tree
from engine.kernels.draft_tree import NO_TREE, cuda_tree, new_trees
from engine.kernels.draft_tree.problem import pose
from engine.kernels.tree_walk import NO_TOKEN, NO_WALK
from engine.kv_cache import CacheShape, LatentCache
from engine.pass_graphs import fill_up
from tests.attention_runs import ON_GPU, captured

TREES, WALKS = OPS["draft_tree"], OPS["walk_tree"]
RUNS = [("cpu", "reference"), *(("cuda", name) for name in TREES.implementations)]
every_run = pytest.mark.parametrize(
    ("device", "backend"),
    [pytest.param(*run, marks=ON_GPU if run[0] == "cuda" else ()) for run in RUNS],
)
every_kernel_run = pytest.mark.parametrize(
    ("device", "backend"), [pytest.param("cuda", "cuda", marks=ON_GPU)]
)
every_tree = pytest.mark.parametrize(
    "case", [*TREES.cases, *TREES.production], ids=lambda case: case.name
)
every_walk = pytest.mark.parametrize(
    "case", [*WALKS.cases, *WALKS.production], ids=lambda case: case.name
)
PLAIN = DraftTreeCase("plain", "", 3, node_budget=12, extra_rows=4)


def equal_bits(one, other):
    """Whether two records of tensors are the same, the sign of a zero included."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)]
    return all(
        have.dtype == want.dtype and torch.equal(bits(have.cpu()), bits(want.cpu()))
        for have, want in pairs
    )


def bits(values):
    return values.view(torch.int64) if values.dtype == torch.float64 else values


def host_trees(arguments):
    """The trees of the host, filled up to the rows of the call."""
    found = []
    for n, root in enumerate(arguments["root_tokens"].tolist()):
        tree = build_from_log_probs(
            arguments["log_probs"][n].cpu(),
            arguments["token_ids"][n].cpu(),
            root_token=root,
            node_budget=arguments["node_budget"],
        )
        found.append(tree)
    return found


def row(trees, n, size):
    """Tree n as the host has it, its first `size` rows."""
    parts = (trees.token_ids, trees.parents, trees.depths, trees.path_log_probs)
    return DraftTree(*(part[n, :size].cpu() for part in parts))


@every_tree
@every_run
def test_every_backend_builds_the_trees_of_the_host(case, device, backend):
    arguments = TREES.inputs(case, device=device)
    positions = arguments["root_positions"].cpu()

    trees = TREES.implementations[backend](**arguments)

    for n, tree in enumerate(host_trees(arguments)):
        assert int(trees.tree_sizes[n]) == tree.tree_size
        assert equal_bits(row(trees, n, tree.tree_size), tree)
        whole = row(trees, n, arguments["num_rows"])
        assert torch.equal(trees.ancestor_bits[n].cpu(), whole.ancestor_bits())
        assert torch.equal(trees.positions[n].cpu(), positions[n] + whole.depths)


@every_run
def test_rows_behind_a_tree_are_those_that_a_bucket_is_filled_up_with(device, backend):
    arguments = TREES.inputs(DraftTreeCase("one", "", 2, 2, 3, 16), device=device)
    filled = fill_up(host_trees(arguments), 17)

    trees = TREES.implementations[backend](**arguments | {"num_rows": filled[0].tree_size})

    assert filled[0].tree_size > int(trees.tree_sizes[0])
    assert all(equal_bits(row(trees, n, one.tree_size), one) for n, one in enumerate(filled))


@every_run
@pytest.mark.parametrize("damage", [torch.nan, torch.inf, "no token"])
def test_what_is_no_distribution_has_no_tree_and_spoils_no_other(device, backend, damage):
    arguments = TREES.inputs(PLAIN, device=device)
    clean = TREES.reference(**arguments)
    if damage == "no token":
        arguments["token_ids"][1, 6, 11] = -1
    else:
        arguments["log_probs"][1, 6, 11] = damage

    trees = TREES.implementations[backend](**arguments)

    assert trees.tree_sizes.tolist() == [13, NO_TREE, 13]
    assert trees.parents[1].tolist() == [-1, *[0] * 16]
    assert set(trees.token_ids[1].tolist()) == {int(arguments["root_tokens"][1])}
    others = [{f.name: getattr(one, f.name)[::2] for f in fields(one)} for one in (trees, clean)]
    assert all(torch.equal(others[0][name], others[1][name]) for name in others[0])


@every_run
def test_candidates_behind_the_budget_are_not_looked_at(device, backend):
    arguments = TREES.inputs(PLAIN, device=device)
    clean = TREES.reference(**arguments)
    arguments["log_probs"][:, :, 12:] = torch.nan
    arguments["token_ids"][:, :, 12:] = -1

    assert equal_bits(TREES.implementations[backend](**arguments), clean)


@every_run
def test_log_probs_above_zero_keep_the_order_of_the_heap(device, backend):
    arguments = TREES.inputs(PLAIN, device=device)
    arguments["log_probs"] += 1.5

    trees = TREES.implementations[backend](**arguments)

    assert equal_bits(trees, TREES.reference(**arguments))
    assert (trees.path_log_probs[:, 1:13].diff() > 0).any()  # a child heavier than its parent


@every_run
def test_certain_tokens_keep_the_sign_of_their_zeros(device, backend):
    arguments = TREES.inputs(PLAIN, device=device)
    arguments["log_probs"] *= 0.0

    trees = TREES.implementations[backend](**arguments)

    assert all(equal_bits(row(trees, n, 13), tree) for n, tree in enumerate(host_trees(arguments)))


@every_run
def test_trees_are_written_where_the_caller_has_room(device, backend):
    arguments = TREES.inputs(PLAIN, device=device)
    room = new_trees(3, 17, torch.device(device))

    trees = TREES.implementations[backend](**arguments, out=room)

    assert trees is room
    assert equal_bits(room, TREES.reference(**arguments))


@every_run
def test_no_sequences_have_no_trees_and_no_walks(device, backend):
    arguments = TREES.inputs(PLAIN, device=device)
    cut = {name: v[:0] if torch.is_tensor(v) else v for name, v in arguments.items()}
    said = {
        name: v[:0] if torch.is_tensor(v) else v
        for name, v in WALKS.inputs(WALKS.cases[1], device=device).items()
    }

    assert TREES.implementations[backend](**cut).token_ids.shape == (0, 17)
    assert WALKS.implementations[backend](**said).path.shape == (0, 8)


@every_walk
@every_run
def test_every_backend_walks_as_the_host_does(case, device, backend):
    arguments = WALKS.inputs(case, device=device)

    walk = WALKS.implementations[backend](**arguments)

    host = {name: v.cpu() for name, v in arguments.items() if torch.is_tensor(v)}
    for n, size in enumerate(host["tree_sizes"].tolist()):
        said, tokens = host["target_tokens"][n, :size], host["token_ids"][n, :size]
        if (said < 0).any():
            assert int(walk.num_accepted[n]) == NO_WALK
            assert walk.path[n].tolist() == list(range(case.width))
            assert set(walk.tokens[n].tolist()) == {NO_TOKEN}
            continue
        depths = torch.zeros(size, dtype=torch.int32)
        tree = DraftTree(tokens, host["parents"][n, :size], depths, depths.double())
        path = accept(tree, said).path.tolist()[: case.width - 1]
        bonus = int(said[path[-1] if path else 0])
        kept = [0, *path, *range(1 + len(path), case.width)]
        assert int(walk.num_accepted[n]) == len(path)
        assert walk.path[n].tolist() == kept
        emitted = [*tokens[path].tolist(), bonus]
        assert walk.tokens[n].tolist() == emitted + [NO_TOKEN] * (case.width - len(emitted))
        assert walk.sources[n].tolist() == host["slots"][n, kept].tolist()


@every_run
def test_of_siblings_with_one_token_the_last_is_walked_to(device, backend):
    arguments = WALKS.inputs(WalkTreeCase("twins", "", 1, 6, 3), device=device)
    arguments["parents"][0] = torch.tensor([-1, 0, 0, 0, 1, 3])
    arguments["token_ids"][0] = torch.tensor([9, 5, 6, 5, 7, 7])
    arguments["target_tokens"][0] = torch.tensor([5, 7, 7, 7, 8, 8])

    walk = WALKS.implementations[backend](**arguments)

    assert walk.path.tolist() == [[0, 3, 5]]
    assert walk.tokens.tolist() == [[5, 7, 8]]


@every_run
@pytest.mark.parametrize("size", [0, -3, 18])
def test_a_size_of_no_tree_has_no_walk(device, backend, size):
    arguments = WALKS.inputs(WALKS.cases[1], device=device)
    arguments["tree_sizes"][0] = size

    walk = WALKS.implementations[backend](**arguments)

    assert walk.num_accepted.tolist() == [NO_WALK, 0]


def said_after(trees, generator):
    """Target tokens that mostly agree with some child of a node, so that paths are long and short."""
    N, T = trees.token_ids.shape
    said = torch.randint(2**20, 2**21, (N, T), generator=generator)
    children = 1 + torch.rand(N, T - 1, generator=generator).argsort(1)
    rows = torch.arange(N).unsqueeze(1).expand_as(children)
    said[rows, trees.parents[rows, children].long()] = trees.token_ids[rows, children]
    disagrees = torch.rand(N, T, generator=generator) < 0.2
    return said.masked_fill_(disagrees, 2**21)


@pytest.mark.parametrize(
    ("device", "backend", "num_steps"),
    [("cpu", "reference", 20), pytest.param("cuda", "cuda", 10_000, marks=ON_GPU)],
)
def test_steps_of_random_trees_equal_those_of_the_host(device, backend, num_steps):
    generator = torch.Generator().manual_seed(5)
    walked = 0
    for seed in range(-(-num_steps // 500)):
        N = min(500, num_steps)
        # Every second batch has weights that tie.
        step = 0.25 * (seed % 2)
        case = DraftTreeCase("steps", "", N, 7, 80, 64, step=step, spread=4.0, seed=seed)
        arguments = TREES.inputs(case, device=device)
        trees = TREES.implementations[backend](**arguments)
        host = host_trees(arguments)
        on_host = type(trees)(*(getattr(trees, field.name).cpu() for field in fields(trees)))
        said = said_after(on_host, generator)
        cache = new_cache(N, 65)
        before = [cache.slots(n, range(3, 68)) for n in range(N)]
        slots = torch.stack(before).to(device)
        rows = cache.pages.flatten(1, 2).to(device)

        walk = WALKS.implementations[backend](
            said.to(device), trees.token_ids, trees.parents, trees.tree_sizes, slots, width=8
        )
        kept = rows.index_select(1, walk.sources.flatten())
        rows.index_copy_(1, slots[:, :8].flatten(), kept)

        lengths, paths = walk.num_accepted.tolist(), walk.path.tolist()
        committed = rows.cpu()
        for n, tree in enumerate(host):
            assert equal_bits(row(on_host, n, tree.tree_size), tree)
            found = accept(tree, said[n])
            assert paths[n][1 : 1 + lengths[n]] == found.path.tolist()
            assert int(walk.tokens[n, lengths[n]]) == found.bonus_token
            cache.commit(n, found.path)
            where = cache.slots(n, range(cache.length(n)))
            assert torch.equal(cache.pages.flatten(1, 2)[:, where], committed[:, where])
            walked += found.num_accepted
    assert walked > num_steps


def new_cache(num_seqs, tree_size):
    """Pages of 16 rows that hold numbers, three rows committed and a tree's reserved."""
    shape = CacheShape(2, num_seqs * 5, 16, 4)
    cache = LatentCache(shape)
    for n in range(num_seqs):
        cache.reserve(n, 3)
        cache.advance(n, 3)
        cache.reserve(n, tree_size)
    cache.pages.copy_(torch.arange(cache.pages.numel()).view_as(cache.pages))
    return cache


@every_kernel_run
def test_a_graph_replays_other_candidates_and_other_words_of_the_target(device, backend):
    tree_inputs = TREES.inputs(PLAIN, device=device)
    walk_inputs = WALKS.inputs(WalkTreeCase("walked", "", 3, 17, 8), device=device)
    kept = []

    def step():
        trees = draft_tree(**tree_inputs, backend=backend)
        walk_inputs.update(token_ids=trees.token_ids, parents=trees.parents)
        walk_inputs["tree_sizes"] = trees.tree_sizes
        kept.append((trees, walk_tree(**walk_inputs, backend=backend)))

    replay = captured(step, device)
    generator = torch.Generator().manual_seed(1)
    for seed in (3, 4):
        case = DraftTreeCase("other", "", 3, node_budget=12, extra_rows=4, seed=seed)
        for name, values in TREES.inputs(case, device=device).items():
            if torch.is_tensor(values):
                tree_inputs[name].copy_(values)
        expected = TREES.reference(**tree_inputs)
        on_host = type(expected)(*(getattr(expected, f.name).cpu() for f in fields(expected)))
        walk_inputs["target_tokens"].copy_(said_after(on_host, generator))
        replay()
        trees, walk = kept[-1]
        assert equal_bits(trees, expected)
        assert equal_bits(walk, WALKS.reference(**walk_inputs))


def test_the_kernel_refuses_trees_that_shared_memory_cannot_hold():
    arguments = TREES.inputs(DraftTreeCase("deep", "", 1, 60, 512, 512))

    with pytest.raises(BackendError, match="expected candidates and nodes of at most 100352 bytes"):
        cuda_tree.kernels(pose(**arguments, out=None), 90)


@pytest.mark.parametrize("op", [TREES, WALKS], ids=lambda op: op.name)
def test_cuda_refuses_a_cpu(op):
    with pytest.raises(BackendError, match="backend cuda: expected a GPU of one of the"):
        op.implementations["cuda"](**op.inputs(op.cases[1]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"node_budget": -1}, BudgetError, "node_budget: expected an integer in 0..512"),
        ({"node_budget": 513}, BudgetError, "node_budget: expected an integer in 0..512"),
        ({"num_rows": 12}, ShapeError, "num_rows: expected at least 13, got 12"),
        ({"root_tokens": torch.zeros(2).long()}, ShapeError, r"root_tokens: expected shape \[3\]"),
        ({"root_positions": torch.zeros(3)}, ShapeError, "root_positions: expected dtype int64"),
        ({"token_ids": torch.zeros(3, 7, 15).long()}, ShapeError, "token_ids: expected shape"),
        ({"log_probs": torch.zeros(3, 7, 16).double()}, ShapeError, "log_probs: expected dtype"),
        ({"out": new_trees(3, 16, torch.device("cpu"))}, ShapeError, r"token_ids: .*\[3, 17\]"),
    ],
)
def test_trees_that_cannot_be_built_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        draft_tree(**TREES.inputs(PLAIN) | changes, backend="reference")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, r"width: expected 1\.\.17, got 0"),
        ({"width": 18}, r"width: expected 1\.\.17, got 18"),
        ({"slots": torch.zeros(2, 16).long()}, "slots: expected shape"),
        ({"parents": torch.zeros(2, 17).long()}, "parents: expected dtype int32"),
        ({"token_ids": torch.zeros(2, 34).long()[:, ::2]}, "token_ids: expected a contiguous"),
        ({"slots": torch.zeros(2, 18).long()[:, :17]}, "slots: expected contiguous rows"),
    ],
)
def test_walks_that_cannot_be_made_are_refused(changes, message):
    with pytest.raises(ShapeError, match=message):
        walk_tree(**WALKS.inputs(WALKS.cases[1]) | changes, backend="reference")


def test_unknown_backends_are_refused():
    with pytest.raises(BackendError, match="tree backend: expected one of reference, cuda"):
        draft_tree(**TREES.inputs(PLAIN), backend="triton")
    with pytest.raises(BackendError, match="walk backend: expected one of reference, cuda"):
        walk_tree(**WALKS.inputs(WALKS.cases[1]), backend="triton")


def test_cost_counts_candidates_and_rows():
    assert TREES.cost(PLAIN).bytes == 3 * (7 * 12 * 12 + 17 * 36)
    assert WALKS.cost(WALKS.cases[1]).bytes == 2 * (17 * 20 + 8 * 32)
