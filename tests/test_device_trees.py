"""Steps whose trees stay on the device: the same steps as with trees on the host.

On a CPU the references stand in for the kernels, in the same steps; on a CUDA device every step
waits once (marker gpu).
"""

import warnings
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.decoder import Engine
from engine.device_trees import DeviceTrees
from engine.draft_tree import accept
from engine.errors import BackendError, ConfigError, ShapeError
from engine.pass_graphs import Recurring
from engine.presets import preset
from engine.sampling import GREEDY, Sampling
from tests.attention_runs import ON_GPU
from tests.nano import (
    MODELS,
    VOCAB,
    assert_is_the_targets_own,
    assert_nobody_holds_a_page,
    assert_state_equals_recomputation,
    make_engine,
    planted,
    prompt,
)
from tests.test_pass_graphs import both as both_kept
from tests.test_pass_graphs import poison

PROMPTS = [prompt(n, seed=n) for n in (33, 1, 18)]


def both(drafter=MODELS.drafter, **config):
    """An engine with trees on the host and one with trees on the device."""
    return [
        make_engine(drafter, **config, tree_backend=backend) for backend in ("host", "reference")
    ]


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        ({}, Sampling(temperature=0.8, top_k=7)),
        ({"mode": "dflash", "page_size": 1}, GREEDY),
        ({"mode": "dflash", "node_budget": 3}, Sampling(temperature=0.8)),
        ({"graphs": "buffers"}, GREEDY),
        ({"graphs": "buffers", "cache_layout": "hybrid"}, Sampling(temperature=0.8)),
        ({"node_budget": 1, "cache_layout": "hybrid", "page_size": 64}, GREEDY),
        ({"node_budget": 40, "prefix_reuse": True}, GREEDY),
        ({"mode": "ar"}, GREEDY),
    ],
    ids=lambda one: "-".join(map(str, one.values())) or "plain" if isinstance(one, dict) else "",
)
def test_steps_are_those_of_trees_on_the_host(config, sampling):
    engines = both(planted(PROMPTS, 4), **config)
    batches = [engine.prefill(PROMPTS, sampling=sampling, seed=[3, 4, 5]) for engine in engines]

    for _ in range(4):
        expected, got = (engine.step(batch) for engine, batch in zip(engines, batches, strict=True))
        assert got == expected
        engines[1].cache.check_integrity()

    assert_state_equals_recomputation(engines[1], batches[1])
    for one, other in zip(*(batch.sequences for batch in batches), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12)
    assert engines[1].config.mode == "ar" or max(expected.num_nodes) > 0


@pytest.mark.parametrize("layout", [{"page_size": 1}, {"cache_layout": "hybrid"}])
def test_rows_of_a_path_that_lies_scattered_are_moved_together(layout):
    engines = both(planted(PROMPTS, 4), node_budget=40, **layout)
    batches = [engine.prefill(PROMPTS) for engine in engines]

    for _ in range(3):
        steps = []
        for engine, batch in zip(engines, batches, strict=True):
            trees = engine.build(batch, outdone(engine.draft(batch)))
            verified = engine.verify(batch, trees)
            said = accept(trees[0], verified.target_tokens[0, : trees[0].tree_size])
            steps.append((engine.commit(batch, trees, verified), said.path.tolist()))
        assert steps[0] == steps[1]
        assert steps[1][1][0] > 1  # never the first of its siblings

    assert_state_equals_recomputation(engines[1], batches[1])


def outdone(drafted):
    """Drafts in which another token is a little likelier than the likeliest of each depth."""
    best = drafted.max(-1, keepdim=True)
    outdone_by = (best.indices + 1) % VOCAB
    return drafted.scatter(-1, outdone_by, best.values + 0.125)


@pytest.mark.parametrize("layout", [{}, {"cache_layout": "hybrid", "graphs": "buffers"}])
def test_generations_end_and_leave_nothing_behind(layout):
    engine = make_engine(planted(PROMPTS, 5), **layout, tree_backend="reference")

    generations = engine.generate(PROMPTS, max_new_tokens=17)

    for text, generation in zip(PROMPTS, generations, strict=True):
        assert len(generation.token_ids) == 17
        assert_is_the_targets_own(generation, text)
    assert max(generations[0].commit_lengths) > 1
    assert_nobody_holds_a_page(engine)


@pytest.mark.parametrize("name", ["roots", "targets"])
def test_numbers_that_a_replay_kept_would_be_seen(name, monkeypatch):
    """What the host knows of a build or a commit is brought to its place for every one of them."""
    bring = Recurring.place

    def place(recurring, own_name, values, device):
        is_kept = own_name == name and (name, values.shape) in recurring._places
        if is_kept:
            return recurring._places[name, values.shape].held
        return bring(recurring, own_name, values, device)

    plain, kept = both_kept(planted(PROMPTS, 4), tree_backend="reference", cache_layout="hybrid")
    batches = [engine.prefill(PROMPTS) for engine in (plain, kept)]
    for engine, batch in zip((plain, kept), batches, strict=True):
        for _ in range(3):  # launched, captured, replayed
            engine.step(batch)
    assert [one.token_ids for one in batches[1].sequences] == [
        one.token_ids for one in batches[0].sequences
    ]
    poison(kept)
    monkeypatch.setattr(Recurring, "place", place)

    with pytest.raises((IndexError, RuntimeError)):
        kept.step(batches[1])


def test_whoever_looks_at_a_tree_sees_the_hosts():
    engines = both()
    batches = [engine.prefill(PROMPTS) for engine in engines]

    expected, got = (e.build(b, e.draft(b)) for e, b in zip(engines, batches, strict=True))

    assert isinstance(got, DeviceTrees)
    assert [tree.num_nodes for tree in expected] == list(got.num_nodes)
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.parents, other.parents)
        assert torch.equal(one.depths, other.depths)
        assert torch.equal(one.path_log_probs, other.path_log_probs)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_drafts_that_are_no_distribution_are_refused_before_anything_is_kept(value):
    engine = make_engine(tree_backend="reference")
    batch = engine.prefill(PROMPTS)
    drafted = engine.draft(batch)
    drafted[1, 2, 3] = value
    before = [list(sequence.token_ids) for sequence in batch.sequences]

    trees = engine.build(batch, drafted)
    with pytest.raises(ShapeError, match="draft_logits: expected no NaN"):
        engine.commit(batch, trees, engine.verify(batch, trees))

    assert [sequence.token_ids for sequence in batch.sequences] == before
    assert [batch.cache.length(seq) for seq in batch.seqs] == [32, 0, 17]
    with pytest.raises(ShapeError, match="draft_logits: expected no NaN"):
        engine.build(batch, drafted).num_nodes  # noqa: B018 - to read is what is refused


def test_a_target_that_says_nothing_is_refused_before_anything_is_kept():
    engine = make_engine(tree_backend="reference")
    batch = engine.prefill(PROMPTS)
    trees = engine.build(batch, engine.draft(batch))
    verified = engine.verify(batch, trees)
    verified.target_tokens[2, int(trees.rows.tree_sizes[2]) - 1] = -1

    with pytest.raises(ShapeError, match="logits: expected a finite maximum"):
        engine.commit(batch, trees, verified)

    assert [batch.cache.length(seq) for seq in batch.seqs] == [32, 0, 17]


def test_rows_behind_a_commit_hold_the_fill_again():
    engine = make_engine(planted(PROMPTS, 3), page_size=64, tree_backend="reference")
    batch = engine.prefill(PROMPTS)

    engine.step(batch)

    for seq in batch.seqs:
        length, capacity = batch.cache.length(seq), batch.cache.capacity(seq)
        behind = batch.cache.slots(seq, range(length, capacity))
        assert batch.cache.pages.flatten(1, 2)[:, behind].isnan().all()


def test_a_step_can_be_taken_back():
    engine = make_engine(planted(PROMPTS, 4), tree_backend="reference")
    batch = engine.prefill(PROMPTS)
    engine.step(batch)
    mark = engine.snapshot(batch)
    first = engine.step(batch)

    engine.rewind(batch, mark)

    assert engine.step(batch) == first


@pytest.mark.parametrize("policy", ["shared", "adaptive"])
def test_policies_that_look_at_trees_keep_them_on_the_host(policy):
    with pytest.raises(ConfigError, match="tree_backend: expected 'host' for budget policy"):
        make_engine(budget_policy=policy, tree_backend="reference")


@pytest.mark.parametrize("name", ["triton", None, 3])
def test_a_tree_backend_that_is_not_there_is_refused(name):
    with pytest.raises(BackendError, match="tree_backend: expected one of host, reference, cuda"):
        make_engine(tree_backend=name)


def test_cuda_trees_are_refused_on_a_cpu():
    engine = make_engine(tree_backend="cuda")
    batch = engine.prefill(PROMPTS[:1])

    with pytest.raises(BackendError, match="expected CUDA tensors, got cpu ones"):
        engine.step(batch)


@pytest.mark.parametrize("layout", [{"page_size": 16}, {"cache_layout": "hybrid"}])
@pytest.mark.parametrize("graphs", ["off", "cuda"])
@pytest.mark.parametrize("mode", ["ddtree", "dflash"])
@pytest.mark.parametrize("_", [pytest.param(None, marks=ON_GPU, id="gpu")])
def test_a_step_on_a_gpu_waits_once_and_says_what_trees_of_the_host_say(_, layout, graphs, mode):
    models = preset("tiny", device="cuda", dtype=torch.float32)
    config = EngineConfig(
        **layout, node_budget=32, max_context=400, attention_backend="triton_split",
        moe_backend="triton", graphs=graphs, mode=mode,
    )  # fmt: skip
    engines = [
        Engine(models.target, models.drafter, replace(config, tree_backend=backend))
        for backend in ("reference", "cuda")
    ]
    batches = [engine.prefill([list(b"def main("), list(b"import ")]) for engine in engines]

    for _ in range(12):
        expected, got = (engine.step(batch) for engine, batch in zip(engines, batches, strict=True))
        assert got == expected
    assert waits_of(lambda: engines[1].step(batches[1])) == 1


def waits_of(body):
    """How often the host waits for the device, as PyTorch counts it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.cuda.set_sync_debug_mode("warn")  # which warns that it is young
            body()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(one.message) for one in caught)


def test_the_vocabulary_may_be_smaller_than_the_budget():
    engines = both(node_budget=2 * VOCAB, max_context=1024)
    batches = [engine.prefill(PROMPTS[:1]) for engine in engines]

    expected, got = (engine.step(batch) for engine, batch in zip(engines, batches, strict=True))

    assert got == expected
