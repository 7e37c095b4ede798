"""The drafter against a twin that shares nothing with it: numpy, float64, no cache, plain loops.

The twin is given all taps of a text and recomputes everything from them for every block. It knows
a window by its definition only, so rings, rewinds and batches have nothing to hide behind.
"""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, YarnConfig
from engine.context_rows import REWIND_ROWS
from engine.decoder import Engine
from engine.drafter import MASK_EMBEDDING, Drafter, TapRows
from engine.presets import random_drafter, random_target
from engine.weights import save_target
from tests.drafts import NANO, random_taps, request, variant

BLOCK = NANO.drafter.config.block_size
VOCAB = NANO.target.config.vocab_size
AMPLITUDE = 0.1 * math.log(64.0) + 1.0  # what YaRN by 64 gives cos and sin in serving stacks


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def frequency(config, i):
    """Radians per position of pair i, YaRN's ramp between its two correction indices."""
    dim, yarn = config.head_dim, config.yarn
    plain = config.rope_theta ** (-2 * i / dim)
    if yarn is None:
        return plain

    def index(rotations):
        original = yarn.original_max_position_embeddings
        return (
            dim * math.log(original / (2 * math.pi * rotations)) / 2 / math.log(config.rope_theta)
        )

    low = max(math.floor(index(yarn.beta_fast)), 0)
    high = min(math.ceil(index(yarn.beta_slow)), dim - 1)
    ramp = min(max((i - low) / (high - low), 0), 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


class NaiveDrafter:
    """All of DFlash's definition, a row and a head at a time."""

    def __init__(self, drafter, max_context=None):
        self.config, self.max_context = drafter.config, max_context
        self.weights = {name: tensor.double().numpy() for name, tensor in drafter.tensors.items()}
        self.embedding = drafter.target.embed_tokens.double().numpy()
        self.head = drafter.target.lm_head.double().numpy()
        pairs = range(self.config.head_dim // 2)
        self.frequencies = np.array([frequency(self.config, i) for i in pairs])

    def rotated(self, rows, positions):
        """Rotate pairs (i, i + half) of rows [M, head_dim], as complex numbers."""
        half = self.config.head_dim // 2
        turned = (rows[:, :half] + 1j * rows[:, half:]) * self.config.rope_attention_factor
        turned = turned * np.exp(1j * np.outer(positions, self.frequencies))
        return np.concatenate((turned.real, turned.imag), axis=1)

    def sees(self, kind, q, k):
        """Whether the row at position q sees the keys at positions k."""
        if kind == "full_attention":
            return q - k < (len(k) if self.max_context is None else self.max_context)
        near = abs(q - k) < self.config.sliding_window
        return near & (k <= q) if self.config.is_block_causal else near

    def draft(self, taps, root):
        config, w, eps = self.config, self.weights, self.config.rms_norm_eps
        context = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        mask_row = w.get(MASK_EMBEDDING, self.embedding[config.mask_token_id])
        x = np.stack([self.embedding[root]] + [mask_row] * (config.block_size - 1))
        for i in range(config.num_hidden_layers):
            x = self.layer(i, x, context)
        return rms(x[1:], w["norm.weight"], eps) @ self.head.T

    def layer(self, i, x, context):
        eps, w = self.config.rms_norm_eps, self.of_layer(i)
        normed = rms(x, w["input_layernorm.weight"], eps)
        x = x + self.attend(i, normed, context) @ w["self_attn.o_proj.weight"].T
        normed = rms(x, w["post_attention_layernorm.weight"], eps)
        gate = normed @ w["mlp.gate_proj.weight"].T
        gated = gate / (1 + np.exp(-gate)) * (normed @ w["mlp.up_proj.weight"].T)
        return x + gated @ w["mlp.down_proj.weight"].T

    def attend(self, i, block, context):
        config, w, start = self.config, self.of_layer(i), len(context)
        dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        rows = np.concatenate((context, block))
        positions = np.arange(len(rows))
        seen = [
            self.sees(config.layer_types[i], start + row, positions) for row in range(len(block))
        ]
        out = np.zeros((len(block), config.num_attention_heads * dim))
        for key_head in range(config.num_key_value_heads):
            shared = slice(key_head * dim, (key_head + 1) * dim)
            keys = rows @ w["self_attn.k_proj.weight"][shared].T
            keys = rms(keys, w["self_attn.k_norm.weight"], config.rms_norm_eps)
            keys = self.rotated(keys, positions)
            values = rows @ w["self_attn.v_proj.weight"][shared].T
            for head in range(key_head * group, (key_head + 1) * group):
                own = slice(head * dim, (head + 1) * dim)
                queries = block @ w["self_attn.q_proj.weight"][own].T
                queries = rms(queries, w["self_attn.q_norm.weight"], config.rms_norm_eps)
                queries = self.rotated(queries, positions[start:])
                for row, query in enumerate(queries):
                    scores = keys[seen[row]] @ query / math.sqrt(dim)
                    weights = np.exp(scores - scores.max())
                    out[row, own] = weights @ values[seen[row]] / weights.sum()
        return out

    def of_layer(self, i):
        prefix = f"layers.{i}."
        return {k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)}


def assert_same(got, expected):
    torch.testing.assert_close(got, torch.from_numpy(expected).float(), rtol=2e-6, atol=2e-6)


YARN = YarnConfig(factor=64, original_max_position_embeddings=64, beta_fast=4.0)
LIKE_KIMI = {"rope_theta": 500.0, "yarn": YARN, "rope_attention_factor": AMPLITUDE}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("max_context", [None, 40], ids=["all-context", "knob"])
@pytest.mark.parametrize(
    "changes",
    [LIKE_KIMI, LIKE_KIMI | GROUPED | {"is_block_causal": True}],
    ids=["two-way", "causal-grouped"],
)
def test_drafts_of_200_random_commits_equal_the_twins(changes, max_context):
    drafter = variant(**changes)
    source = random.Random(5)
    twin = NaiveDrafter(drafter, max_context)
    lengths = [0, 5, 200]
    texts = [random_taps(n, seed=n) for n in lengths]
    context = drafter.new_context(3, max_context=max_context)
    drafter.extend(context, TapRows(torch.cat(texts), tuple(lengths)))

    for commit in range(200):
        if commit in (40, 100):  # a sequence ends, whichever it is
            going = source.sample(range(len(texts)), len(texts) - 1)
            texts = [texts[n] for n in going]
            context.select(going)
        counts = tuple(source.randint(1, BLOCK) for _ in texts)
        new = [random_taps(n, seed=source.getrandbits(32)) for n in counts]
        drafter.extend(context, TapRows(torch.cat(new), counts))
        texts = [torch.cat(pair) for pair in zip(texts, new, strict=True)]
        roots = [source.randrange(VOCAB) for _ in texts]

        drafts = drafter.draft(context, request(*roots))

        for got, text, root in zip(drafts, texts, roots, strict=True):
            assert_same(got, twin.draft(text.numpy(), root))


@pytest.mark.parametrize("is_block_causal", [False, True])
@pytest.mark.parametrize("window", [1, 3, BLOCK, 20])
def test_drafts_at_the_edges_of_window_and_ring_equal_the_twins(window, is_block_causal):
    drafter = variant(sliding_window=window, is_block_causal=is_block_causal)
    twin, ring = NaiveDrafter(drafter, window), window - 1 + REWIND_ROWS
    edges = [n + d for n in (window, window + BLOCK, ring, 2 * ring) for d in (-1, 0, 1)]
    texts = [random_taps(n, seed=n) for n in (0, *edges)]
    context = drafter.new_context(len(texts), max_context=window)
    drafter.extend(context, TapRows(torch.cat(texts), tuple(map(len, texts))))

    drafts = drafter.draft(context, request(*range(len(texts))))

    for root, text in enumerate(texts):
        assert_same(drafts[root], twin.draft(text.numpy(), root))


@pytest.mark.parametrize("length", [2046, 2047, 2048, 2049, 2111, 2112, 4500])
def test_drafts_around_a_window_of_2048_equal_the_twins(length):
    drafter, text = variant(sliding_window=2048), random_taps(length)
    context = drafter.new_context(1)
    drafter.extend(context, TapRows(text, (length,)))

    got = drafter.draft(context, request(7))[0]

    assert_same(got, NaiveDrafter(drafter).draft(text.numpy(), 7))


@pytest.mark.parametrize("back", [1, BLOCK, REWIND_ROWS])
def test_drafts_after_a_rewind_equal_the_twins(back):
    text = random_taps(300)
    drafter = variant(layer_types=("sliding_attention",) * 2)
    context = drafter.new_context(1)
    drafter.extend(context, TapRows(text, (300,)))

    context.rewind([300 - back])

    got = drafter.draft(context, request(7))[0]
    assert_same(got, NaiveDrafter(drafter).draft(text[: 300 - back].numpy(), 7))


def test_a_mask_embedding_of_the_checkpoints_own_takes_the_place_of_the_targets():
    own = {MASK_EMBEDDING: torch.linspace(-1, 1, NANO.drafter.config.hidden_size).double()}
    drafter = Drafter(NANO.drafter.config, NANO.drafter.tensors | own, NANO.target)
    text = random_taps(9)
    context = drafter.new_context(1)
    drafter.extend(context, TapRows(text, (9,)))

    got = drafter.draft(context, request(7))[0]

    assert_same(got, NaiveDrafter(drafter).draft(text.numpy(), 7))
    assert np.abs(got.numpy() - NaiveDrafter(NANO.drafter).draft(text.numpy(), 7)).max() > 0.1


def test_the_amplitude_of_cos_and_sin_reaches_the_scores():
    """An amplitude of 1.4159 multiplies them by 2.0047, and the drafts with them."""
    text = random_taps(9)
    drafts = []
    for amplitude in (1.0, AMPLITUDE):
        drafter = variant(**LIKE_KIMI | {"rope_attention_factor": amplitude})
        context = drafter.new_context(1)
        drafter.extend(context, TapRows(text, (9,)))
        drafts.append(drafter.draft(context, request(7))[0])
        assert_same(drafts[-1], NaiveDrafter(drafter).draft(text.numpy(), 7))

    assert pytest.approx((1.4158883083359672, 2.0047397)) == (AMPLITUDE, AMPLITUDE**2)
    assert (drafts[0] - drafts[1]).abs().max() > 0.01


class TapsHeard:
    """A drafter whose taps are written down as the engine hands them over."""

    def __init__(self, drafter):
        self.drafter, self.config = drafter, drafter.config
        self.new_context, self.draft = drafter.new_context, drafter.draft
        self.taps = []

    def extend(self, context, rows):
        self.taps.append(rows.taps)
        return self.drafter.extend(context, rows)


def test_tap_i_is_the_transformers_librarys_hidden_state_i_plus_1(tmp_path):
    """The convention of DFlash's checkpoints. Source: z-lab/dflash dflash/model.py."""
    transformers = pytest.importorskip("transformers")
    tapped = {"num_target_layers": 4, "target_layer_ids": (0, 2)}
    config = dataclasses.replace(NANO.target.config, num_hidden_layers=4)
    target = random_target(config, device="cpu", dtype=torch.float64, seed=6)
    drafter = random_drafter(dataclasses.replace(NANO.drafter.config, **tapped), target, seed=6)
    save_target(target, tmp_path)
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    tokens = torch.randint(VOCAB, (90,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = theirs(tokens.unsqueeze(0), output_hidden_states=True).hidden_states
    heard = TapsHeard(drafter)

    Engine(target, heard, EngineConfig()).prefill([tokens.tolist()])

    expected = torch.cat([states[i + 1][0, :-1] for i in (0, 2)], dim=-1)
    # It routes in float32 whatever the model's dtype.
    torch.testing.assert_close(torch.cat(heard.taps), expected, rtol=1e-5, atol=1e-5)
