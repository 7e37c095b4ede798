import dataclasses
import math

import pytest
import torch

from engine.config import TargetConfig
from engine.layers import SwiGlu
from engine.moe import Moe, Router
from engine.quantized import Int4GroupWeight, dense

CONFIG = TargetConfig(
    hidden_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    moe_intermediate_size=10,
    intermediate_size=16,
    first_k_dense_replace=0,
    vocab_size=16,
    max_position_embeddings=64,
    routed_scaling_factor=2.827,
)
GROUPED = dataclasses.replace(CONFIG, n_group=4, topk_group=2)


def make(config, *, seed=0, bias_scale=0.3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    experts, inner, hidden = (
        config.n_routed_experts,
        config.moe_intermediate_size,
        config.hidden_size,
    )
    return Moe(
        router=Router(config, normal(experts, hidden), normal(experts).double() * bias_scale),
        gate_proj=normal(experts, inner, hidden),
        up_proj=normal(experts, inner, hidden),
        down_proj=normal(experts, hidden, inner),
        shared=SwiGlu(normal(inner, hidden), normal(inner, hidden), normal(hidden, inner)),
    )


def route_one(config, router, x):
    """The router of one row in plain Python: expert ids by falling priority, and weights."""
    scores = [
        1 / (1 + math.exp(-sum(w * v for w, v in zip(row, x, strict=True))))
        for row in router.weight.tolist()
    ]
    bias = router.e_score_correction_bias.tolist()
    priority = {e: scores[e] + bias[e] for e in range(len(scores))}
    size = len(scores) // config.n_group
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.n_group)]
    groups.sort(key=lambda group: -sum(sorted((priority[e] for e in group), reverse=True)[:2]))
    allowed = [e for group in groups[: config.topk_group] for e in group]
    chosen = sorted(allowed, key=lambda e: -priority[e])[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1.0
    return {e: scores[e] / total * config.routed_scaling_factor for e in chosen}


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        GROUPED,
        dataclasses.replace(GROUPED, topk_group=4),
        dataclasses.replace(CONFIG, norm_topk_prob=False),
    ],
    ids=["no-groups", "two-of-four-groups", "all-groups", "not-renormalised"],
)
@pytest.mark.parametrize("seed", range(5))
def test_the_router_agrees_with_a_plain_loop(config, seed):
    router = make(config, seed=seed).router
    x = torch.randn(
        20, config.hidden_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    routing = router(x)

    for row, ids, weights in zip(
        x.tolist(), routing.expert_ids.tolist(), routing.expert_weights.tolist(), strict=True
    ):
        assert dict(zip(ids, weights, strict=True)) == pytest.approx(
            route_one(config, router, row), rel=1e-12
        )


def test_the_bias_moves_the_choice_and_never_the_weight():
    moe = make(CONFIG)
    x = torch.randn(
        6, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    favourite = torch.zeros(8, dtype=torch.float64)
    favourite[5] = 100.0

    routing = dataclasses.replace(moe.router, e_score_correction_bias=favourite)(x)

    assert (routing.expert_ids[:, 0] == 5).all()
    torch.testing.assert_close(
        routing.expert_weights.sum(1),
        torch.full((6,), CONFIG.routed_scaling_factor, dtype=torch.float64),
    )


def test_groups_exclude_a_strong_expert_of_a_weak_group():
    bias = torch.tensor([9.0, -9.0, 3.0, 3.0, 2.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    router = Router(GROUPED, torch.zeros(8, 12, dtype=torch.float64), bias)

    chosen = router(torch.zeros(1, 12, dtype=torch.float64)).expert_ids

    assert set(chosen[0].tolist()) <= {2, 3, 4, 5}


def test_the_layer_agrees_with_a_loop_over_rows_and_experts():
    moe = make(GROUPED)
    x = torch.randn(
        9, GROUPED.hidden_size, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )

    got = moe(x)

    for row, y in zip(x.split(1), got.split(1), strict=True):
        expected = moe.shared(row)
        for e, weight in route_one(GROUPED, moe.router, row[0].tolist()).items():
            expected = expected + weight * SwiGlu(
                moe.gate_proj[e], moe.up_proj[e], moe.down_proj[e]
            )(row)
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    moe = make(CONFIG)
    x = torch.randn(
        17, CONFIG.hidden_size, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )

    together, alone = moe(x), torch.cat([moe(row.unsqueeze(0)) for row in x])

    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_an_expert_that_is_not_hit_is_not_read():
    moe = make(CONFIG)
    x = torch.randn(
        1, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    hit = set(moe.router(x).expert_ids[0].tolist())
    gate = moe.gate_proj.clone()
    gate[[e for e in range(8) if e not in hit]] = torch.nan

    torch.testing.assert_close(dataclasses.replace(moe, gate_proj=gate)(x), moe(x), rtol=0, atol=0)


def test_no_rows_give_no_rows():
    assert make(CONFIG)(torch.empty(0, CONFIG.hidden_size, dtype=torch.float64)).shape == (0, 12)


def test_bf16_rows_are_routed_and_summed_in_float32():
    moe = make(CONFIG, dtype=torch.bfloat16)
    x = torch.randn(4, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4)).bfloat16()

    routing = moe.router(x)

    assert routing.expert_weights.dtype == torch.float32
    assert moe(x).dtype == torch.bfloat16


def test_packed_experts_give_what_their_dequantised_twins_give():
    config = dataclasses.replace(CONFIG, hidden_size=32, moe_intermediate_size=16)
    moe, generator = make(config), torch.Generator().manual_seed(1)

    def packed(out, width):
        shape = (config.n_routed_experts, out, width // 8)
        words = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        scales = torch.rand(*shape[:2], width // 16, generator=generator)
        return Int4GroupWeight(words, (scales / 16).bfloat16())

    names = {"gate_proj": (16, 32), "up_proj": (16, 32), "down_proj": (32, 16)}
    stored = dataclasses.replace(moe, **{name: packed(*shape) for name, shape in names.items()})
    plain = {name: dense(getattr(stored, name), torch.float64) for name in names}
    x = torch.randn(7, 32, generator=generator, dtype=torch.float64)

    assert torch.equal(stored(x), dataclasses.replace(moe, **plain)(x))


def test_scores_that_all_vanish_give_no_routed_part():
    moe = make(CONFIG)
    router = dataclasses.replace(moe.router, weight=torch.full_like(moe.router.weight, -1000.0))
    x = torch.ones(2, CONFIG.hidden_size, dtype=torch.float64)

    assert torch.equal(dataclasses.replace(moe, router=router)(x), moe.shared(x))
