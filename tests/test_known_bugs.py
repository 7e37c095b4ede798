"""Failures other engines of this kind were shipped with, tried on a whole step of this one.

`known_bugs.py` lists them all and says where each is held. The oracle is the target's plain
forward: for every node of a verified tree it reads the text from the start to that node.
"""

import ast
from pathlib import Path

import pytest
import torch

from engine.config import CACHE_LAYOUTS, EngineConfig
from engine.decoder import Engine
from engine.draft_tree import build_draft_tree, build_from_log_probs, chain_tree, root_tree
from engine.errors import CacheError, ShapeError
from engine.kv_cache import CacheShape, LatentCache
from engine.page_ledger import Holding, PageLedger
from engine.page_pool import PagePool, PageTables
from engine.planted import PlantedDrafter, record_continuation
from engine.presets import preset, random_drafter, sample_text
from engine.quantized import Fp8BlockWeight
from engine.sampling import Sampling
from engine.target import Target
from engine.verify import REFERENCE, chain, plan_pass
from tests.known_bugs import BUGS
from tests.known_cases import CASES
from tests.known_laws import LAWS
from tests.nano import (
    BLOCK,
    MODELS,
    POISON,
    TARGET,
    VOCAB,
    assert_is_the_targets_own,
    make_engine,
    naive_pass,
    own_continuation,
    own_tokens,
    planted,
    prompt,
)
from tests.trees import path_to

ROOT = Path(__file__).parent.parent
CONFIG = MODELS.drafter.config
MASK_ID = CONFIG.mask_token_id
every_layout = pytest.mark.parametrize("layout", CACHE_LAYOUTS)


def engine_of(target, drafter=None):
    """An engine of another target than the usual one."""
    drafter = drafter or random_drafter(CONFIG, target, seed=1)
    config = EngineConfig(node_budget=24, max_context=256)
    return Engine(target, drafter, config, page_fill=POISON)


def random_tree(root, num_nodes, seed=0):
    logits = torch.randn(BLOCK - 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    return build_draft_tree(logits, root_token=root, node_budget=num_nodes)


def random_trees(batch, sizes):
    roots = [sequence.root_token for sequence in batch.sequences]
    return [random_tree(*pair, seed) for seed, pair in enumerate(zip(roots, sizes, strict=True))]


def tokens_to(tree, node):
    return tree.token_ids[path_to(tree, node)].tolist()


def assert_every_node_is_judged_on_its_own_path(batch, trees, verified, *, every=1):
    for n, (sequence, tree) in enumerate(zip(batch.sequences, trees, strict=True)):
        for node in range(0, tree.tree_size, every):
            text = [*sequence.token_ids, *tokens_to(tree, node)]
            streams = naive_pass(text)[1]
            taps = torch.cat([streams[i] for i in CONFIG.target_layer_ids], dim=-1)
            best = TARGET.logits(text)[-1].log_softmax(-1).max(-1)
            assert int(verified.target_tokens[n, node]) == int(best.indices)
            assert float(verified.log_probs[n, node]) == pytest.approx(float(best.values), abs=1e-5)
            got = verified.taps[verified.offsets[n] + node]
            torch.testing.assert_close(got, taps[-1], rtol=0, atol=1e-9)


def defined_tests(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_known_bug_is_tested_or_cannot_occur_for_a_stated_reason():
    assert [bug.number for bug in BUGS] == list(range(1, 40))
    for bug in BUGS:
        assert bool(bug.tests) != bool(bug.impossible), bug
        assert len(bug.impossible.split()) >= 8 or bug.tests, bug
    assert list(LAWS) == list("abcdefghi")


@pytest.mark.parametrize(
    "test",
    sorted({test for bug in BUGS for test in bug.tests}.union(*LAWS.values(), *CASES.values())),
)
def test_a_test_that_holds_a_bug_a_law_or_a_case_exists(test):
    path, name = test.split("::")

    assert name.startswith("test_")
    assert name in defined_tests(path)


@every_layout
def test_positions_follow_what_was_committed_and_not_what_was_proposed(layout):
    prompts = [prompt(3), prompt(20)]
    # 24 nodes are proposed in every step, and none of them is ever right.
    engine = make_engine(planted(prompts, 1), cache_layout=layout)
    batch = engine.prefill(prompts)

    for step in range(1, 5):
        engine.step(batch)
        roots = [root_tree(sequence.root_token) for sequence in batch.sequences]
        rows = plan_pass(batch.cache, batch.seqs, roots, REFERENCE, scratch=batch.scratch)

        assert rows.positions.tolist() == [2 + step, 19 + step]
        assert rows.attention.context_lens.tolist() == [2 + step, 19 + step]
        assert [*map(sum, zip(batch.context.lengths, batch.pending.counts, strict=True))] == [
            2 + step,
            19 + step,
        ]
        assert_every_node_is_judged_on_its_own_path(batch, roots, engine.verify(batch, roots))


@every_layout
@pytest.mark.parametrize("page_size", [1, 16])
def test_unequal_trees_of_a_batch_are_masked_by_their_own_rows(layout, page_size):
    prompts = [prompt(length, seed=length) for length in (17, 1, 32, 5)]
    engine = make_engine(cache_layout=layout, page_size=page_size, node_budget=69)
    batch = engine.prefill(prompts)
    trees = random_trees(batch, (32, 0, 69, 2))  # of two words, one, three and one

    verified = engine.verify(batch, trees)

    assert_every_node_is_judged_on_its_own_path(batch, trees, verified, every=3)


@every_layout
def test_every_node_of_three_steps_is_judged_on_its_own_path(layout):
    """Source: rmagur1203/vllm-ddtree tests/ddtree/t20_node_context.py: 48 contexts of 48."""
    engine = make_engine(cache_layout=layout, node_budget=15)
    batch = engine.prefill([prompt(12)])

    for _ in range(3):
        trees = engine.build(batch, engine.draft(batch))
        verified = engine.verify(batch, trees)

        assert [tree.tree_size for tree in trees] == [16]
        assert_every_node_is_judged_on_its_own_path(batch, trees, verified)
        engine.commit(batch, trees, verified)


@every_layout
def test_the_largest_tree_is_masked_and_walked_as_the_tree_it_is(layout):
    text = prompt(9)
    engine = make_engine(cache_layout=layout, node_budget=512, max_context=64)
    batch = engine.prefill([text])
    (tree,) = random_trees(batch, [512])

    verified = engine.verify(batch, [tree])
    assert_every_node_is_judged_on_its_own_path(batch, [tree], verified, every=29)
    (appended,) = engine.commit(batch, [tree], verified)

    assert appended == own_continuation(text, appended)[0]


def test_a_tree_larger_than_its_scratch_is_refused_before_a_row_is_written():
    engine = make_engine(cache_layout="hybrid", node_budget=4)
    batch = engine.prefill([prompt(9), prompt(4)])
    trees = random_trees(batch, (9, 2))

    with pytest.raises(CacheError, match="room of the scratch"):
        engine.verify(batch, trees)

    assert batch.scratch.rows.isnan().all()


@every_layout
def test_a_node_is_judged_alike_in_a_tree_of_every_size(layout):
    engine = make_engine(cache_layout=layout, node_budget=69)
    batch = engine.prefill([prompt(13)])
    (tree,) = random_trees(batch, [69])
    whole = engine.verify(batch, [tree])

    for size in range(1, 71):
        part = engine.verify(batch, [tree.prefix(size - 1)])

        assert part.target_tokens.shape == (1, size)
        assert torch.equal(part.target_tokens[0], whole.target_tokens[0, :size])
        torch.testing.assert_close(part.log_probs[0], whole.log_probs[0, :size], rtol=0, atol=1e-6)
        torch.testing.assert_close(part.taps, whole.taps[:size], rtol=0, atol=1e-10)


def test_a_tree_that_is_a_chain_is_verified_to_the_bit_like_the_linear_draft():
    engine = make_engine()
    batch = engine.prefill([prompt(21)])
    root = batch.sequences[0].root_token
    logits = torch.randn(BLOCK - 1, VOCAB, generator=torch.Generator().manual_seed(2))
    best = logits.log_softmax(-1).max(-1, keepdim=True)
    narrow = build_from_log_probs(best.values, best.indices, root_token=root, node_budget=24)

    as_tree = engine.verify(batch, [narrow])
    as_chain = engine.verify(batch, [chain_tree(logits, root_token=root, node_budget=24)])

    for name in ("target_tokens", "log_probs", "taps"):
        assert torch.equal(getattr(as_tree, name), getattr(as_chain, name))


def test_the_order_of_siblings_changes_nothing_the_target_says():
    engine = make_engine()
    batch = engine.prefill([prompt(21)])
    root = batch.sequences[0].root_token
    log_probs = torch.full((3, 3), -1.0)  # all siblings are equals, so any order is a tree
    trees = [
        build_from_log_probs(log_probs, order.expand(3, 3), root_token=root, node_budget=39)
        for order in (torch.tensor([4, 5, 6]), torch.tensor([6, 4, 5]))
    ]

    said = [engine.verify(batch, [tree]) for tree in trees]

    by_path = [
        {tuple(tokens_to(tree, node)): verified.log_probs[0, node] for node in range(40)}
        for tree, verified in zip(trees, said, strict=True)
    ]
    assert len(by_path[0]) == 40
    assert by_path[0].keys() == by_path[1].keys()
    for path, log_prob in by_path[0].items():
        torch.testing.assert_close(by_path[1][path], log_prob, rtol=0, atol=1e-6)


@pytest.mark.parametrize("with_scratch", [False, True])
def test_pages_of_no_sequence_are_neither_written_nor_read(with_scratch):
    shape = CacheShape(TARGET.config.num_hidden_layers, 12, 16, TARGET.config.latent_dim)
    order = [*range(1, 11), 0, 11]  # the first and the last page, where 0 and -1 lead, stay free
    cache = LatentCache(shape, dtype=TARGET.dtype, fill=torch.nan, page_order=order)
    scratch = cache.new_scratch(3, 41) if with_scratch else None
    for seq, length in enumerate((40, 1, 16)):
        rows = plan_pass(cache, [seq], [chain(prompt(length, seq))], REFERENCE)
        TARGET.forward(rows, ())
        cache.advance(seq, length)
    marks = torch.tensor([3.0, 5.0], dtype=TARGET.dtype).view(1, 2, 1, 1)
    cache.pages[:, [0, 11]] = marks
    trees = [random_tree(1, 40), root_tree(2), random_tree(3, 3)]

    rows = plan_pass(cache, [0, 1, 2], trees, REFERENCE, scratch=scratch)
    hidden = TARGET.forward(rows, ()).hidden

    assert hidden.isfinite().all()
    assert ((rows.token_ids >= 0) & (rows.token_ids < VOCAB)).all()  # no placeholders among them
    assert (cache.pages[:, [0, 11]] == marks).all()


def test_slots_beyond_32_bits_are_counted_in_full():
    page = 2**31 - 1  # the last id an entry of a table can hold
    ledger = PageLedger(PagePool(1), PageTables(torch.device("cpu")), 128, None)
    ledger.holdings[0] = Holding(row=0, pages=[page], length=5)
    ledger.tables.begin(0)
    ledger.tables.put(0, 0, [page])

    assert ledger.slots(0, torch.tensor([0, 127], dtype=torch.int32)).tolist() == [
        page * 128,
        page * 128 + 127,
    ]
    assert ledger.slots(0, range(127, 128)).tolist() == [page * 128 + 127]


def test_no_two_layers_share_a_row():
    engine = make_engine(cache_layout="hybrid", prefix_reuse=True)
    batch = engine.prefill([prompt(5), prompt(7)])
    layers = range(TARGET.config.num_hidden_layers)

    for rows in (
        [batch.cache.layer(layer) for layer in layers],
        [batch.scratch.layer(layer, 2, 25) for layer in layers],
        [*batch.context.keys, *batch.context.values],
    ):
        before = [layer.clone() for layer in rows]
        for index, layer in enumerate(rows):
            layer.fill_(index + 1.0)
            assert all(map(same, rows[index + 1 :], before[index + 1 :]))
        for index, layer in enumerate(rows):
            assert (layer == index + 1.0).all()


def same(rows, others):
    return torch.equal(rows.nan_to_num(-1.0), others.nan_to_num(-1.0))


def test_a_target_that_gives_nan_is_refused_and_no_token_is_made_up():
    head = TARGET.lm_head.clone()
    head[7] = torch.nan
    target = Target(TARGET.config, TARGET.tensors | {"lm_head.weight": head})
    engine = engine_of(target, MODELS.drafter)

    with pytest.raises(ShapeError, match="no distribution to choose from"):
        engine.generate([prompt(5)], max_new_tokens=4)

    assert engine.cache.num_free_pages == engine.cache.shape.num_pages


def two_token_target():
    """A target that says token 0 or the mask's id after everything, each about as often."""
    head = torch.zeros_like(TARGET.lm_head)
    head[0] = TARGET.lm_head[6]
    head[MASK_ID] = -TARGET.lm_head[6]
    return Target(TARGET.config, TARGET.tensors | {"lm_head.weight": head})


@pytest.mark.parametrize("mode", ["ddtree", "dflash", "ar"])
def test_the_masks_id_and_token_0_are_tokens_like_any_other(mode):
    target, text = two_token_target(), [0, MASK_ID, 3, 0]
    said = record_continuation(target, text, 40 + BLOCK)
    drafter = PlantedDrafter(random_drafter(CONFIG, target, seed=1), [said], BLOCK)
    config = EngineConfig(mode=mode, node_budget=7, max_context=64)
    engine = Engine(target, drafter, config, page_fill=POISON)

    (generation,) = engine.generate([text], max_new_tokens=40)

    assert generation.token_ids == tuple(said[:40]) == own_tokens(target, text, said[:40])
    assert set(said[:40]) == {0, MASK_ID}
    assert set(generation.commit_lengths) == {1 if mode == "ar" else BLOCK}


def test_sixteen_sequences_of_a_batch_keep_their_own_state():
    models, source = preset("tiny"), sample_text("code")
    prompts = [list(source[start : start + 9 + 7 * start % 50]) for start in range(0, 1600, 100)]
    seeds = list(range(16))
    config = EngineConfig(node_budget=8, max_context=128)
    engine = Engine(models.target, models.drafter, config, page_fill=POISON)

    together = engine.generate(prompts, max_new_tokens=9, temperature=0.5, seed=seeds)

    alone = [
        engine.generate([text], max_new_tokens=9, temperature=0.5, seed=seed)[0]
        for text, seed in zip(prompts, seeds, strict=True)
    ]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]
    assert [g.commit_lengths for g in together] == [g.commit_lengths for g in alone]
    assert len({g.commit_lengths for g in together}) > 6  # so they leave one after the other
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def test_a_temperature_leaves_the_trees_alone_and_rules_what_is_said():
    engine = make_engine()
    text = prompt(11)
    drafts = [
        engine.draft(engine.prefill([text], sampling=Sampling(temperature), seed=3))
        for temperature in (0.0, 1.0)
    ]

    (sampled,) = engine.generate([text], max_new_tokens=20, temperature=1.0, seed=3)

    assert torch.equal(*drafts)
    assert_is_the_targets_own(sampled, text, Sampling(1.0), seed=3)
    assert sampled.token_ids != own_continuation(text, sampled.token_ids)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_quantised_target_says_in_trees_what_it_says_alone(temperature):
    tensors = {
        name: fp8(weight) if "_proj" in name else weight for name, weight in TARGET.tensors.items()
    }
    target, text = Target(TARGET.config, tensors), prompt(10)

    (got,) = engine_of(target).generate([text], max_new_tokens=20, temperature=temperature, seed=4)

    assert got.token_ids == own_tokens(target, text, got.token_ids, temperature=temperature, seed=4)


def fp8(weight):
    block = (4, 8)
    scale = torch.full([-(-n // b) for n, b in zip(weight.shape[-2:], block, strict=True)], 0.01)
    scale = scale.expand(*weight.shape[:-2], *scale.shape).contiguous()
    return Fp8BlockWeight((weight / 0.01).to(torch.float8_e4m3fn), scale, block)
