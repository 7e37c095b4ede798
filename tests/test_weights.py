import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import YarnConfig
from engine.errors import ConfigError, WeightsError
from engine.presets import preset, random_drafter
from engine.weights import load_drafter, load_target, save_drafter, save_target


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
    models = preset(name, dtype=dtype)
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
    edit_config(saved / "target", num_nextn_predict_layers=1)
    path.unlink()
    save_file(first, path.with_name("model-00001-of-00002.safetensors"))
    save_file(rest, path.with_name("model-00002-of-00002.safetensors"))

    assert torch.equal(
        load_target(saved / "target", dtype=torch.float32).embed_tokens,
        tensors["model.embed_tokens.weight"],
    )


def shard(directory, num_files=3):
    """Split a checkpoint as large ones are: several files and an index of what is in which."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    weight_map = {}
    for number in range(num_files):
        part = dict(list(tensors.items())[number::num_files])
        name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory, weight_map):
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_sharded_checkpoint_is_read_as_its_index_says(saved):
    whole = load_target(saved / "target")
    shard(saved / "target")
    other = saved / "target" / "consolidated.safetensors"
    save_file({"lm_head.weight": torch.zeros(1)}, other)  # no file of the index

    target = load_target(saved / "target")

    assert all(torch.equal(target.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_a_missing_shard_is_named_once(saved):
    shard(saved / "target")
    (saved / "target" / "model-00002-of-00003.safetensors").unlink()

    with pytest.raises(
        WeightsError, match=r"the 3 files of .*, got 1 missing, model-00002-of-00003.safetensors"
    ):
        load_target(saved / "target")


def test_a_tensor_its_index_puts_into_a_file_that_lacks_it_is_missing(saved):
    shard(saved / "target")
    path = saved / "target" / "model-00001-of-00003.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({k: v for k, v in tensors.items() if k != name}, path)

    with pytest.raises(WeightsError, match=f"1 missing, {name} first"):
        load_target(saved / "target")


@pytest.mark.parametrize("has_index", [True, False])
def test_a_tensor_in_two_files_is_refused(saved, has_index):
    weight_map = shard(saved / "target")
    name, first = next(iter(weight_map.items()))
    second = saved / "target" / "model-00003-of-00003.safetensors"
    save_file(load_file(second) | {name: torch.zeros(3)}, second)
    if not has_index:
        (saved / "target" / "model.safetensors.index.json").unlink()

    with pytest.raises(WeightsError, match=f"{name} once, got it in {first} and {second.name}"):
        load_target(saved / "target")


@pytest.mark.parametrize(
    "weight_map", [None, {}, {"a": 3}, {"a": ["b"]}, {"a": "../target/model.safetensors"}, ["a"]]
)
def test_an_index_without_files_beside_it_is_refused(saved, weight_map):
    write_index(saved / "target", weight_map)

    with pytest.raises(WeightsError, match=r"index\.json: expected a weight_map to files beside"):
        load_target(saved / "target")


def test_a_shard_whose_name_no_file_can_have_is_missing(saved):
    write_index(saved / "target", {"a": "x" * 5000})

    with pytest.raises(WeightsError, match="got 1 missing, xxx"):
        load_target(saved / "target")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("hidden_size", r"model.embed_tokens.weight: expected \[23, 2147483647\]"),
        ("n_routed_experts", "expected .* of 2147483646 experts, got .* tensors in all"),
        ("moe_intermediate_size", r"expected \[2147483647, 32\]"),
    ],
)
def test_room_is_made_for_what_is_stored_and_not_for_what_is_said(saved, field, message):
    edit_config(saved / "target", **{field: 2**31 - 2 if field.startswith("n_") else 2**31 - 1})

    with pytest.raises(WeightsError, match=message):
        load_target(saved / "target")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, "float32"])
def test_a_target_of_no_plain_numbers_is_refused(saved, dtype):
    with pytest.raises(ConfigError, match="dtype: expected one of float64, float32"):
        load_target(saved / "target", dtype=dtype)


def wrap(directory, **extra):
    """Dress a checkpoint as the published Kimi K2.5 and K2.6 are."""
    path = directory / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors | extra, path)
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    wrapper = {"model_type": "kimi_k25", "text_config": text, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(wrapper))


def test_the_wrappers_text_model_is_read_and_its_eyes_are_not(saved):
    plain = load_target(saved / "target")
    eyes = {
        "vision_tower.patch_embed.proj.weight": torch.ones(2),
        "mm_projector.proj.0.bias": torch.ones(2),
    }
    wrap(saved / "target", **eyes)

    target = load_target(saved / "target")

    assert target.config == plain.config
    assert all(torch.equal(target.tensors[name], plain.tensors[name]) for name in plain.tensors)


def test_what_a_wrapper_holds_beside_text_and_vision_is_refused(saved):
    wrap(saved / "target", **{"audio_tower.proj.weight": torch.ones(2)})

    with pytest.raises(WeightsError, match=r"1 unknown, audio_tower.proj.weight first"):
        load_target(saved / "target")


def test_a_wrappers_names_are_unknown_outside_a_wrapper(saved):
    edit_tensors(
        saved / "target", lambda tensors: tensors.update({"vision_tower.a": torch.ones(2)})
    )

    with pytest.raises(WeightsError, match=r"1 unknown, vision_tower.a first"):
        load_target(saved / "target")


def test_layers_that_neither_target_nor_prediction_needs_are_refused(saved):
    edit_config(saved / "target", num_nextn_predict_layers=1)
    edit_tensors(
        saved / "target",
        lambda tensors: tensors.update({"model.layers.3.enorm.weight": torch.ones(3)}),
    )

    with pytest.raises(WeightsError, match=r"1 unknown, model.layers.3.enorm.weight first"):
        load_target(saved / "target")


def test_stored_frequencies_are_derived_and_ignored(saved):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(saved / "target", lambda tensors: tensors.update({name: torch.ones(2)}))

    assert name not in load_target(saved / "target").tensors


def test_a_head_that_is_not_there_is_the_embedding_only_if_the_configuration_ties_them(saved):
    edit_tensors(saved / "target", lambda tensors: tensors.pop("lm_head.weight"))

    with pytest.raises(WeightsError, match=r"1 missing, lm_head.weight first"):
        load_target(saved / "target")
    edit_config(saved / "target", tie_word_embeddings=True)
    target = load_target(saved / "target")

    assert torch.equal(target.lm_head, target.embed_tokens)


def test_saving_leaves_no_file_of_an_earlier_checkpoint(saved):
    shard(saved / "target")

    save_target(load_target(saved / "target"), saved / "target")

    assert {path.name for path in (saved / "target").iterdir()} == {
        "config.json",
        "model.safetensors",
    }


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


def test_missing_files_are_named(tmp_path, saved):
    (saved / "drafter" / "model.safetensors").unlink()

    with pytest.raises(WeightsError, match=r"config\.json"):
        load_target(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="safetensors"):
        load_drafter(saved / "drafter", load_target(saved / "target"))


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


def test_a_quantised_drafter_is_refused(saved):
    edit_config(saved / "drafter", quantization_config={"quant_method": "fp8"})

    with pytest.raises(WeightsError, match="drafters are not quantised"):
        load_drafter(saved / "drafter", load_target(saved / "target"))


def test_a_drafter_takes_its_callers_word_before_its_checkpoints(saved):
    target = load_target(saved / "target")

    drafter = load_drafter(
        saved / "drafter", target, is_block_causal=True, rope_attention_factor=1.5
    )

    assert drafter.config.is_block_causal
    assert drafter.config.rope_attention_factor == 1.5
    assert not load_drafter(saved / "drafter", target).config.is_block_causal
