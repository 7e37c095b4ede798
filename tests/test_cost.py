import dataclasses
from math import prod

import pytest
import torch

from engine.cost import (
    StepShape,
    draft_cost,
    drafter_kv_bytes,
    expected_experts_hit,
    latent_bytes,
    stage_costs,
    step_bytes,
    verify_cost,
    weight_bytes,
)
from engine.drafter import drafter_shapes
from engine.observer import STAGES
from engine.presets import preset
from engine.quantized import Fp8BlockWeight, Int4GroupWeight
from engine.target import Target, target_shapes
from tests.kimi import KIMI, KIMI_DRAFTER


def test_latent_bytes_are_the_published_ones():
    assert latent_bytes(KIMI, 1, itemsize=2) == 70_272
    assert latent_bytes(KIMI, 65536, itemsize=2) == 4_605_345_792


def test_the_kimi_drafter_has_its_published_size():
    matrices = [shape for shape in drafter_shapes(KIMI_DRAFTER).values() if len(shape) == 2]

    assert sum(map(prod, matrices)) == 3_479_175_168


def test_a_drafter_reads_its_windows_and_its_full_layers():
    row = 24_576 // 6  # keys and values of one token in one layer

    assert drafter_kv_bytes(KIMI_DRAFTER, 1, itemsize=2) == 24_576
    assert drafter_kv_bytes(KIMI_DRAFTER, 65536, itemsize=2) == row * (65536 + 5 * 2047)


@pytest.mark.parametrize(
    ("rows", "hit"), [(1, 8), (4, 31), (8, 59), (16, 110), (32, 188), (64, 284), (128, 358)]
)
def test_experts_hit_are_the_published_expectation(rows, hit):
    assert expected_experts_hit(KIMI, rows) == pytest.approx(hit, abs=0.6)


def test_verify_reads_the_context_once_and_the_experts_that_are_hit():
    shape = StepShape(context_len=65536, tree_size=16)

    cost = verify_cost(KIMI, shape)

    expert_bytes = 60 * expected_experts_hit(KIMI, 16) * 3 * 2048 * 7168 * 2
    assert cost.kv_bytes == 70_272 * (65536 + 16)
    assert expert_bytes < cost.bytes - cost.kv_bytes < expert_bytes + 30e9  # the rest in bf16
    attention = 2 * 16 * 64 * 1088 * 61 * (65536 + 16)
    assert attention < cost.flops < attention + 2 * 16 * 35e9  # 32 B active parameters and a head


def test_bytes_grow_with_the_context_by_the_latent_rows_alone():
    models = preset("tiny", dtype=torch.bfloat16)

    short, long = (
        step_bytes(models.target, models.drafter, StepShape(n, 17)) for n in (1024, 4096)
    )

    drafter_rows = 3072 * 2 * 2 * 32 * 2  # the full layer only: the windows are full
    assert (
        long.bytes - short.bytes
        == long.kv_bytes - short.kv_bytes
        == 3072 * 4 * 80 * 2 + drafter_rows
    )


def test_sequences_share_weights_and_not_rows():
    one, two = (verify_cost(KIMI, StepShape(1024, 1, num_seqs=n)) for n in (1, 2))

    assert two.kv_bytes == 2 * one.kv_bytes
    assert two.flops == 2 * one.flops
    assert two.bytes < 2 * one.bytes


def kimi_as_published():
    """Kimi K2.6 without its numbers: routed experts packed in 4 bits, the rest in bf16."""

    def stored(name, shape):
        if ".mlp.experts." not in name:
            return torch.empty(shape, dtype=torch.bfloat16, device="meta")
        *rows, width = shape
        packed = torch.empty(*rows, width // 8, dtype=torch.int32, device="meta")
        return Int4GroupWeight(
            packed, torch.empty(*rows, width // 32, dtype=torch.bfloat16, device="meta")
        )

    return {name: stored(name, shape) for name, shape in target_shapes(KIMI).items()}


def test_a_packed_expert_takes_the_published_bytes():
    stored = weight_bytes(kimi_as_published())

    one = sum(size for name, size in stored.items() if ".layers.7.mlp.experts." in name) / 384
    assert one == 44_040_192 * 4.5 / 8 == pytest.approx(24.8e6, rel=2e-3)
    assert sum(stored.values()) == pytest.approx(595e9, rel=0.01)


@pytest.mark.parametrize(
    ("rows", "expert_gb"), [(1, 11.9), (4, 46), (8, 88), (16, 163), (32, 280), (64, 422)]
)
def test_verify_reads_packed_experts_as_they_are_stored(rows, expert_gb):
    stored = weight_bytes(kimi_as_published())
    plain = {name: 0 if ".mlp.experts." in name else size for name, size in stored.items()}
    shape = StepShape(context_len=1024, tree_size=rows)

    with_experts, without = (verify_cost(KIMI, shape, bytes_) for bytes_ in (stored, plain))

    assert with_experts.bytes - without.bytes == pytest.approx(expert_gb * 1e9, rel=0.01)
    assert with_experts.flops == without.flops == verify_cost(KIMI, shape).flops


def test_a_step_counts_a_quantised_target_as_it_is_stored():
    models = preset("tiny", dtype=torch.bfloat16)
    weight = models.target.tensors["model.layers.0.mlp.up_proj.weight"]  # [768, 256]
    stored = Fp8BlockWeight(weight.to(torch.float8_e4m3fn), torch.ones(6, 2), (128, 128))
    name = "model.layers.0.mlp.up_proj.weight"
    target = Target(models.target.config, models.target.tensors | {name: stored})

    plain, quantised = (
        step_bytes(t, models.drafter, StepShape(64, 9)) for t in (models.target, target)
    )

    assert plain.bytes - quantised.bytes == 768 * 256 - 12 * 4
    assert plain.flops == quantised.flops


def test_stages_cost_what_their_step_does():
    models = preset("tiny", dtype=torch.bfloat16)

    shape = StepShape(1024, 17)
    stages = stage_costs(models.target, models.drafter, shape)

    whole, logits = step_bytes(models.target, models.drafter, shape), 7 * 260 * 4
    assert tuple(stages) == STAGES
    assert sum(cost.bytes for cost in stages.values()) == whole.bytes + logits
    assert sum(cost.flops for cost in stages.values()) == whole.flops
    assert stages["build"].bytes == logits
    assert stages["verify"].kv_bytes == 4 * 80 * 2 * (1024 + 17)


def test_a_small_models_cost_is_counted_by_hand():
    models = preset("nano")
    config = dataclasses.replace(models.target.config, n_shared_experts=0, first_k_dense_replace=2)
    shape = StepShape(context_len=10, tree_size=3, itemsize=4)

    cost = verify_cost(config, shape)

    attention = 12 * 32 + 24 * 12 + 20 * 32 + 32 * 16 + 32 * 16  # q_a, q_b, kv_a, kv_b, o
    matrices = 2 * (attention + 3 * 32 * 32) + 23 * 32
    norms = 2 * (2 * 32 + 12 + 16) + 32
    kv_bytes = 2 * 20 * 13 * 4
    assert cost.kv_bytes == kv_bytes
    assert cost.bytes == 4 * (matrices + norms + 3 * 32) + kv_bytes
    assert cost.flops == 2 * 3 * matrices + 2 * 2 * 2 * (20 + 16) * 3 * 13


def test_a_small_drafters_cost_is_counted_by_hand():
    config = preset("nano").drafter.config
    shape = StepShape(context_len=10, tree_size=3, itemsize=4)

    cost = draft_cost(config, shape)

    layer = 16 * 32 + 2 * 8 * 32 + 32 * 16 + 3 * 32 * 32
    seen = 5 + 8 + 10 + 8  # window and block, context and block
    head = 23 * 32
    norms = 2 * (2 * 32 + 2 * 8) + 2 * 32
    assert cost.kv_bytes == seen * 2 * 8 * 4
    assert cost.bytes == 4 * (2 * layer + 32 * 32 + head + norms + 8 * 32) + cost.kv_bytes
    assert cost.flops == 2 * (8 * 2 * layer + 32 * 32 + 7 * head + 2 * 16 * 8 * seen)
