"""Tree, chain and root are one engine: what it says is the same, only the way there differs."""

import pytest
import torch

from engine.budget import tree_budget
from engine.config import MODES
from engine.context_rows import REWIND_ROWS
from engine.draft_tree import root_tree
from engine.errors import CacheError, ConfigError, RequestError
from engine.observer import STAGES
from engine.planted import record_continuation
from engine.sampling import Sampling
from engine.verify import REFERENCE, chain, plan_pass
from tests.nano import (
    BLOCK,
    MODELS,
    TARGET,
    Notes,
    assert_is_the_targets_own,
    assert_nobody_holds_a_page,
    assert_state_equals_recomputation,
    make_engine,
    planted,
    prompt,
)
from tests.steered import Steered, one_token_only, random_logits

PROMPTS = [prompt(n, seed=n) for n in (1, 19, 40)]
SAMPLINGS = (
    Sampling(),
    Sampling(1.0),
    Sampling(1.4, top_k=9),
    Sampling(0.8, top_p=0.9, min_p=0.02),
)


def engine_of(mode, **changes):
    return make_engine(None if mode == "ar" else MODELS.drafter, mode=mode, **changes)


def as_it_is(batch):
    """Everything that a step reads of a batch."""
    sequences = [
        (s.token_ids[:], s.logprobs[:], s.commit_lengths[:], batch.cache.length(s.seq))
        for s in batch.sequences
    ]
    context = None if batch.context is None else list(batch.context.lengths)
    return sequences, context, batch.pending


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_says_what_the_target_would_with_its_own_logprobs(mode, layout, sampling):
    engine = engine_of(mode, cache_layout=layout)
    seeds = [4, -7, 2**40]

    generations = engine.generate(PROMPTS, max_new_tokens=14, sampling=sampling, seed=seeds)

    for text, seed, generation in zip(PROMPTS, seeds, generations, strict=True):
        assert len(generation.token_ids) == 14
        assert_is_the_targets_own(generation, text, sampling, seed)
    assert_nobody_holds_a_page(engine)


def test_an_autoregressive_step_is_a_root_and_one_token():
    engine = engine_of("ar", cache_layout="hybrid")
    batch = engine.prefill(PROMPTS)

    results = [engine.step(batch) for _ in range(3)]

    assert (batch.context, batch.pending) == (None, None)
    assert batch.scratch.shape.max_rows == 1
    assert {result.num_nodes for result in results} == {(0, 0, 0)}
    assert {result.commit_lengths for result in results} == {(1, 1, 1)}
    assert_state_equals_recomputation(engine, batch)


def test_an_autoregressive_engine_lets_its_drafter_rest():
    def fail(logits, request):
        raise AssertionError("a drafter that nobody asks")

    engine = make_engine(Steered(MODELS.drafter, fail), mode="ar")

    generation = engine.generate([PROMPTS[1]], max_new_tokens=5)[0]

    assert list(generation.token_ids) == record_continuation(TARGET, PROMPTS[1], 5)
    assert generation.commit_lengths == (1,) * 5


@pytest.mark.parametrize("mode", ["ddtree", "dflash"])
def test_a_mode_that_drafts_needs_a_drafter(mode):
    with pytest.raises(ConfigError, match=f"drafter: expected one, got None .*{mode}"):
        make_engine(None, mode=mode)


@pytest.mark.parametrize(("node_budget", "num_nodes"), [(24, BLOCK - 1), (3, 3)])
def test_a_linear_draft_is_the_likeliest_token_of_each_depth(node_budget, num_nodes):
    engine = engine_of("dflash", node_budget=node_budget)
    batch = engine.prefill(PROMPTS)
    drafted = engine.draft(batch)

    trees = engine.build(batch, drafted)

    for sequence, logits, tree in zip(batch.sequences, drafted, trees, strict=True):
        likeliest = logits.argmax(-1)[:num_nodes].tolist()
        assert tree.token_ids.tolist() == [sequence.root_token, *likeliest]
        assert tree.parents.tolist() == list(range(-1, num_nodes))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [1, 20, 33])
def test_a_chain_as_a_tree_is_bit_for_bit_the_linear_pass(length, page_size):
    """Drafted by either builder, against a prompt that holds these tokens for certain."""
    text, logits = prompt(length, seed=length), []
    certain = Steered(MODELS.drafter, one_token_only)  # its best tree is a chain
    for drafter, mode in ((certain, "dflash"), (certain, "ddtree")):
        engine = make_engine(drafter, mode=mode, page_size=page_size)
        batch = engine.prefill([text])
        trees = engine.build(batch, engine.draft(batch))
        rows = plan_pass(batch.cache, batch.seqs, trees, REFERENCE)
        causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()
        assert torch.equal(trees[0].ancestor_mask(), causal)
        logits.append(TARGET.head(TARGET.forward(rows, ()).hidden))
    linear = engine_of("ar", page_size=page_size)
    batch = linear.prefill([text])
    rows = plan_pass(batch.cache, batch.seqs, [chain(trees[0].token_ids.tolist())], REFERENCE)
    logits.append(TARGET.head(TARGET.forward(rows, ()).hidden))

    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[2])


@pytest.mark.parametrize("mode", MODES)
def test_the_observer_hears_the_same_stages_in_every_mode(mode):
    notes = Notes()
    engine = engine_of(mode, observer=notes)
    batch = engine.prefill(PROMPTS)

    result = engine.step(batch)

    assert notes.heard == [(word, stage) for stage in STAGES for word in ("start", "stop")]
    assert result.stage_seconds == dict.fromkeys(STAGES, 0.5)


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("mode", MODES)
def test_steps_after_a_rewind_are_the_same_steps_in_every_mode(mode, layout):
    engine = engine_of(mode, cache_layout=layout)
    batch = engine.prefill(PROMPTS, sampling=Sampling(1.0), seed=[1, 2, 3])
    engine.step(batch)
    snapshot, before = engine.snapshot(batch), as_it_is(batch)
    first = [engine.step(batch) for _ in range(5)]
    rows = [batch.cache.gather(1, seq) for seq in batch.seqs]

    engine.rewind(batch, snapshot)
    batch.cache.check_integrity()
    rewound = as_it_is(batch)
    second = [engine.step(batch) for _ in range(5)]

    assert rewound == before
    assert first == second
    assert all(map(torch.equal, rows, (batch.cache.gather(1, seq) for seq in batch.seqs)))
    assert_state_equals_recomputation(engine, batch)


@pytest.mark.parametrize("mode", ["ddtree", "dflash"])
def test_a_rewind_past_what_the_drafter_keeps_is_refused_and_changes_nothing(mode):
    engine = make_engine(planted(PROMPTS, BLOCK, 160), mode=mode)
    batch = engine.prefill(PROMPTS)
    snapshot = engine.snapshot(batch)
    while batch.sequences[0].committed_length <= REWIND_ROWS + MODELS.drafter.config.sliding_window:
        engine.step(batch)
    engine.step(batch)
    before = as_it_is(batch)

    with pytest.raises(CacheError, match=f"keep {REWIND_ROWS} rows"):
        engine.rewind(batch, snapshot)

    assert as_it_is(batch) == before
    assert engine.step(batch).commit_lengths == (BLOCK,) * 3
    assert_state_equals_recomputation(engine, batch)


def test_an_autoregressive_batch_goes_back_as_far_as_one_likes():
    engine = engine_of("ar")
    batch = engine.prefill(PROMPTS)
    snapshot = engine.snapshot(batch)
    steps = [engine.step(batch) for _ in range(REWIND_ROWS + 9)]

    engine.rewind(batch, snapshot)

    assert [engine.step(batch) for _ in range(3)] == steps[:3]


@pytest.mark.parametrize("mode", MODES)
def test_a_snapshot_that_was_taken_back_is_no_way_forward(mode):
    engine = engine_of(mode)
    batch = engine.prefill(PROMPTS)
    early = engine.snapshot(batch)
    engine.step(batch)
    late = engine.snapshot(batch)
    engine.rewind(batch, early)
    before = as_it_is(batch)

    with pytest.raises(RequestError, match="got one that was taken back"):
        engine.rewind(batch, late)

    assert as_it_is(batch) == before
    engine.step(batch)
    assert_state_equals_recomputation(engine, batch)


def test_a_snapshot_of_steps_that_were_taken_otherwise_is_refused():
    engine = engine_of("ddtree")
    batch = engine.prefill([PROMPTS[1]])
    start = engine.snapshot(batch)
    root = [root_tree(batch.sequences[0].root_token)]
    engine.commit(batch, root, engine.verify(batch, root))
    one_token = engine.snapshot(batch)
    engine.rewind(batch, start)
    known = record_continuation(TARGET, PROMPTS[1], 3)
    tree = [chain([PROMPTS[1][-1], *known])]
    engine.commit(batch, tree, engine.verify(batch, tree))

    with pytest.raises(RequestError, match="got one that was taken back"):
        engine.rewind(batch, one_token)


@pytest.mark.parametrize("mode", MODES)
def test_the_first_of_several_stop_tokens_ends_a_text_in_every_mode(mode):
    engine = make_engine(planted([PROMPTS[1]], BLOCK), mode=mode)
    full = engine.generate([PROMPTS[1]], max_new_tokens=30)[0].token_ids
    stops = set(full[9:12])
    expected = full[: min(map(full.index, stops)) + 1]

    generation = engine.generate([PROMPTS[1]], max_new_tokens=30, stop_token_ids=stops)[0]

    assert generation.token_ids == expected
    assert generation.finish_reason == "stop"
    assert len(generation.logprobs) == len(expected)
    assert_is_the_targets_own(generation, PROMPTS[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_new_tokens", [1, BLOCK, BLOCK + 1])
def test_a_limit_inside_a_path_cuts_tokens_and_logprobs_alike(mode, max_new_tokens):
    engine = make_engine(planted([PROMPTS[1]], BLOCK), mode=mode)

    generation = engine.generate([PROMPTS[1]], max_new_tokens=max_new_tokens)[0]

    assert len(generation.token_ids) == max_new_tokens
    assert generation.finish_reason == "length"
    assert_is_the_targets_own(generation, PROMPTS[1])


def test_every_prompt_has_its_own_noise():
    engine, sampling = engine_of("ddtree"), Sampling(1.5)
    text = PROMPTS[1]

    first, again, other = engine.generate(
        [text] * 3, max_new_tokens=16, sampling=sampling, seed=[5, 5, 6]
    )
    alone = engine.generate([text], max_new_tokens=16, sampling=sampling, seed=6)[0]

    assert first.token_ids == again.token_ids != other.token_ids
    assert other.token_ids == alone.token_ids


@pytest.mark.parametrize("policy", ["fixed", "shared"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_result_counts_the_nodes_of_every_tree(mode, policy):
    engine = make_engine(
        Steered(MODELS.drafter, random_logits), mode=mode, budget_policy=policy, node_budget=5
    )
    batch = engine.prefill(PROMPTS)

    num_nodes = engine.step(batch).num_nodes

    if mode == "ar":
        assert num_nodes == (0, 0, 0)
    elif policy == "fixed":
        assert num_nodes == (5, 5, 5)
    else:
        assert sum(num_nodes) == 15
        assert max(num_nodes) <= engine.most_nodes(3)


@pytest.mark.parametrize("policy", ["fixed", "shared"])
def test_a_mode_knows_its_largest_tree(policy):
    most = {mode: engine_of(mode, budget_policy=policy).most_nodes(3) for mode in MODES}

    assert most == {"ar": 0, "dflash": BLOCK - 1, "ddtree": tree_budget(policy, 24, 3)}


@pytest.mark.parametrize("mode", MODES)
def test_batches_of_one_engine_take_turns_without_a_trace(mode):
    engine = engine_of(mode, max_context=64)
    first = engine.prefill(PROMPTS[:1], sampling=Sampling(1.0), seed=1)
    engine.step(first)
    second = engine.prefill(PROMPTS[1:], sampling=Sampling(0.7), seed=2)  # the pool grows
    for _ in range(4):
        engine.step(first)
        engine.cache.check_integrity()
        engine.step(second)
    third = engine.generate(PROMPTS[:2], max_new_tokens=9)
    engine.step(first)

    assert_state_equals_recomputation(engine, first)
    assert_state_equals_recomputation(engine, second)
    for text, generation in zip(PROMPTS, third, strict=False):
        assert_is_the_targets_own(generation, text)
    engine.release(first)
    assert_state_equals_recomputation(engine, second)
    engine.release(second)
    assert_nobody_holds_a_page(engine)


def test_a_sequence_keeps_room_for_its_share_of_a_batch_that_came_before():
    engine = make_engine(budget_policy="shared", node_budget=40, page_size=16, max_context=64)
    engine.prefill([prompt(40, seed=n) for n in range(4)])

    engine.prefill([prompt(3)])

    assert engine.cache.shape.num_pages == 5 * -(-(64 + 5 * 40) // 16)


def test_a_prefill_that_fails_with_a_foreign_error_gives_its_pages_back():
    class LostError(Exception):
        """What a driver might raise."""

    class Fragile(Steered):
        def __init__(self, drafter):
            super().__init__(drafter, None)
            self.extend = self.fail

        def fail(self, context, rows):
            if context.lengths[0]:
                raise LostError
            return self.drafter.extend(context, rows)

    engine = make_engine(Fragile(MODELS.drafter))

    with pytest.raises(LostError):
        engine.prefill([prompt(30), prompt(30, seed=2)])

    assert_nobody_holds_a_page(engine)


def test_tokens_may_come_as_any_integers():
    tokens = torch.tensor(prompt(9)).numpy()
    engine = engine_of("ddtree")

    batch = engine.prefill([tokens])
    engine.step(batch)

    assert {type(token) for token in batch.sequences[0].token_ids} == {int}
    assert batch.sequences[0].token_ids[:9] == prompt(9)
