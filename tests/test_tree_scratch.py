"""Trees beside the pages: the scratch, its commit, and every accepted path of random trees.

The walks run in both layouts, paged and hybrid, and are compared to the bit.
"""

import math

import pytest
import torch

from engine.draft_tree import DraftTree, accept, build_from_log_probs
from engine.errors import CacheError, ConfigError, ShapeError
from engine.kv_cache import CacheShape, LatentCache
from engine.presets import preset
from engine.tree_scratch import ScratchShape, TreeScratch
from engine.verify import REFERENCE, append_chain, plan_pass
from tests.trees import path_to

LAYERS, DIM = 3, 5
PAGE_SIZES = [1, 16, 32, 64, 128]


def cache_of(page_size, num_rows=512, **options):
    num_pages = -(-num_rows // page_size)
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).tolist()
    options = {"fill": math.nan, "page_order": shuffled} | options
    return LatentCache(CacheShape(LAYERS, num_pages, page_size, DIM), **options)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def commit_context(cache, seq, rows):
    """Commit rows [layers, n, D] as a prompt's."""
    cache.reserve(seq, rows.shape[1])
    for layer in range(LAYERS):
        cache.write(layer, cache.slots(seq, range(rows.shape[1])), rows[layer])
    cache.advance(seq, rows.shape[1])


def write_tree(scratch, index, rows):
    """Write rows [layers, n, D] as the first nodes of a tree."""
    for layer in range(scratch.shape.num_layers):
        slots = torch.arange(rows.shape[1]) + index * scratch.shape.max_rows
        scratch.write(layer, slots, rows[layer])


def gathered(cache, seq):
    return torch.stack([cache.gather(layer, seq) for layer in range(cache.shape.num_layers)])


def built(size, node_budget, seed):
    """A random tree built as the engine builds it, many ties among its log-probs."""
    generator = torch.Generator().manual_seed(seed)
    depth, width = size
    drops = torch.randint(0, 4, (depth, width), generator=generator).float() / 2
    token_ids = torch.randint(0, 50, (depth, 1), generator=generator) + torch.arange(width)
    return build_from_log_probs(-drops.cumsum(1), token_ids, root_token=7, node_budget=node_budget)


def bush(num_nodes, seed):
    """Any tree: parents at random, siblings told apart by their tokens."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1] + [
        int(torch.randint(0, n, (), generator=generator)) for n in range(1, num_nodes + 1)
    ]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return DraftTree(
        token_ids=torch.arange(num_nodes + 1),
        parents=torch.tensor(parents, dtype=torch.int32),
        depths=torch.tensor(depths, dtype=torch.int32),
        path_log_probs=torch.zeros(num_nodes + 1, dtype=torch.float64),
    )


def target_that_follows(tree, path):
    """Target tokens that agree with `path` and with nothing after it."""
    tokens = torch.full((tree.tree_size,), 1000)
    for before, node in zip([0, *path], path, strict=False):
        tokens[before] = tree.token_ids[node]
    return tokens


TREES = {
    "root only": bush(0, 0),
    "chain": built((15, 1), 15, 1),
    "built": built((7, 6), 33, 2),
    "built of 65": built((5, 8), 64, 3),
    "bush": bush(40, 4),
}


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", TREES)
def test_every_accepted_path_of_a_tree_is_walked_and_committed(name, page_size, layout):
    """Every node ends a path; contexts put the root at, before and behind the edges of pages."""
    tree = TREES[name]
    cache = cache_of(page_size)
    scratch = cache.new_scratch(2, tree.tree_size + 3)
    context, rows = noise(LAYERS, 140, DIM), noise(LAYERS, tree.tree_size, DIM, seed=1)
    commit_context(cache, 1, context)
    for node in range(tree.tree_size):
        start = (0, 12, page_size - 1, page_size, 128)[node % 5]
        cache.release(1)
        commit_context(cache, 1, context[:, :start])
        path = path_to(tree, node)

        found = accept(tree, target_that_follows(tree, path))

        assert found.path.tolist() == path
        if layout == "paged":
            cache.reserve(1, tree.tree_size)
            for layer in range(LAYERS):
                slots = cache.slots(1, range(start, start + tree.tree_size))
                cache.write(layer, slots, rows[layer])
            length = cache.commit(1, found.path)
        else:
            write_tree(scratch, 1, rows)
            cache.reserve(1, 1 + int(tree.depths.max()))
            length = cache.commit_scratch(scratch, 1, 1, found.path)
        assert length == start + 1 + len(path)
        kept = torch.cat((context[:, :start], rows[:, [0, *path]]), dim=1)
        assert torch.equal(gathered(cache, 1), kept)
        behind = cache.slots(1, range(length, cache.capacity(1)))
        assert cache.pages.flatten(1, 2)[:, behind].isnan().all()
    cache.check_integrity()
    assert scratch.rows.isnan().all()


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_decoding_after_a_commit_finds_the_rows_of_a_run_from_the_start(page_size, layout):
    """Rows that a commit moved are the tree's to the bit, and as good as if computed in place."""
    target = preset("nano", dtype=torch.float64).target
    config, tree = target.config, bush(12, 6)
    shape = CacheShape(config.num_hidden_layers, 320 // page_size, page_size, config.latent_dim)
    caches = [LatentCache(shape, dtype=torch.float64, fill=math.nan) for _ in range(2)]
    cache = caches[0]
    scratch = cache.new_scratch(1, tree.tree_size) if layout == "hybrid" else None
    prompt = [13 + n % 7 for n in range(max(page_size - 2, 20))]
    path = path_to(tree, int(tree.depths.argmax()))

    def append(where, tokens):
        passed = append_chain(target, where, 1, tokens, backends=REFERENCE, tap_ids=())
        return target.head(passed.hidden[-1:])

    append(cache, prompt)
    target.forward(plan_pass(cache, [1], [tree], REFERENCE, scratch=scratch), ())
    if scratch is None:
        slots = cache.slots(1, range(len(prompt), len(prompt) + tree.tree_size))
        written = cache.pages.flatten(1, 2)[:, slots]
        cache.commit(1, path)
    else:
        written = scratch.rows[:, 0].clone()
        cache.commit_scratch(scratch, 0, 1, path)
    moved = gathered(cache, 1)[:, len(prompt) :]
    logits = append(cache, [9])

    assert len(path) >= 3
    assert torch.equal(moved, written[:, [0, *path]])
    tokens = [*prompt, *tree.token_ids[[0, *path]].tolist(), 9]
    torch.testing.assert_close(logits, append(caches[1], tokens), rtol=0, atol=1e-6)
    torch.testing.assert_close(gathered(cache, 1), gathered(caches[1], 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_trees_of_a_batch_commit_into_their_own_sequences(page_size):
    cache = cache_of(page_size)
    scratch = cache.new_scratch(3, 10)
    rows = noise(3, LAYERS, 10, DIM)
    paths = {7: [4, 7, 9], 3: [2, 3], 5: []}
    for index, seq in enumerate(paths):
        cache.reserve(seq, 4)
        write_tree(scratch, index, rows[index])

    for index, (seq, path) in enumerate(paths.items()):
        cache.commit_scratch(scratch, index, seq, path)
        assert scratch.rows[:, index].isnan().all()
        assert scratch.rows[:, index + 1 :].isfinite().all()

    for index, (seq, path) in enumerate(paths.items()):
        assert torch.equal(gathered(cache, seq), rows[index][:, [0, *path]])


def test_a_hybrid_step_reserves_pages_for_the_path_alone():
    cache = cache_of(16, 32)
    commit_context(cache, 1, noise(LAYERS, 12, DIM))
    scratch = cache.new_scratch(1, 513)
    write_tree(scratch, 0, noise(LAYERS, 513, DIM))

    cache.reserve(1, 8)
    cache.commit_scratch(scratch, 0, 1, [1, 40, 200, 512])

    assert cache.length(1) == 17
    assert cache.num_free_pages == 0


@pytest.mark.parametrize(
    ("index", "path", "message"),
    [
        (0, [1, 2, 3, 4, 5], r"num_rows: expected 0\.\.4, got 6"),
        (0, [3, 3], "path: expected ascending nodes"),
        (0, [0], "path: expected ascending nodes"),
        (0, [-1], "path: expected ascending nodes"),
        (0, [10], "tree, node: expected below 2 and 10, got 0 and 10"),
        (2, [1], "tree, node: expected below 2 and 10, got 2 and 1"),
        (-1, [1], "tree, node: expected below 2 and 10, got -1 and 1"),
    ],
)
def test_a_commit_that_does_not_fit_changes_nothing(index, path, message):
    cache = cache_of(1, 16)
    cache.reserve(1, 4)
    scratch = cache.new_scratch(2, 10)
    write_tree(scratch, 0, noise(LAYERS, 10, DIM))
    before = scratch.rows.clone()

    with pytest.raises(CacheError, match=message):
        cache.commit_scratch(scratch, index, 1, path)

    assert cache.length(1) == 0
    assert cache.pages.isnan().all()
    assert torch.equal(scratch.rows.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (ScratchShape(LAYERS + 1, 1, 4, DIM), torch.float32),
        (ScratchShape(LAYERS, 1, 4, DIM + 1), torch.float32),
        (ScratchShape(LAYERS, 1, 4, DIM), torch.float64),
    ],
)
def test_the_scratch_of_another_cache_is_refused(shape, dtype):
    cache = cache_of(16)
    cache.reserve(1, 4)

    with pytest.raises(ShapeError, match="scratch: expected"):
        cache.commit_scratch(TreeScratch(shape, dtype=dtype, device="cpu"), 0, 1, [])


def test_a_layer_shows_the_first_rows_of_the_first_trees():
    scratch = TreeScratch(ScratchShape(2, 3, 8, DIM), dtype=torch.float32, device="cpu")
    rows = noise(2, 5, DIM)
    write_tree(scratch, 1, rows)

    seen = scratch.layer(1, 2, 5)

    assert seen.shape == (2, 5, DIM)
    assert seen.stride(-1) == 1
    assert seen.data_ptr() == scratch.rows[1].data_ptr()
    assert torch.equal(seen[1], rows[1])
    assert not seen[0].any()


@pytest.mark.parametrize("size", [(4, 8), (3, 9), (-1, 8)])
def test_more_trees_or_rows_than_there_are_cannot_be_seen(size):
    scratch = TreeScratch(ScratchShape(2, 3, 8, DIM), dtype=torch.float32, device="cpu")

    with pytest.raises(CacheError, match="trees, rows: expected at most 3 and 8"):
        scratch.layer(0, *size)


def test_rows_of_a_scratch_that_do_not_fit_are_refused():
    scratch = TreeScratch(ScratchShape(2, 3, 8, DIM), dtype=torch.float32, device="cpu")

    with pytest.raises(ShapeError, match="rows: expected"):
        scratch.write(0, torch.arange(2), torch.zeros(2, DIM).double())


@pytest.mark.parametrize("name", ["num_layers", "num_seqs", "max_rows", "row_dim"])
def test_a_scratch_of_an_impossible_shape_is_refused(name):
    sizes = {"num_layers": 1, "num_seqs": 1, "max_rows": 1, "row_dim": 1}

    with pytest.raises(ConfigError, match=f"{name}: expected at least 1, got 0"):
        ScratchShape(**sizes | {name: 0})
