"""Configurations: derived values of the published models, and what is refused."""

import dataclasses

import pytest

from engine.config import (
    EngineConfig,
    YarnConfig,
    default_target_layer_ids,
)
from engine.errors import BackendError, BudgetError, ConfigError
from engine.verify import Backends
from tests.kimi import KIMI, KIMI_DRAFTER


@pytest.mark.parametrize(("factor", "scale"), [(64.0, 0.1446796258), (32.0, 0.1308607999)])
def test_yarn_corrects_the_softmax_scale(factor, scale):
    config = dataclasses.replace(KIMI, yarn=YarnConfig(factor, 4096))

    assert config.softmax_scale == pytest.approx(scale, abs=1.1e-10)
    assert config.yarn.rope_mscale == 1.0


def test_without_yarn_the_scale_is_that_of_the_head():
    config = dataclasses.replace(KIMI, yarn=None)

    assert config.softmax_scale == pytest.approx(0.0721687836, abs=1.1e-10)
    assert config.latent_dim == 576


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (61, 6, (1, 12, 24, 35, 47, 58)),
        (61, 5, (1, 15, 30, 44, 58)),
        (36, 5, (1, 9, 17, 25, 33)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 5, (1, 16, 31, 46, 61)),
        (60, 6, (1, 12, 23, 35, 46, 57)),
        (36, 1, (18,)),
        (61, 1, (30,)),
    ],
)
def test_default_taps_are_the_published_ones(layers, taps, ids):
    assert default_target_layer_ids(layers, taps) == ids


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 0},
        {"vocab_size": 10.5},
        {"q_lora_rank": 0},
        {"qk_rope_head_dim": 63},
        {"n_shared_experts": -1},
        {"first_k_dense_replace": 62},
        {"n_group": 7},
        {"topk_group": 2},
        {"n_group": 48, "topk_group": 0},
        {"n_group": 48, "topk_group": 1, "num_experts_per_tok": 9},
        {"n_group": 384, "topk_group": 8},
        {"num_experts_per_tok": 385},
        {"rms_norm_eps": 0.0},
        {"rope_theta": float("inf")},
    ],
    ids=str,
)
def test_an_impossible_target_is_refused(change):
    with pytest.raises(ConfigError, match=r"expected .* got "):
        dataclasses.replace(KIMI, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 127},
        {"num_key_value_heads": 7},
        {"block_size": 1},
        {"mask_token_id": 163840},
        {"target_layer_ids": ()},
        {"target_layer_ids": (1, 60)},
        {"target_layer_ids": (12, 1)},
        {"target_layer_ids": (-1, 4)},
        {"target_layer_ids": (4, 4)},
        {"layer_types": ("full_attention",) * 5},
        {"layer_types": ("full",) * 6},
        {"sliding_window": None},
        {"sliding_window": 10**30},
        {"block_size": 514},
        {"target_layer_ids": (0.5,)},
        {"layer_types": (["full_attention"],) * 6},
        {"rope_attention_factor": "1"},
        {"rope_attention_factor": float("nan")},
    ],
    ids=str,
)
def test_an_impossible_drafter_is_refused(change):
    with pytest.raises(ConfigError, match=r"expected .* got "):
        dataclasses.replace(KIMI_DRAFTER, **change)


@pytest.mark.parametrize(
    ("factor", "options"), [(0.5, {}), (2.0, {"beta_fast": 0.5}), (2.0, {"beta_slow": 0.0})]
)
def test_an_impossible_yarn_is_refused(factor, options):
    with pytest.raises(ConfigError, match="yarn"):
        YarnConfig(factor, 4096, **options)


@pytest.mark.parametrize("budget", [0, -1, 513, True])
def test_an_engine_needs_a_budget_within_its_range(budget):
    with pytest.raises(BudgetError, match=r"expected an integer in 1\.\.512"):
        EngineConfig(node_budget=budget)


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 48},
        {"num_pages": 0},
        {"max_context": 0},
        {"prefill_chunk": 0},
        {"drafter_context": 0},
        {"drafter_context": 10**30},
        {"num_pages": 10**30},
        {"mode": "eagle"},
        {"budget_policy": "greedy"},
        {"cache_layout": "dense"},
        {"prefix_reuse": 1},
    ],
)
def test_an_impossible_engine_is_refused(change):
    with pytest.raises(ConfigError, match="expected"):
        EngineConfig(**change)


def test_an_unknown_backend_is_refused_with_the_names_of_the_known():
    with pytest.raises(BackendError, match=r"attention_backend: expected one of .*, got 'fast'"):
        Backends(attention="fast")
    with pytest.raises(
        BackendError, match="moe_backend: expected one of reference, triton, cuda, got"
    ):
        Backends(moe="triton_split")


def test_a_backend_that_is_no_name_is_refused_as_an_unknown_one():
    with pytest.raises(BackendError, match=r"got \['fast'\]"):
        Backends(moe=["fast"])


def test_a_drafter_drafts_all_but_the_anchor():
    assert KIMI_DRAFTER.horizon == 7
