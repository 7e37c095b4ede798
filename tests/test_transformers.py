"""Checkpoints that transformers itself saves load unchanged and give its logits."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import CompressedTensorsConfig, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.kimi_k25 import Kimi_K25Config
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration
from transformers.utils import logging

from engine.config import YarnConfig
from engine.presets import preset, random_target
from engine.weights import load_target, save_target
from tests.published_configs import INT4_QUANTIZATION
from tests.quantised_files import int4_parts, requantise

logging.set_verbosity_error()
logging.disable_progress_bar()

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "intermediate_size": 24,
    "first_k_dense_replace": 1,
    "vocab_size": 23,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}


def yarn(**changes):
    return {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
        | changes
    }


VARIANTS = {
    "compressed queries and groups": {},
    "plain queries": {"q_lora_rank": None},
    "no groups": {"n_group": 1, "topk_group": 1},
    "all groups": {"topk_group": 4},
    "no dense layer": {"first_k_dense_replace": 0},
    "two dense layers": {"first_k_dense_replace": 2},
    "dense layers only": {"first_k_dense_replace": 3},
    "two shared experts": {"n_shared_experts": 2},
    "no shared expert": {"n_shared_experts": 0},
    "weights not renormalised": {"norm_topk_prob": False},
    "a large eps": {"rms_norm_eps": 1e-2},
    "yarn with equal mscales": yarn(mscale=1.0, mscale_all_dim=1.0),
    "yarn with other mscales": yarn(mscale=0.707, mscale_all_dim=1.3),
    "yarn with no mscale": yarn(),
    "yarn with one mscale": yarn(mscale=0.707),
    "yarn with the other mscale": yarn(mscale_all_dim=0.5),
    "yarn with its own amplitude": yarn(mscale=1.0, mscale_all_dim=1.0, attention_factor=1.25),
    "yarn with other betas": yarn(beta_fast=4.0, beta_slow=0.5),
}
WAYS = {
    "one file": {},
    "shards": {"max_shard_size": "20KB"},
    "fused experts": {"save_original_format": False},
}
TOKEN_IDS = torch.randint(20, (150,), generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


def randomise(model):
    """Weights of a size that lets every part of the model matter; norms and biases too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name or not tensor.numel():
                continue
            values = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1 + 0.1 * values)
            else:
                tensor.copy_(0.1 * values if "bias" in name else values / tensor.shape[-1] ** 0.5)
    return model.eval()


def their_logits(model):
    with torch.no_grad():
        return model(input_ids=TOKEN_IDS.unsqueeze(0)).logits[0]


def assert_same(ours, theirs):
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_saved_deepseek_model_gives_its_logits(tmp_path, changes):
    theirs = randomise(DeepseekV3ForCausalLM(DeepseekV3Config(**(SIZES | changes))))
    theirs.save_pretrained(tmp_path)

    ours = load_target(tmp_path, dtype=torch.float32)

    assert_same(ours.logits(TOKEN_IDS), their_logits(theirs))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
def test_a_saved_kimi_wrapper_gives_its_text_models_logits(tmp_path, way, is_tied):
    text = DeepseekV3Config(**(SIZES | yarn(mscale=1.0, mscale_all_dim=1.0)))
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
    config = Kimi_K25Config(
        text_config=text.to_dict(),
        vision_config=vision,
        projection_hidden_size=16,
        image_token_id=21,
        video_token_id=22,
        tie_word_embeddings=is_tied,
    )
    theirs = randomise(Kimi_K25ForConditionalGeneration(config))
    theirs.save_pretrained(tmp_path, **way)

    ours = load_target(tmp_path, dtype=torch.float32)

    assert_same(ours.logits(TOKEN_IDS), their_logits(theirs))
    assert torch.equal(ours.lm_head, ours.embed_tokens) == is_tied


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_every_way_of_saving_gives_the_same_weights(tmp_path, way):
    theirs = randomise(DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)))
    theirs.save_pretrained(tmp_path / "plain")
    theirs.save_pretrained(tmp_path / "way", **way)

    read, plain = (load_target(tmp_path / name, dtype=torch.float32) for name in ("way", "plain"))

    assert read.config == plain.config
    assert read.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(read.tensors[name], plain.tensors[name]) for name in read.tensors)


def test_shards_really_are_several_files_and_fused_experts_one_tensor(tmp_path):
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES))

    theirs.save_pretrained(tmp_path / "shards", **WAYS["shards"])
    theirs.save_pretrained(tmp_path / "fused", **WAYS["fused experts"])

    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    names = load_file(tmp_path / "fused" / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names


@pytest.mark.parametrize(
    "rope",
    [
        None,
        YarnConfig(factor=4, original_max_position_embeddings=64),
        YarnConfig(factor=4, original_max_position_embeddings=64, mscale=0.6, mscale_all_dim=0.0),
    ],
    ids=["no yarn", "yarn", "an amplitude that mscale alone gives"],
)
def test_a_target_saved_here_gives_its_logits_there(tmp_path, rope):
    config = dataclasses.replace(preset("nano").target.config, yarn=rope, num_hidden_layers=3)
    ours = random_target(config, device="cpu", dtype=torch.float32, seed=6)
    save_target(ours, tmp_path)

    theirs = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    assert_same(ours.logits(TOKEN_IDS), their_logits(theirs))
    assert load_target(tmp_path).config == config


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("is_resaved", [False, True], ids=["as made", "saved here"])
def test_an_int4_checkpoint_gives_the_logits_it_gives_there(tmp_path, is_resaved):
    config = dataclasses.replace(
        preset("nano").target.config, hidden_size=64, moe_intermediate_size=32
    )
    made = random_target(config, device="cpu", dtype=torch.bfloat16, seed=1)
    save_target(made, tmp_path)
    requantise(
        tmp_path,
        lambda name, w: int4_parts(w) if ".mlp.experts." in name else None,
        INT4_QUANTIZATION,
    )
    ours = load_target(tmp_path, dtype=torch.float32)
    if is_resaved:
        save_target(ours, tmp_path)

    theirs = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )

    # It leaves dequantised experts in bf16; the products here are float32's.
    assert_same(ours.logits(TOKEN_IDS), their_logits(theirs.float()))


def test_what_transformers_writes_is_what_is_read_here(tmp_path):
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES))
    theirs.save_pretrained(tmp_path)

    fields = json.loads((tmp_path / "config.json").read_text())

    assert "rope_scaling" not in fields  # theta and scaling lie in one record
    assert fields["rope_parameters"]["rope_theta"] == load_target(tmp_path).config.rope_theta
    assert fields["head_dim"] == SIZES["qk_rope_head_dim"]  # not a head's width: nothing reads it
