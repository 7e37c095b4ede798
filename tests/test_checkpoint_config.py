import json
import math

import pytest

from engine.checkpoint_config import (
    FP8,
    INT4,
    Quantization,
    target_config,
    target_fields,
    target_layout,
)
from engine.config import YarnConfig
from engine.errors import ConfigError, WeightsError
from engine.json_fields import read_fields
from tests.kimi import KIMI
from tests.published_configs import (
    DEEPSEEK_V3,
    FP8_QUANTIZATION,
    INT4_QUANTIZATION,
    KIMI_TEXT,
    KIMI_WRAPPER,
)

L40 = math.log(40)


def with_rope(**changes):
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    return DEEPSEEK_V3 | {"rope_scaling": rope | changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax'"),
        ({"model_type": "deepseek_v2"}, "model_type: expected one of deepseek_v3, kimi_k2, got"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1, got 2"),
        ({"rope_interleave": None}, "rope_interleave: expected True, got None"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        (with_rope(factor="forty"), "yarn.factor: expected a number in 1..1e.18, got 'forty'"),
        (with_rope(factor=10**400), "yarn.factor: expected a number"),
        (with_rope(beta_fast=math.inf), "yarn.beta_fast: expected a number"),
        (with_rope(beta_slow=5e-324), "yarn.beta_slow: expected a number"),
        (with_rope(mscale=math.nan), "yarn.mscale: expected a number"),
        (with_rope(mscale_all_dim=-10 / L40), "growth of q and k: expected a number"),
        (with_rope(attention_factor="1"), "attention_factor: expected a number"),
        ({"rope_scaling": [1]}, r"rope_scaling: expected an object, got \[1\]"),
        ({"rope_theta": "10000"}, "rope_theta: expected a number"),
        ({"rope_theta": 1}, "rope_theta: expected a number"),
        ({"rms_norm_eps": True}, "rms_norm_eps: expected a number"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor: expected a number"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob: expected True or False, got 'false'"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: expected an integer in 1..4096"),
        ({"hidden_size": 10**30}, "hidden_size: expected an integer in 1..2147483647"),
        ({"rope_scaling": with_rope(truncate=False)["rope_scaling"]}, "rope_scaling.truncate"),
        (
            {"rope_scaling": with_rope(factor=1, attention_factor=1.5)["rope_scaling"]},
            "attention_factor: expected 1 with a factor of 1",
        ),
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


@pytest.mark.parametrize(
    ("rope", "amplitude"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * L40 + 1) / (0.1 * L40 + 1)),
        ({}, 0.1 * L40 + 1),
        ({"mscale": 0.707}, 0.1 * L40 + 1),
        ({"mscale_all_dim": 0.5}, 0.1 * L40 + 1),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.25}, 1.25),
    ],
)
def test_the_amplitude_is_the_one_transformers_takes_and_survives_the_disk(rope, amplitude):
    config = target_config(with_rope(**rope))

    assert config.yarn.rope_mscale == pytest.approx(amplitude, rel=1e-12)
    assert config.yarn.mscale_all_dim == rope.get("mscale_all_dim", 0.0)
    assert target_config(target_fields(config)) == config


def test_the_published_kimi_k26_configuration_is_read_through_its_wrapper():
    layout = target_layout(KIMI_WRAPPER)

    assert layout.config == KIMI
    assert layout.config.softmax_scale == pytest.approx(0.1446796258, abs=1e-10)
    assert layout.quantization == Quantization(INT4, (1, 32))
    assert (layout.is_wrapped, layout.is_tied, layout.num_prediction_layers) == (True, False, 0)


def test_the_published_kimi_k2_configuration_is_read():
    rope = KIMI_TEXT["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0}
    text = KIMI_TEXT | {"rope_scaling": rope, "quantization_config": FP8_QUANTIZATION}

    layout = target_layout(text | {"max_position_embeddings": 131072})

    assert layout.config.softmax_scale == pytest.approx(0.1308607999, abs=1e-10)
    assert layout.quantization == Quantization(FP8, (128, 128))
    assert not layout.is_wrapped


def test_absent_fields_have_the_published_codes_defaults():
    few = {k: v for k, v in DEEPSEEK_V3.items() if k not in ("n_group", "topk_group")}
    few = {k: v for k, v in few.items() if k not in ("q_lora_rank", "n_shared_experts")}

    config = target_config({k: v for k, v in few.items() if k != "routed_scaling_factor"})

    assert config == target_config(DEEPSEEK_V3)
    assert target_layout(few).num_prediction_layers == 1


def test_null_means_none_where_the_published_code_says_so():
    config = target_config(DEEPSEEK_V3 | {"q_lora_rank": None, "n_shared_experts": None})

    assert (config.q_lora_rank, config.n_shared_experts) == (None, 0)


@pytest.mark.parametrize(
    "quantization", [None, Quantization(FP8, (128, 64)), Quantization(INT4, (1, 64))]
)
def test_a_layout_survives_the_disk(quantization):
    fields = json.loads(json.dumps(target_fields(KIMI, quantization, ("lm_head",))))

    layout = target_layout(fields)

    assert (layout.config, layout.quantization) == (KIMI, quantization)


def in_weights(**changes):
    group = INT4_QUANTIZATION["config_groups"]["group_0"]
    weights = group["weights"] | changes
    return INT4_QUANTIZATION | {"config_groups": {"group_0": group | {"weights": weights}}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "quant_method: expected fp8 or compressed-tensors, got 'awq'"),
        ({}, "quant_method: expected fp8"),
        (["fp8"], r"quantization_config: expected an object, got \['fp8'\]"),
        (INT4_QUANTIZATION | {"config_groups": [1]}, "config_groups: expected an object"),
        (INT4_QUANTIZATION | {"config_groups": {"a": 1}}, "a: expected an object, got 1"),
        (FP8_QUANTIZATION | {"activation_scheme": "static"}, "activation_scheme: expected 'dyn"),
        (FP8_QUANTIZATION | {"weight_block_size": None}, "a block of .rows, columns., got None"),
        (FP8_QUANTIZATION | {"weight_block_size": [128]}, "a block of .rows, columns., got"),
        (INT4_QUANTIZATION | {"format": "int-quantized"}, "format: expected 'pack-quantized'"),
        (INT4_QUANTIZATION | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (INT4_QUANTIZATION | {"config_groups": {}}, "one group with weights, packed, got 0"),
        (INT4_QUANTIZATION | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (in_weights(num_bits=8), "num_bits: expected 4, got 8"),
        (in_weights(symmetric=False), "symmetric: expected True, got False"),
        (in_weights(actorder="group"), "actorder: expected None, got 'group'"),
        (in_weights(strategy="channel"), "strategy: expected 'group'"),
        (in_weights(group_size=None), "a block of .rows, columns., got .1, None"),
    ],
)
def test_a_storage_the_engine_does_not_implement_is_refused(quantization, message):
    with pytest.raises(ConfigError, match=message):
        target_layout(DEEPSEEK_V3 | {"quantization_config": quantization})


def test_another_models_wrapper_is_refused():
    with pytest.raises(ConfigError, match="model_type: expected one of kimi_k25, got 'llava'"):
        target_layout(KIMI_WRAPPER | {"model_type": "llava"})


@pytest.mark.parametrize("count", [-1, 1.5, "one", 10**12])
def test_a_number_of_prediction_layers_that_is_none_is_refused(count):
    with pytest.raises(ConfigError, match="num_nextn_predict_layers: expected an integer in 0"):
        target_layout(DEEPSEEK_V3 | {"num_nextn_predict_layers": count})


@pytest.mark.parametrize("content", ["{", "[]", "\udcff", '{"a":' * 50_000])
def test_a_file_that_holds_no_json_object_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))

    with pytest.raises(WeightsError, match=r"config\.json: expected"):
        read_fields(path)
