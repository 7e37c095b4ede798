"""CUDA graphs of target passes: a replay says what launching every operation says (marker gpu)."""

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.decoder import Engine
from engine.drafter import TapRows
from engine.pass_graphs import buffers
from engine.planted import begin_planted
from engine.presets import Preset, Rank, preset, random_drafter, random_rank, random_target
from tests.attention_runs import ON_GPU
from tests.ranks import SMALL
from tests.test_pass_graphs import places

pytestmark = ON_GPU
LAYOUTS = [{"page_size": 1}, {"page_size": 64, "cache_layout": "hybrid"}]


def poison(engine):
    """Leave zeros in every buffer: within bounds, so that a replay that reads them says it."""
    for bucket in engine._run_pass.buckets.values():
        for held in buffers(bucket.rows, bucket.choice):
            held.zero_()
    for bucket in engine._run_draft.buckets.values():
        bucket.numbers.held.zero_()
        bucket.inputs.taps.fill_(torch.nan)
    for held in places(engine):
        held.zero_()


def models_of(name):
    """Models whose widths the kernels take: `nano`'s rotated parts are too narrow for a tile."""
    if name == "rank":
        return random_rank(SMALL, device="cuda", dtype=torch.float32, seed=0)
    models = preset(name, device="cuda", dtype=torch.float32)
    if name == "tiny":
        return models
    config = replace(models.target.config, qk_rope_head_dim=16)
    target = random_target(config, device="cuda", dtype=torch.float32, seed=0)
    drafts = replace(models.drafter.config, head_dim=16)
    return Preset(target, random_drafter(drafts, target, seed=0))


def random_prompt(length, vocab_size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@pytest.mark.parametrize("layout", LAYOUTS, ids=["paged", "hybrid"])
@pytest.mark.parametrize(
    ("name", "trees"),
    [("nano", "cuda"), ("tiny", "host"), ("tiny", "cuda"), ("rank", "host"), ("rank", "cuda")],
)
def test_graphs_replay_what_is_launched(name, layout, trees):
    models = models_of(name)
    config = EngineConfig(
        **layout, node_budget=9, max_context=400, attention_backend="triton_split",
        moe_backend="triton", tree_backend=trees,
    )  # fmt: skip
    engines = [
        Engine(models.target, models.drafter, replace(config, graphs=graphs), page_fill=torch.nan)
        for graphs in ("buffers", "cuda")
    ]
    sizes = ((150, 0), (3, 1))
    prompts = [random_prompt(n, models.target.config.vocab_size, seed) for n, seed in sizes]
    batches = [engine.prefill(prompts) for engine in engines]

    for _ in range(25):
        expected = engines[0].step(batches[0])
        poison(engines[1])
        assert engines[1].step(batches[1]).token_ids == expected.token_ids

    assert len(engines[1]._run_pass.buckets) <= 3
    assert len(engines[1]._run_draft.buckets) <= 2
    engines[1].cache.check_integrity()


def test_texts_that_leave_a_batch_leave_their_graphs():
    models = preset("tiny", device="cuda", dtype=torch.float32)
    config = EngineConfig(
        attention_backend="triton_split", moe_backend="triton", budget_policy="shared"
    )
    prompts = [random_prompt(n, 256, seed=n) for n in (30, 5, 90)]
    texts = [
        Engine(models.target, models.drafter, replace(config, graphs=graphs)).generate(
            prompts, max_new_tokens=40
        )
        for graphs in ("buffers", "cuda")
    ]

    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]


@pytest.mark.parametrize("num_tokens", [[0], [5], [2048], [2049, 63], [185_000], [131_072, 7]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drafts_of_a_served_width_equal_those_that_are_launched(dtype, num_tokens):
    """A rank's drafter heads and window, over contexts that a full layer splits over the device."""
    longest = {"max_position_embeddings": 262_144}
    wide = {"head_dim": 128, "sliding_window": 2048}
    rank = Rank(replace(SMALL.target, **longest), replace(SMALL.drafter, **longest, **wide))
    models = random_rank(rank, device="cuda", dtype=dtype, seed=0)
    config = EngineConfig(
        node_budget=8, page_size=64, max_context=200_000, attention_backend="triton_split",
        moe_backend="triton",
    )  # fmt: skip
    drafts = []
    for graphs in ("off", "cuda"):
        engine = Engine(models.target, models.drafter, replace(config, graphs=graphs))
        batch = begin_planted(engine, num_tokens)
        taps = torch.randn(
            3 * len(num_tokens), models.drafter.fc.shape[1], device="cuda",
            generator=torch.Generator("cuda").manual_seed(1),
        ).to(dtype)  # fmt: skip
        said = []
        for _ in range(3):  # the second and third replay what the first captured
            batch.pending = TapRows(taps, (3,) * len(num_tokens))
            said.append(engine.draft(batch).clone())
        drafts.append(torch.stack(said))

    plain, replayed = drafts
    error = (replayed - plain).norm() / plain.norm()
    assert error < (2e-2 if dtype == torch.bfloat16 else 2e-3)
    assert plain.isfinite().all()
    assert replayed.isfinite().all()
