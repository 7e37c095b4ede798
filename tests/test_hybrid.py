"""Trees in a dense scratch instead of pages: the same steps, and pages for what is kept only."""

import pytest
import torch

from engine.config import PAGE_SIZES, EngineConfig
from engine.decoder import Engine
from engine.draft_tree import build_draft_tree
from engine.errors import CacheError, OutOfPagesError
from engine.presets import preset
from engine.sampling import Sampling
from engine.verify import REFERENCE, plan_pass
from tests.nano import (
    BLOCK,
    MODELS,
    VOCAB,
    assert_is_the_targets_own,
    assert_nobody_holds_a_page,
    assert_state_equals_recomputation,
    make_engine,
    pages_in_use,
    planted,
    prompt,
)
from tests.steered import Steered, random_logits

PROMPTS = [prompt(n, seed=n) for n in (33, 1, 18, 60)]


def drafting_for(index):
    """A drafter that has something to say of one sequence only."""

    def steer(logits, request):
        banned = torch.full_like(logits, -torch.inf)
        banned[index] = random_logits(logits[index], request)
        return banned

    return Steered(MODELS.drafter, steer)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_hybrid_steps_equal_paged_ones(page_size):
    batches, engines = [], []
    for layout in ("paged", "hybrid"):
        engines.append(make_engine(cache_layout=layout, page_size=page_size))
        batches.append(engines[-1].prefill(PROMPTS, sampling=Sampling(1.0), seed=3))

    for _ in range(6):
        paged, hybrid = (e.step(b) for e, b in zip(engines, batches, strict=True))
        assert paged == hybrid

    for seq in batches[0].seqs:
        for layer in range(2):
            held = [engine.cache.gather(layer, seq) for engine in engines]
            torch.testing.assert_close(*held, rtol=0, atol=1e-12)
    engines[1].cache.check_integrity()
    assert_state_equals_recomputation(engines[1], batches[1])


def test_pages_are_reserved_for_the_longest_path_and_not_for_the_tree():
    text, used = prompt(16), {}
    for layout in ("paged", "hybrid"):
        engine = make_engine(cache_layout=layout, page_size=1, node_budget=200)
        batch = engine.prefill([text])
        tree = engine.build(batch, engine.draft(batch))
        engine.verify(batch, tree)
        used[layout] = pages_in_use(engine)
        assert tree[0].num_nodes == 200

    assert used == {"paged": 15 + 201, "hybrid": 15 + 1 + int(tree[0].depths.max())}


def test_a_hybrid_pool_has_room_for_paths_only():
    sizes = {}
    for layout in ("paged", "hybrid"):
        engine = make_engine(cache_layout=layout, page_size=1, node_budget=200, max_context=32)
        engine.generate([prompt(16)], max_new_tokens=16)
        sizes[layout] = engine.cache.shape.num_pages

    assert sizes == {"paged": 32 + 200, "hybrid": 32 + BLOCK - 1}


@pytest.mark.parametrize("commit_length", [1, 5])
def test_the_scratch_holds_nothing_between_two_steps(commit_length):
    engine = make_engine(planted(PROMPTS, commit_length), cache_layout="hybrid")
    batch = engine.prefill(PROMPTS)

    for _ in range(3):
        engine.step(batch)
        assert bool(batch.scratch.rows.isnan().all())

    assert_state_equals_recomputation(engine, batch)


def test_rows_behind_the_committed_ones_of_a_page_hold_nothing():
    engine = make_engine(cache_layout="hybrid", page_size=64)
    batch = engine.prefill([prompt(20)])
    engine.step(batch)

    page = batch.cache.page_table(batch.seqs)[0, 0]
    committed = batch.sequences[0].committed_length
    rows = batch.cache.pages[:, page]
    assert bool(rows[:, :committed].isfinite().all())
    assert bool(rows[:, committed:].isnan().all())


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("index", range(4))
def test_one_sequence_may_get_the_nodes_of_all(index, layout):
    engine = make_engine(
        drafting_for(index), budget_policy="shared", node_budget=24, cache_layout=layout
    )
    batch = engine.prefill(PROMPTS)

    num_nodes = engine.step(batch).num_nodes

    assert num_nodes == tuple(4 * 24 if n == index else 0 for n in range(4))
    for _ in range(3):
        engine.step(batch)
        engine.cache.check_integrity()
    assert_state_equals_recomputation(engine, batch)


@pytest.mark.parametrize("policy", ["fixed", "shared"])
def test_sequences_that_leave_do_not_disturb_those_that_stay(policy):
    """Tree n of a pass stands at place n of the scratch, whoever was there before."""
    options = {"budget_policy": policy, "cache_layout": "hybrid"}
    engine = make_engine(**options)
    batch = engine.prefill(PROMPTS, sampling=Sampling(1.0), seed=[1, 2, 3, 4])
    for going in ([0, 1, 3], [2, 0], [1]):
        engine.step(batch)
        batch.keep(going)
        engine.step(batch)
        engine.cache.check_integrity()
        assert_state_equals_recomputation(engine, batch)

    assert batch.prompt_index(0) == 0
    text = batch.sequences[0].token_ids
    alone = make_engine(**options).generate(
        [PROMPTS[0]], max_new_tokens=len(text) - 33, sampling=Sampling(1.0), seed=1
    )
    assert list(alone[0].token_ids) == text[33:]


def test_texts_of_different_lengths_end_one_by_one():
    known = [8, 1, 3, 2]
    engine = make_engine(planted(PROMPTS, 4), cache_layout="hybrid", page_size=128)
    full = engine.generate(PROMPTS, max_new_tokens=24)
    stops = {full[n].token_ids[length] for n, length in enumerate(known)}

    for text, generation in zip(
        PROMPTS, engine.generate(PROMPTS, max_new_tokens=24, stop_token_ids=stops), strict=True
    ):
        assert_is_the_targets_own(generation, text)
        assert not stops & set(generation.token_ids[:-1])
    assert_nobody_holds_a_page(engine)


def test_a_tree_larger_than_the_scratch_is_refused_before_anything_is_kept():
    engine = make_engine(cache_layout="hybrid", node_budget=8)
    batch = engine.prefill([PROMPTS[0]])
    logits = torch.randn(BLOCK - 1, VOCAB)
    tree = build_draft_tree(logits, root_token=batch.sequences[0].root_token, node_budget=9)

    with pytest.raises(CacheError, match="trees, rows: expected at most 1 and 9, got 1 and 10"):
        engine.verify(batch, [tree])

    engine.step(batch)
    assert_state_equals_recomputation(engine, batch)


def test_a_hybrid_step_without_pages_leaves_the_batch_as_it_was():
    engine = make_engine(cache_layout="hybrid", page_size=16, num_pages=2)
    batch = engine.prefill([prompt(32)])

    for _ in range(2):
        with pytest.raises(OutOfPagesError, match="pages"):
            engine.step(batch)

    engine.cache.check_integrity()
    assert batch.sequences[0].token_ids == prompt(32)
    assert_state_equals_recomputation(engine, batch)


def test_prefixes_are_reused_beside_a_scratch():
    engine = make_engine(cache_layout="hybrid", page_size=32, prefix_reuse=True)
    text = prompt(100)
    first = engine.prefill([text, text])
    for _ in range(3):
        engine.step(first)

    assert torch.equal(*engine.cache.page_table(first.seqs)[:, :3])
    assert_state_equals_recomputation(engine, first)
    engine.release(first)
    assert_nobody_holds_a_page(engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("layout", ["paged", "hybrid"])
def test_a_pass_is_laid_out_without_waiting_for_the_device(layout):
    models = preset("nano", device="cuda")
    config = EngineConfig(max_context=128, cache_layout=layout, prefix_reuse=True)
    engine = Engine(models.target, models.drafter, config, page_fill=torch.nan)
    batch = engine.prefill(PROMPTS)
    trees = engine.build(batch, engine.draft(batch))
    trees[1] = trees[1].prefix(3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = plan_pass(batch.cache, batch.seqs, trees, REFERENCE, scratch=batch.scratch)
        seeds = rows.repeat([5, 6, 7, 8])
    finally:
        torch.cuda.set_sync_debug_mode("default")

    sizes = [tree.tree_size for tree in trees]
    assert seeds.tolist() == [5 + n for n, size in enumerate(sizes) for _ in range(size)]
    assert rows.attention.tree_sizes.tolist() == sizes
    roots = rows.positions[list(rows.offsets)]
    assert roots.tolist() == [sequence.committed_length for sequence in batch.sequences]
