import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint_config import drafter_config, target_config
from engine.config import YarnConfig
from engine.errors import ConfigError, WeightsError
from engine.presets import preset, random_drafter, random_target
from engine.weights import load_drafter, load_target, save_drafter, save_target

DEEPSEEK_V3 = {  # what its config.json says of the architecture
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_DRAFTER = {
    "hidden_size": 7168,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "block_size": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 2048,
    "dflash_config": {"mask_token_id": 163838},
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 64,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory, edit):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.fixture
def saved(tmp_path):
    models = preset("nano", seed=4)
    save_target(models.target, tmp_path / "target")
    save_drafter(models.drafter, tmp_path / "drafter")
    return tmp_path


@pytest.mark.parametrize("name", ["tiny", "nano"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_come_back_from_disk_as_they_were(tmp_path, name, dtype):
    models = preset(name, dtype=dtype, seed=4)
    save_target(models.target, tmp_path / "target")
    save_drafter(models.drafter, tmp_path / "drafter")

    target = load_target(tmp_path / "target", dtype=dtype)
    drafter = load_drafter(tmp_path / "drafter", target)

    for read, made in ((target, models.target), (drafter, models.drafter)):
        assert read.config == made.config
        assert read.tensors.keys() == made.tensors.keys()
        for key, tensor in made.tensors.items():
            assert read.tensors[key].dtype == tensor.dtype
            assert torch.equal(read.tensors[key], tensor)
    assert torch.equal(target.logits([1, 2, 3]), models.target.logits([1, 2, 3]))


def test_experts_lie_apart_on_disk_under_their_published_names(saved):
    names = load_file(saved / "target" / "model.safetensors").keys()

    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in names
    assert not any("mlp.experts.gate_proj" in name for name in names)


def test_the_routers_bias_keeps_float32_in_a_bf16_model(saved):
    target = load_target(saved / "target", dtype=torch.bfloat16)

    assert target.tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert target.dtype == torch.bfloat16


def test_a_checkpoint_in_several_files_with_a_prediction_layer_is_read(saved):
    path = saved / "target" / "model.safetensors"
    tensors = load_file(path)
    first = dict(list(tensors.items())[:5])
    rest = {k: v for k, v in tensors.items() if k not in first}
    rest["model.layers.2.enorm.weight"] = torch.ones(3)  # behind the last layer: not the target's
    path.unlink()
    save_file(first, path.with_name("model-00001-of-00002.safetensors"))
    save_file(rest, path.with_name("model-00002-of-00002.safetensors"))

    assert torch.equal(
        load_target(saved / "target", dtype=torch.float32).embed_tokens,
        tensors["model.embed_tokens.weight"],
    )


def test_a_loaded_target_agrees_with_the_transformers_library(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(
        preset("nano").target.config,
        yarn=YarnConfig(factor=4, original_max_position_embeddings=16),
        n_routed_experts=8,
        num_hidden_layers=3,
    )
    ours = random_target(config, device="cpu", dtype=torch.float64, seed=6)
    save_target(ours, tmp_path)
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    token_ids = torch.randint(23, (40,), generator=torch.Generator().manual_seed(1))

    with torch.no_grad():
        expected = theirs(token_ids.unsqueeze(0)).logits[0]

    # It routes in float32 whatever the model's dtype.
    torch.testing.assert_close(ours.logits(token_ids).double(), expected, rtol=1e-4, atol=1e-5)


def drop_one(tensors):
    del tensors["model.norm.weight"]


def add_one(tensors):
    tensors["model.layers.0.self_attn.extra.weight"] = torch.ones(1)


def reshape_one(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.contiguous()


def quantise_one(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop_one, "1 missing, model.norm.weight first"),
        (add_one, "1 unknown, model.layers.0.self_attn.extra.weight first"),
        (reshape_one, r"lm_head.weight: expected \[23, 32\] plain numbers, got \[32, 23\]"),
        (quantise_one, "lm_head.weight: expected .* got .*float8"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(saved, edit, message):
    edit_tensors(saved / "target", edit)

    with pytest.raises(WeightsError, match=message):
        load_target(saved / "target")


def test_a_damaged_file_is_named(saved):
    path = saved / "target" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(WeightsError, match=r"model\.safetensors: expected safetensors"):
        load_target(saved / "target")


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(saved, content):
    (saved / "target" / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))

    with pytest.raises(WeightsError, match=r"config\.json: expected"):
        load_target(saved / "target")


def test_missing_files_are_named(tmp_path, saved):
    (saved / "drafter" / "model.safetensors").unlink()

    with pytest.raises(WeightsError, match=r"config\.json"):
        load_target(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="safetensors"):
        load_drafter(saved / "drafter", load_target(saved / "target"))


def test_a_quantised_checkpoint_is_refused(saved):
    edit_config(saved / "target", quantization_config={"quant_method": "fp8"})

    with pytest.raises(WeightsError, match="quantization_config"):
        load_target(saved / "target")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"kv_lora_rank": None}, "expected kv_lora_rank, got none"),
        ({"kv_lora_rank": "wide"}, "kv_lora_rank"),
    ],
)
def test_a_configuration_the_engine_does_not_implement_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        target_config(DEEPSEEK_V3 | changes)


def test_the_published_deepseek_v3_configuration_is_read():
    config = target_config(DEEPSEEK_V3)

    assert (config.latent_dim, config.n_group, config.topk_group, config.q_lora_rank) == (
        576,
        8,
        4,
        1536,
    )
    assert config.softmax_scale == pytest.approx(0.1352337789, abs=1e-10)
    assert config.yarn == YarnConfig(factor=40, original_max_position_embeddings=4096)


def test_rope_parameters_are_read_as_rope_scaling_is():
    old = {k: v for k, v in DEEPSEEK_V3.items() if k not in ("rope_theta", "rope_scaling")}
    rope = {k: v for k, v in DEEPSEEK_V3["rope_scaling"].items() if k != "type"}

    new = old | {"rope_parameters": rope | {"rope_type": "yarn", "rope_theta": 10000}}

    assert target_config(new) == target_config(DEEPSEEK_V3)


def test_yarn_without_mscale_all_dim_leaves_the_softmax_scale_alone():
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}

    config = target_config(DEEPSEEK_V3 | {"rope_scaling": rope})

    assert config.softmax_scale == pytest.approx(192**-0.5)
    assert config.yarn.rope_mscale == pytest.approx(1.3688879454)


def kimi_target():
    return dataclasses.replace(target_config(DEEPSEEK_V3), vocab_size=163840)


def test_the_kimi_drafter_configuration_is_read_with_its_default_taps():
    config = drafter_config(KIMI_DRAFTER, kimi_target())

    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert (config.horizon, config.mask_token_id, config.sliding_window) == (7, 163838, 2048)
    assert not config.is_block_causal
    assert config.rope_attention_factor == 1.0


def test_what_dflash_config_says_goes_before_the_defaults():
    dflash = {
        "mask_token_id": 5,
        "target_layer_ids": [19, 37],
        "causal": True,
        "swa_window_size": 4096,
    }
    rope = KIMI_DRAFTER["rope_scaling"] | {"attention_factor": 1.4158883083359672}

    config = drafter_config(
        KIMI_DRAFTER | {"dflash_config": dflash, "rope_scaling": rope}, kimi_target()
    )

    assert config.target_layer_ids == (19, 37)
    assert (config.mask_token_id, config.sliding_window) == (5, 4096)
    assert config.is_block_causal
    assert config.rope_attention_factor == 1.4158883083359672


def test_a_drafter_with_every_option_set_survives_the_disk(tmp_path):
    target = preset("nano").target
    config = dataclasses.replace(
        preset("nano").drafter.config,
        is_block_causal=True,
        rope_attention_factor=1.25,
        yarn=YarnConfig(factor=3, original_max_position_embeddings=9, mscale=0.5),
    )
    save_drafter(random_drafter(config, target, seed=1), tmp_path)

    assert load_drafter(tmp_path, target).config == config


def test_a_drafter_for_another_target_is_refused(saved, tmp_path):
    save_target(preset("tiny").target, tmp_path / "tiny")

    with pytest.raises((ConfigError, WeightsError)):
        load_drafter(saved / "drafter", load_target(tmp_path / "tiny"))
