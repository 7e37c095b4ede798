"""Passes in buffers that stay: the same steps as ever, and nothing of a pass in the next one.

A CUDA graph sees its buffers and nothing of what the host knows when it is replayed. `buffers` does
the same on any device: it runs over records made for a bucket's first pass.
"""

from dataclasses import fields

import pytest
import torch

from engine.config import MODES, PAGE_SIZES, EngineConfig
from engine.draft_tree import accept, build_draft_tree, root_tree
from engine.errors import ConfigError, EngineError
from engine.pass_graphs import (
    _PLAN_BUFFERS,
    _ROW_BUFFERS,
    MOST_BUCKETS,
    Bucket,
    BucketPass,
    Choice,
    PlainPass,
    buffers,
    fill_up,
    tree_bucket,
)
from engine.sampling import GREEDY, Sampling
from engine.verify import REFERENCE, plan_pass
from tests.nano import (
    BLOCK,
    MODELS,
    TARGET,
    VOCAB,
    assert_is_the_targets_own,
    assert_nobody_holds_a_page,
    assert_state_equals_recomputation,
    make_engine,
    planted,
    prompt,
)

PROMPTS = [prompt(n, seed=n) for n in (33, 1, 18)]
NAMES = (*_ROW_BUFFERS, *_PLAN_BUFFERS, "seeds")
IMPOSSIBLE = 2**31 - 1  # as a token, a position, a slot, a page, a length, a tree's size


def poison(engine):
    for bucket in engine._run_pass.buckets.values():
        for held in buffers(bucket.rows, bucket.choice):
            held.fill_(IMPOSSIBLE)
    for bucket in engine._run_draft.buckets.values():
        bucket.numbers.held.fill_(IMPOSSIBLE)
        bucket.inputs.taps.fill_(torch.nan)
    for held in places(engine):
        held.fill_(IMPOSSIBLE)


def places(engine):
    """Where numbers of the host lie that trees on the device are built and committed by."""
    recurring = [] if engine._trees is None else [engine._trees._builds, engine._trees._commits]
    return [place.held for one in recurring for place in one._places.values()]


def in_fixed_outputs(run):
    """Give every run's results in the tensors of the first, as a graph does."""
    kept = []

    def again():
        given = run()
        kept[:] = kept or [given]
        for field in fields(given):
            getattr(kept[0], field.name).copy_(getattr(given, field.name))
        return kept[0]

    return again


def both(drafter=MODELS.drafter, **config):
    """An engine without buffers, and one whose passes leave nothing but what is in them."""
    plain = make_engine(drafter, **config)
    kept = make_engine(drafter, **config, graphs="buffers")
    kept._run_pass = BucketPass(kept._run_pass._run, in_fixed_outputs)
    if kept.drafter is not None:
        kept._run_draft._capture = in_fixed_outputs
    if kept._trees is not None:
        kept._trees._builds._capture = kept._trees._commits._capture = in_fixed_outputs
    return plain, kept


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_steps_in_poisoned_buffers_equal_steps_without_any(page_size, layout):
    trees = "reference" if page_size in {1, 64} else "host"
    plain, kept = both(page_size=page_size, cache_layout=layout, tree_backend=trees)
    batches = [engine.prefill(PROMPTS, sampling=Sampling(1.0), seed=3) for engine in (plain, kept)]

    for _ in range(6):
        expected = plain.step(batches[0])
        poison(kept)
        assert kept.step(batches[1]) == expected

    assert len(kept._run_pass.buckets) <= 2  # the page table may outgrow one
    kept.cache.check_integrity()
    assert_state_equals_recomputation(kept, batches[1])


@pytest.mark.parametrize("policy", ["fixed", "shared"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, top_k=7)])
def test_whole_texts_in_buffers_are_the_targets_own(mode, policy, sampling):
    _, kept = both(mode=mode, budget_policy=policy, node_budget=6)

    got = kept.generate(PROMPTS, max_new_tokens=12, sampling=sampling, seed=[1, 2, 3])

    for generation, text, seed in zip(got, PROMPTS, [1, 2, 3], strict=True):
        assert_is_the_targets_own(generation, text, sampling, seed)
    assert_nobody_holds_a_page(kept)


@pytest.mark.parametrize("left_out", range(len(NAMES)), ids=NAMES)
def test_a_buffer_that_kept_what_it_held_would_be_seen(left_out, monkeypatch):
    def load_others(bucket, rows, choice):
        held_now = buffers(bucket.rows, bucket.choice)
        pairs = zip(held_now, buffers(rows, choice), strict=True)
        for number, (held, new) in enumerate(pairs):
            if number != left_out:
                held.copy_(new)

    plain, kept = both()
    sampling = Sampling(1.0) if left_out == NAMES.index("seeds") else GREEDY
    batches = [engine.prefill([prompt(20)], sampling=sampling) for engine in (plain, kept)]
    assert kept.step(batches[1]) == plain.step(batches[0])
    poison(kept)
    monkeypatch.setattr(Bucket, "load", load_others)

    try:
        kept.step(batches[1])
    except (IndexError, RuntimeError, EngineError):
        return
    plain.step(batches[0])
    said, expected = (batch.sequences[0].logprobs for batch in reversed(batches))
    assert said != pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("commit_length", range(1, BLOCK + 1))
def test_every_commit_length_replays_one_bucket(commit_length):
    prompts = [prompt(40)]
    plain, kept = both(planted(prompts, commit_length), page_size=128, node_budget=8)
    batches = [engine.prefill(prompts) for engine in (plain, kept)]

    for _ in range(5):
        expected = plain.step(batches[0])
        poison(kept)
        assert kept.step(batches[1]) == expected
        assert expected.commit_lengths == (commit_length,)

    assert len(kept._run_pass.buckets) == 1
    assert len(kept._run_draft.buckets) <= 2  # the context outgrows one


def test_a_grown_cache_and_another_scratch_are_other_buckets():
    kept = make_engine(graphs="buffers", cache_layout="hybrid", max_context=64)
    first = kept.prefill([prompt(20)])
    kept.step(first)
    second = kept.prefill([prompt(30, seed=1)])  # the pool grows, and this scratch is another
    kept.step(first)
    kept.step(second)

    assert len(kept._run_pass.buckets) == 3
    assert_state_equals_recomputation(kept, first)
    assert_state_equals_recomputation(kept, second)


def test_few_buckets_are_kept_and_those_are_the_last_used():
    engine = make_engine()
    captured = []

    def capture(run):
        captured.append(run)
        return run

    passes = BucketPass(PlainPass(TARGET, ()), capture)
    batch = engine.prefill([prompt(5)])
    tree = build_draft_tree(torch.zeros(7, VOCAB), root_token=1, node_budget=MOST_BUCKETS + 2)
    plans = [
        plan_pass(batch.cache, batch.seqs, [tree.prefix(n)], REFERENCE)
        for n in range(MOST_BUCKETS + 1)
    ]

    def choice(plan):
        return Choice(GREEDY, plan.repeat([0]))

    for plan in plans:
        passes(plans[0], choice(plans[0]))
        passes(plan, choice(plan))

    assert len(passes.buckets) == MOST_BUCKETS
    assert len(captured) == MOST_BUCKETS + 1
    passes(plans[0], choice(plans[0]))
    assert len(captured) == MOST_BUCKETS + 1
    passes(plans[1], choice(plans[1]))
    assert len(captured) == MOST_BUCKETS + 2


def test_passes_that_choose_otherwise_are_another_bucket():
    _, kept = both()
    ways = (GREEDY, Sampling(1.0), Sampling(1.0, top_k=3), GREEDY)

    for sampling in ways:
        batch = kept.prefill([prompt(20)], sampling=sampling)
        kept.step(batch)
        kept.release(batch)

    assert len(kept._run_pass.buckets) == 3


@pytest.mark.parametrize(
    ("tree_size", "largest", "rows"),
    [(1, 9, 1), (2, 9, 2), (3, 9, 3), (4, 9, 5), (5, 9, 5), (6, 9, 9), (9, 9, 9),
     (10, 13, 13), (12, 65, 17), (17, 65, 17), (18, 65, 33), (513, 513, 513), (20, 9, 20)],
)  # fmt: skip
def test_trees_are_filled_up_to_the_root_and_a_power_of_two(tree_size, largest, rows):
    assert tree_bucket(tree_size, largest) == rows


def test_what_fills_a_tree_up_is_nobodys_child_but_the_roots():
    tree = build_draft_tree(torch.randn(7, VOCAB), root_token=VOCAB, node_budget=5)

    full, root = fill_up([tree, root_tree(4)], 9)

    assert (full.tree_size, root.tree_size) == (9, 9)
    assert full.prefix(5).token_ids.equal(tree.token_ids)
    assert full.ancestor_mask()[:6, :6].equal(tree.ancestor_mask())
    assert not full.ancestor_mask()[:6, 6:].any()
    assert full.parents[6:].tolist() == [0, 0, 0]
    assert accept(tree, torch.full((6,), VOCAB)).path.tolist() == []  # the walk sees the tree alone
    assert fill_up([tree], 6)[0] is tree


def test_trees_of_several_sizes_are_no_bucket():
    engine = make_engine()
    batch = engine.prefill(PROMPTS[:2])
    trees = [build_draft_tree(torch.zeros(7, VOCAB), root_token=1, node_budget=n) for n in (3, 4)]
    rows = plan_pass(batch.cache, batch.seqs, trees, REFERENCE)

    with pytest.raises(ConfigError, match=r"rows: expected trees of one size, got \(4, 5\)"):
        BucketPass(PlainPass(TARGET, ()), in_fixed_outputs)(
            rows, Choice(GREEDY, rows.repeat([0, 0]))
        )


def test_graphs_are_refused_where_nothing_captures():
    with pytest.raises(ConfigError, match="graphs: expected off or buffers for a target on cpu"):
        make_engine(graphs="cuda")
    with pytest.raises(ConfigError, match="graphs: expected one of off, buffers, cuda, got 'on'"):
        EngineConfig(graphs="on")


def test_a_page_tables_width_is_a_power_of_two_where_passes_share_buffers():
    engine = make_engine(page_size=1)
    batch = engine.prefill([prompt(37), prompt(3)])
    trees = [root_tree(1), root_tree(2)]

    plain, wide = (
        plan_pass(batch.cache, batch.seqs, trees, REFERENCE, widens_table=widens)
        for widens in (False, True)
    )

    assert (plain.attention.page_table.shape, wide.attention.page_table.shape) == ((2, 37), (2, 64))
    assert wide.attention.page_table[:, :37].equal(plain.attention.page_table)
    assert (wide.attention.page_table[:, 37:] == -1).all()
