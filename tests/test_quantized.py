"""Quantised weights are the numbers their packages give, and stay as they are stored."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight

from engine.errors import WeightsError
from engine.layers import linear
from engine.presets import preset, random_target
from engine.quantized import Fp8BlockWeight, Int4GroupWeight, dense, stored_parts
from engine.target import Target
from engine.weights import load_target, save_target
from tests.published_configs import FP8_QUANTIZATION, INT4_QUANTIZATION
from tests.quantised_files import (
    fp8_parts,
    int4_dequantised,
    int4_parts,
    requantise,
)

BLOCK = (4, 8)
FP8_SMALL = FP8_QUANTIZATION | {"weight_block_size": list(BLOCK)}
CONFIG = dataclasses.replace(
    preset("nano").target.config, hidden_size=64, moe_intermediate_size=32, q_lora_rank=16
)
TOKEN_IDS = torch.arange(20) % CONFIG.vocab_size


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int4_experts(num_experts, out, width):
    parts = [int4_parts(normal(out, width, seed=expert)) for expert in range(num_experts)]
    weight = Int4GroupWeight(
        torch.stack([part["_packed"] for part in parts]),
        torch.stack([part["_scale"] for part in parts]),
    )
    return weight, parts


@pytest.fixture
def plain_dir(tmp_path):
    target = random_target(CONFIG, device="cpu", dtype=torch.bfloat16, seed=1)
    save_target(target, tmp_path)
    return tmp_path


def as_int4(name, weight):
    return int4_parts(weight) if ".mlp.experts." in name else None


def as_fp8(name, weight):
    return fp8_parts(weight.float(), BLOCK) if "_proj" in name else None


STORAGES = {"int4": (as_int4, INT4_QUANTIZATION), "fp8": (as_fp8, FP8_SMALL)}


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_int4_is_bit_for_bit_what_compressed_tensors_gives(scale_dtype, dtype):
    parts = int4_parts(normal(24, 96))
    parts["_scale"] = parts["_scale"].to(scale_dtype) * 1.2345  # no rounder in any dtype
    weight = Int4GroupWeight(parts["_packed"], parts["_scale"])

    got = weight.dequantize(dtype)

    assert weight.shape == (24, 96)
    assert torch.equal(got, int4_dequantised(parts).to(dtype))


def test_every_4_bit_value_is_unpacked_in_its_place():
    values = torch.arange(-8, 8).repeat(2, 4)  # [2, 64]
    shifted = (values + 8).view(2, 8, 8)
    words = (shifted << torch.arange(0, 32, 4)).sum(-1)
    packed = (words - ((words >> 31) << 32)).to(torch.int32)  # the last value holds the sign

    got = Int4GroupWeight(packed, torch.ones(2, 2)).dequantize(torch.float32)

    assert torch.equal(got, values.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_is_bit_for_bit_what_transformers_gives(dtype, scale_fmt):
    parts = fp8_parts(normal(3, 16, 24), BLOCK, scale_fmt)
    weight = Fp8BlockWeight(parts[""], parts["_scale_inv"].float(), BLOCK)

    got = weight.dequantize(dtype)

    theirs = Fp8Dequantize(SimpleNamespace())
    assert torch.equal(got, theirs._dequantize_one(parts[""], parts["_scale_inv"], dtype))


@pytest.mark.parametrize("shape", [(576, 256), (130, 129), (5, 3), (2, 130, 200)])
def test_blocks_at_the_edges_are_cut_off(shape):
    values = normal(*shape).to(torch.float8_e4m3fn)
    scales = normal(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), seed=1)

    got = Fp8BlockWeight(values, scales, (128, 128)).dequantize(torch.float32)

    assert torch.equal(got, _dequantize_fp8_weight(values, scales, [128, 128], torch.float32))


def test_an_expert_of_a_stack_is_the_weight_it_was():
    stack, parts = int4_experts(3, 16, 64)
    values, scales = normal(3, 8, 16).to(torch.float8_e4m3fn), normal(3, 2, 2, seed=1)
    fp8 = Fp8BlockWeight(values, scales, BLOCK)

    for expert in range(3):
        assert torch.equal(
            stack[expert].dequantize(torch.bfloat16), int4_dequantised(parts[expert])
        )
        assert torch.equal(
            fp8[expert].dequantize(torch.float32), fp8.dequantize(torch.float32)[expert]
        )


def test_a_weight_takes_the_bytes_it_is_stored_in():
    int4, _ = int4_experts(2, 16, 64)
    fp8 = Fp8BlockWeight(
        torch.zeros(256, 384).to(torch.float8_e4m3fn), torch.ones(2, 3), (128, 128)
    )

    assert int4.nbytes == 2 * 16 * 64 * 4.5 / 8
    assert fp8.nbytes == 256 * 384 + 2 * 3 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_product_is_that_of_the_dequantised_weight(dtype):
    weight, _ = int4_experts(1, 16, 64)
    x = normal(5, 64).to(dtype)

    got = linear(x, weight[0])

    assert got.dtype == dtype
    assert torch.equal(got, torch.nn.functional.linear(x, weight[0].dequantize(dtype)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fp8BlockWeight(torch.zeros(8, 8), torch.ones(2, 1), BLOCK),
        lambda: Fp8BlockWeight(torch.zeros(8, 8).to(torch.float8_e4m3fn), torch.ones(2, 2), BLOCK),
        lambda: Int4GroupWeight(torch.zeros(4, 8), torch.ones(4, 2)),
        lambda: Int4GroupWeight(torch.zeros(4, 8, dtype=torch.int32), torch.ones(3, 2)),
        lambda: Int4GroupWeight(torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 3)),
        lambda: Int4GroupWeight(torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, 2).int()),
    ],
)
def test_values_and_scales_that_do_not_belong_together_are_refused(make):
    with pytest.raises(WeightsError, match="expected"):
        make()


@pytest.mark.parametrize(("quantise", "config"), STORAGES.values(), ids=STORAGES.keys())
def test_a_quantised_checkpoint_stays_quantised_and_gives_its_plain_twins_logits(
    plain_dir, quantise, config
):
    requantise(plain_dir, quantise, config)

    target = load_target(plain_dir, dtype=torch.float32)

    kinds = {name: type(weight) for name, weight in target.tensors.items()}
    projections = {name for name in kinds if "_proj" in name}
    expected = {
        name for name in projections if config is not INT4_QUANTIZATION or ".experts." in name
    }
    assert {name for name, kind in kinds.items() if kind is not torch.Tensor} == expected
    twin = Target(CONFIG, {k: dense(w, torch.float32) for k, w in target.tensors.items()})
    # Plain matrices that multiply the same rows are one product, whose sums have another order.
    got, expected = target.logits(TOKEN_IDS), twin.logits(TOKEN_IDS)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("quantise", "config"), STORAGES.values(), ids=STORAGES.keys())
def test_a_quantised_target_is_saved_as_it_was_read(plain_dir, tmp_path, quantise, config):
    requantise(plain_dir, quantise, config)
    read = load_file(plain_dir / "model.safetensors")

    save_target(load_target(plain_dir, dtype=torch.bfloat16), tmp_path / "saved")

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == read.keys()
    assert all(saved[name].dtype == read[name].dtype for name in saved)
    as_bytes = {name: tensor.view(torch.uint8) for name, tensor in saved.items()}
    assert all(torch.equal(as_bytes[name], read[name].view(torch.uint8)) for name in saved)
    again = load_target(tmp_path / "saved", dtype=torch.bfloat16)
    assert torch.equal(
        again.logits(TOKEN_IDS), load_target(plain_dir, dtype=torch.bfloat16).logits(TOKEN_IDS)
    )


def test_scales_stored_as_powers_of_two_are_read(plain_dir):
    def as_power(name, weight):
        return fp8_parts(weight.float(), BLOCK, "ue8m0") if "_proj" in name else None

    requantise(plain_dir, as_power, FP8_SMALL | {"scale_fmt": "ue8m0"})

    weight = load_target(plain_dir).tensors["model.layers.0.self_attn.o_proj.weight"]

    exponents = weight.scale_inv.log2()
    assert torch.equal(exponents, exponents.round())


def test_two_kinds_of_quantised_weights_are_not_saved(plain_dir, tmp_path):
    requantise(plain_dir, as_fp8, FP8_SMALL)
    target = load_target(plain_dir)
    target.tensors["model.layers.1.mlp.experts.gate_proj.weight"], _ = int4_experts(4, 32, 64)

    with pytest.raises(WeightsError, match="expected one kind of quantised weights, got 2"):
        save_target(target, tmp_path / "saved")


def test_only_projections_may_be_quantised(plain_dir):
    target = load_target(plain_dir)
    head, _ = int4_experts(1, CONFIG.vocab_size, 64)

    with pytest.raises(WeightsError, match=r"lm_head.weight: expected plain numbers"):
        Target(CONFIG, target.tensors | {"lm_head.weight": head[0]})


def edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({f"{EXPERT}_shape": torch.tensor([32, 65])}), "weight_shape: expected"),
        (lambda t: t.update({f"{EXPERT}_packed": t[f"{EXPERT}_packed"].float()}), "int32"),
        (lambda t: t.update({f"{EXPERT}_scale": t[f"{EXPERT}_scale"].float()}), "bfloat16"),
        (lambda t: t.update({f"{EXPERT}_scale": t[f"{EXPERT}_scale"][:, :1].clone()}), "up_proj"),
        (lambda t: t.pop(f"{EXPERT}_scale"), "1 missing, .*experts.2.up_proj.weight_scale"),
        (lambda t: t.update({f"{EXPERT}_zero_point": torch.zeros(1)}), "1 unknown, .*zero_point"),
        (lambda t: t.update({"lm_head.weight_packed": torch.zeros(1)}), "unknown, lm_head"),
    ],
)
def test_a_packed_tensor_that_does_not_fit_is_refused_by_name(plain_dir, change, message):
    requantise(plain_dir, as_int4, INT4_QUANTIZATION)
    edit(plain_dir, change)

    with pytest.raises(WeightsError, match=message):
        load_target(plain_dir)


def test_quantised_tensors_need_a_configuration_that_says_how(plain_dir):
    requantise(plain_dir, as_int4, INT4_QUANTIZATION)
    fields = json.loads((plain_dir / "config.json").read_text())
    del fields["quantization_config"]
    (plain_dir / "config.json").write_text(json.dumps(fields))

    with pytest.raises(WeightsError, match="missing"):
        load_target(plain_dir)


def test_an_fp8_tensor_without_its_scales_is_refused(plain_dir):
    requantise(plain_dir, as_fp8, FP8_SMALL)
    name = "model.layers.0.self_attn.o_proj.weight"
    edit(plain_dir, lambda tensors: tensors.pop(f"{name}_scale_inv"))

    with pytest.raises(WeightsError, match=f"{name}: expected .* plain numbers, got .*float8"):
        load_target(plain_dir)


def test_inputs_that_no_group_divides_are_refused():
    quantization = SimpleNamespace(kind="int4", block=(1, 32))

    with pytest.raises(WeightsError, match="divides 80 inputs, got 32"):
        stored_parts((16, 80), quantization, torch.bfloat16)
