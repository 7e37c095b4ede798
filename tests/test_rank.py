"""One of eight tensor-parallel ranks of Kimi K2.6: its sizes on `meta`, its step on a tiny cut."""

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch

from engine.checkpoint_config import INT4, Quantization
from engine.config import EngineConfig
from engine.cost import expected_experts_hit, latent_bytes, resident_bytes, weight_bytes
from engine.decoder import Engine
from engine.drafter import drafter_shapes
from engine.errors import ConfigError, WeightsError
from engine.moe import chosen_experts
from engine.planted import PlantedTarget, begin_planted
from engine.presets import KIMI as WHOLE
from engine.presets import KIMI_DRAFTER as WHOLE_DRAFTER
from engine.presets import KIMI_EXPERTS, RANKS, preset, random_rank, rank_of
from engine.quantized import Int4GroupWeight
from engine.random_weights import random_packed_target
from engine.target import target_shapes
from tests.kimi import KIMI, KIMI_DRAFTER
from tests.ranks import SMALL

H200_BYTES = 141e9
NAME = "kimi-k2.6-tp8-rank"
RANK = RANKS[NAME]
LONGEST = 189440  # committed tokens of the incident's longest context


def small(seed=0, dtype=torch.float32):
    return random_rank(SMALL, device="cpu", dtype=dtype, seed=seed)


@cache
def shapes():
    return preset(NAME, device="meta", dtype=torch.bfloat16)


def engine_of(models, **config):
    config = {"node_budget": 8, "page_size": 16, "max_context": 96} | config
    return Engine(models.target, models.drafter, EngineConfig(**config), page_fill=torch.nan)


def test_the_whole_model_is_the_published_one():
    assert WHOLE == KIMI
    assert replace(WHOLE_DRAFTER, rope_attention_factor=1.0) == KIMI_DRAFTER
    assert WHOLE_DRAFTER.rope_attention_factor == pytest.approx(1.4158883083359672, abs=1e-15)


def test_a_rank_has_an_eighth_of_what_is_divided_and_all_of_what_is_shared():
    whole, rank = target_shapes(WHOLE), target_shapes(RANK.target)
    shared = ("q_a_", "kv_a_", "norm", "mlp.gate.")

    for name, shape in whole.items():
        parts = 1 if any(part in name for part in shared) else 8
        assert prod(rank[name]) * parts == prod(shape), name
    assert rank["model.layers.1.mlp.experts.gate_proj.weight"] == (384, 256, 7168)
    assert rank["model.layers.1.self_attn.o_proj.weight"] == (7168, 8 * 128)
    assert rank["model.layers.1.self_attn.kv_b_proj.weight"] == (8 * 256, 512)
    assert rank["lm_head.weight"] == (20480, 7168)
    assert RANK.target.softmax_scale == WHOLE.softmax_scale


def test_a_ranks_drafter_has_an_eighth_of_its_layers():
    whole, rank = drafter_shapes(WHOLE_DRAFTER), drafter_shapes(RANK.drafter)

    for name, shape in whole.items():
        parts = 8 if "_proj" in name else 1
        assert prod(rank[name]) * parts == prod(shape), name
    assert RANK.drafter.num_key_value_heads == 1
    assert RANK.drafter.mask_token_id == 163838 % 20480


def test_a_cut_has_the_dense_layer_and_the_next_ones():
    cut = RANKS[f"{NAME}-4-layers"]

    assert replace(cut.target, num_hidden_layers=61) == RANK.target
    assert cut.drafter.num_hidden_layers == 6
    assert {name: shape for name, shape in target_shapes(RANK.target).items()
            if name in target_shapes(cut.target)} == target_shapes(cut.target)  # fmt: skip


@pytest.mark.parametrize("num_ranks", [3, 16])
def test_ranks_that_do_not_divide_a_size_are_refused(num_ranks):
    with pytest.raises(ConfigError, match=f"num_ranks: expected a divisor of num_.*{num_ranks}"):
        rank_of(WHOLE, WHOLE_DRAFTER, num_ranks)


@pytest.mark.parametrize(
    ("page_size", "cache_layout"), [(1, "paged"), (64, "paged"), (64, "hybrid")]
)
def test_a_rank_fits_one_h200_with_its_longest_context(page_size, cache_layout):
    models = shapes()
    config = EngineConfig(
        max_context=LONGEST + 1024, node_budget=64, page_size=page_size, cache_layout=cache_layout
    )

    held = resident_bytes(models.target, models.drafter, config)

    stored = weight_bytes(models.target.tensors)
    experts = sum(size for name, size in stored.items() if ".mlp.experts." in name)
    assert experts == 60 * 384 * 3 * 256 * 7168 * 9 // 16  # 4.5 bits a number
    assert held.target_weights == sum(stored.values()) == pytest.approx(76.2e9, rel=1e-3)
    assert held.drafter_weights == pytest.approx(1.41e9, rel=1e-2)
    assert held.latent_pages == pytest.approx(
        latent_bytes(KIMI, LONGEST + 1088, itemsize=2), rel=1e-3
    )
    assert held.total < 0.7 * H200_BYTES  # the rest is for passes


def test_nothing_of_a_rank_is_drawn_on_meta():
    models = shapes()

    held = [part for weight in models.target.tensors.values()
            for part in ([weight.packed, weight.scale] if isinstance(weight, Int4GroupWeight)
                         else [weight])]  # fmt: skip
    assert {tensor.device.type for tensor in (*held, *models.drafter.tensors.values())} == {"meta"}
    assert models.target.tensors["model.layers.60.mlp.experts.down_proj.weight"].group_size == 32


def test_what_an_engine_keeps_is_what_was_counted():
    models = small()
    for config in (
        {"page_size": 1},
        {"page_size": 64, "cache_layout": "hybrid"},
        {"prefix_reuse": True},
        {"mode": "dflash"},
        {"mode": "ar"},
    ):
        engine = engine_of(models, **config)
        batch = engine.prefill([[5] * 90])
        engine.step(batch)

        held = resident_bytes(models.target, models.drafter, engine.config)

        cache = engine.cache
        assert held.latent_pages == cache.pages.nbytes + cache.features.nbytes
        assert held.tree_scratch == (batch.scratch.rows.nbytes if batch.scratch else 0)
        tensors = () if batch.context is None else (*batch.context.keys, *batch.context.values)
        blocks = 2 * 8 * 6 * 16 * 4 * len(tensors) // 12  # temporary rows of the block
        assert held.drafter_context >= sum(tensor.nbytes for tensor in tensors) + blocks
        assert held.drafter_context <= 2.5 * sum(tensor.nbytes for tensor in tensors)


def test_packed_experts_are_drawn_as_bits_that_keep_the_size_of_rows():
    target = small().target

    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = target.tensors[f"model.layers.1.mlp.experts.{name}.weight"]
        plain = weight.dequantize(torch.float32)
        nibbles = torch.bincount((weight.packed.flatten() >> 28) & 0xF, minlength=16)
        assert (weight.packed.dtype, weight.scale.dtype) == (torch.int32, torch.bfloat16)
        assert plain.std().item() * plain.shape[-1] ** 0.5 == pytest.approx(1.0, abs=0.05)
        assert nibbles[0] == 0  # -8 would have no counterpart
        assert nibbles[1:].min() > 0.5 * nibbles.float().mean()
        assert abs(plain.mean().item()) < 5.0 * plain.std().item() / plain.numel() ** 0.5
        assert weight.scale.unique().numel() > 16


def test_a_router_chooses_all_experts_equally_often_and_its_bias_sees_to_it():
    layer = small().target.layers[1]
    rows = torch.randn(20000, 64, generator=torch.Generator().manual_seed(1))
    rows *= layer.post_attention_layernorm
    router = layer.mlp.router
    unbiased = replace(router, e_score_correction_bias=torch.zeros(16))

    shares, skewed = (
        torch.bincount(one(rows).expert_ids.flatten(), minlength=16) / (20000 * 4 / 16)
        for one in (router, unbiased)
    )

    assert router.weight.norm(dim=1).std() > 0.05
    assert (shares - 1.0).abs().max() < 0.1
    assert (skewed - 1.0).abs().max() > 0.25


def test_rows_behind_a_planted_context_choose_as_if_independently_in_a_deep_stack():
    target = replace(
        SMALL.target, hidden_size=512, num_hidden_layers=10, n_routed_experts=96,
        num_experts_per_tok=2, moe_intermediate_size=256, vocab_size=4096,
    )  # fmt: skip
    planted = PlantedTarget(
        random_packed_target(target, KIMI_EXPERTS, device="cpu", dtype=torch.bfloat16, seed=0)
    )
    engine = Engine(planted, None, EngineConfig(mode="ar", page_size=16, max_context=1100))
    batch = begin_planted(engine, [1000] * 9)

    with chosen_experts() as chosen:
        engine.step(batch)

    hits = [len(set(ids.flatten().tolist())) for ids in chosen]
    expected = expected_experts_hit(target, 9)
    assert [len(ids) for ids in chosen] == [9] * 9
    assert sum(hits[-4:]) / 4 == pytest.approx(expected, rel=0.05)
    assert sum(hits) / len(hits) == pytest.approx(expected, rel=0.05)


def test_a_rank_is_the_same_each_time_and_another_for_another_seed():
    one, same, other = (small(seed).target.tensors for seed in (0, 0, 1))
    name = "model.layers.2.mlp.experts.up_proj.weight"

    assert torch.equal(one[name].packed, same[name].packed)
    assert torch.equal(one["lm_head.weight"], same["lm_head.weight"])
    assert not torch.equal(one[name].packed, other[name].packed)


def test_experts_are_packed_in_whole_groups_of_4_bits_or_refused():
    arguments = {"device": "cpu", "dtype": torch.float32, "seed": 0}

    with pytest.raises(ConfigError, match="experts: expected int4 storage, got 'fp8'"):
        random_packed_target(SMALL.target, Quantization("fp8", (128, 128)), **arguments)
    with pytest.raises(WeightsError, match="multiple of 8 that divides 64 inputs, got 48"):
        random_packed_target(SMALL.target, Quantization(INT4, (1, 48)), **arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_rank_of_the_same_structure_decodes(dtype):
    models = small(dtype=dtype)
    engine = engine_of(models, page_size=1, prefill_chunk=32)
    batch = engine.prefill([list(range(60))])  # beyond the window of the sliding layers

    results = [engine.step(batch) for _ in range(4)]

    assert all(result.num_nodes == (8,) for result in results)
    engine.cache.check_integrity()
    if dtype == torch.float32:
        tokens = [token for result in results for token in result.token_ids[0]]
        prompt = [*range(60), *tokens]
        said = models.target.logits(prompt).argmax(-1).tolist()
        assert tokens == said[59:-1]
