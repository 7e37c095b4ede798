import dataclasses

import pytest
import torch

from engine.config import TargetConfig, YarnConfig
from engine.draft_tree import build_draft_tree
from engine.kv_cache import CacheShape, LatentCache
from engine.layers import Rotary
from engine.mla import Mla
from engine.quantized import Fp8BlockWeight, dense
from engine.verify import REFERENCE, chain, plan_pass

HIDDEN = 24
CONFIG = TargetConfig(
    hidden_size=HIDDEN,
    num_hidden_layers=1,
    num_attention_heads=3,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    n_routed_experts=2,
    num_experts_per_tok=1,
    n_shared_experts=0,
    moe_intermediate_size=8,
    intermediate_size=8,
    first_k_dense_replace=1,
    vocab_size=8,
    max_position_embeddings=512,
)
VARIANTS = {
    "plain": CONFIG,
    "compressed-queries": dataclasses.replace(CONFIG, q_lora_rank=7),
    "yarn": dataclasses.replace(
        CONFIG, yarn=YarnConfig(factor=8, original_max_position_embeddings=32)
    ),
}


def make(config, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    heads, rank = config.num_attention_heads, config.q_lora_rank
    return Mla(
        config=config,
        q_a_proj=None if rank is None else normal(rank, HIDDEN),
        q_a_layernorm=None if rank is None else 1 + normal(rank),
        q_proj=normal(heads * config.qk_head_dim, HIDDEN if rank is None else rank),
        kv_a_proj_with_mqa=normal(config.latent_dim, HIDDEN),
        kv_a_layernorm=1 + normal(config.kv_lora_rank),
        kv_b_proj=normal(
            heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank
        ),
        o_proj=normal(HIDDEN, heads * config.v_head_dim),
    )


def rows(count, seed):
    return torch.randn(
        count, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def new_cache(page_size, num_pages=80):
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5)).tolist()
    return LatentCache(
        CacheShape(1, num_pages, page_size, CONFIG.latent_dim),
        dtype=torch.float64,
        fill=torch.nan,
        page_order=order,
    )


def attend(mla, cache, seqs, trees, x):
    """One paged pass over the packed rows x."""
    plan = plan_pass(cache, seqs, trees, REFERENCE)
    rotation = Rotary.of_target(mla.config, x.device).at(plan.positions, x.dtype)
    return mla(x, rotation, plan.attention, 0)


def naive(mla, x):
    return mla.naive(x, Rotary.of_target(mla.config, x.device).at(torch.arange(len(x)), x.dtype))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_absorbed_over_shuffled_pages_equals_naive(config, page_size):
    mla, cache, x = make(config), new_cache(page_size), rows(50, seed=1)
    got = []

    for start, end in ((0, 1), (1, 18), (18, 34), (34, 50)):
        got.append(attend(mla, cache, [0], [chain(range(start, end))], x[start:end]))
        cache.advance(0, end - start)

    torch.testing.assert_close(torch.cat(got), naive(mla, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_node_attends_its_own_path_and_nothing_else(page_size):
    mla, cache = make(CONFIG), new_cache(page_size)
    context, nodes = rows(21, seed=2), rows(41, seed=3)
    attend(mla, cache, [0], [chain(range(21))], context)
    cache.advance(0, 21)
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(4))
    tree = build_draft_tree(
        logits, root_token=0, node_budget=40
    )  # more rows than a mask word has bits

    got = attend(mla, cache, [0], [tree], nodes)

    for node, seen in enumerate(tree.ancestor_mask()):
        path = torch.cat((context, nodes[seen]))
        torch.testing.assert_close(got[node], naive(mla, path)[-1], rtol=0, atol=1e-10)


def test_sequences_of_uneven_length_and_tree_size_do_not_mix():
    mla, cache = make(CONFIG), new_cache(16)
    contexts, chunks = (
        [rows(n, seed=n) for n in (3, 33, 17)],
        [rows(n, seed=50 + n) for n in (9, 1, 4)],
    )
    for seq, context in enumerate(contexts):
        attend(mla, cache, [seq], [chain(range(len(context)))], context)
        cache.advance(seq, len(context))

    got = attend(
        mla,
        cache,
        [2, 0, 1],
        [chain(range(len(chunks[s]))) for s in (2, 0, 1)],
        torch.cat([chunks[s] for s in (2, 0, 1)]),
    )

    expected = [
        naive(mla, torch.cat((contexts[s], chunks[s])))[len(contexts[s]) :] for s in (2, 0, 1)
    ]
    torch.testing.assert_close(got, torch.cat(expected), rtol=0, atol=1e-10)


def test_naive_attention_is_causal():
    mla, x = make(CONFIG), rows(12, seed=6)

    torch.testing.assert_close(naive(mla, x)[:7], naive(mla, x[:7]), rtol=0, atol=1e-12)
    assert not torch.allclose(naive(mla, x)[11], naive(mla, torch.cat((x[:1] * 2, x[1:])))[11])


def test_a_bf16_layer_stays_near_its_float64_twin():
    mla, cache, x = make(CONFIG), new_cache(16), rows(20, seed=8)
    low = Mla(
        mla.config,
        *(None if t is None else t.bfloat16() for t in (mla.q_a_proj, mla.q_a_layernorm)),
        *(
            t.bfloat16()
            for t in (
                mla.q_proj,
                mla.kv_a_proj_with_mqa,
                mla.kv_a_layernorm,
                mla.kv_b_proj,
                mla.o_proj,
            )
        ),
    )
    cache = LatentCache(
        CacheShape(1, 4, 16, CONFIG.latent_dim), dtype=torch.bfloat16, fill=torch.nan
    )

    got = attend(low, cache, [0], [chain(range(20))], x.bfloat16())

    expected = naive(mla, x)
    assert (
        got.double() - expected
    ).norm() < 0.02 * expected.norm()  # bf16 has 8 bits: 0.4 % a rounding


def as_fp8(weight):
    """The weight in blocks of 4 x 5, cut off at the edges, with made-up scales."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // 4), -(-columns // 5), generator=torch.Generator().manual_seed(0))
    return Fp8BlockWeight(weight.to(torch.float8_e4m3fn), scales + 0.5, (4, 5))


def test_quantised_projections_give_what_their_dequantised_twins_give():
    mla, x = make(VARIANTS["compressed-queries"]), rows(20, seed=8)
    names = ("q_a_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    stored = dataclasses.replace(mla, **{name: as_fp8(getattr(mla, name)) for name in names})
    plain = {name: dense(getattr(stored, name), torch.float64) for name in names}
    twin = dataclasses.replace(mla, **plain)

    got = attend(stored, new_cache(16), [0], [chain(range(20))], x)

    assert torch.equal(got, attend(twin, new_cache(16), [0], [chain(range(20))], x))
    torch.testing.assert_close(got, naive(stored, x), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("factor", "scale"),
    [(64, 0.1446796258), (32, 0.1308607999), (40, 0.1352337789), (None, 0.0721687836)],
    ids=["kimi-k2.6", "kimi-k2", "deepseek-v3", "no-yarn"],
)
def test_the_softmax_scale_carries_yarns_correction(factor, scale):
    yarn = (
        None if factor is None else YarnConfig(factor=factor, original_max_position_embeddings=4096)
    )
    config = dataclasses.replace(CONFIG, qk_nope_head_dim=128, qk_rope_head_dim=64, yarn=yarn)

    assert config.softmax_scale == pytest.approx(scale, abs=1e-10)
    assert Rotary.of_target(config, torch.device("cpu")).amplitude == 1.0
