import dataclasses
import math

import pytest

from engine.checkpoint_config import drafter_config, drafter_fields, target_config
from engine.errors import ConfigError
from tests.published_configs import DEEPSEEK_V3, KIMI_DRAFTER


def kimi_target():
    return dataclasses.replace(target_config(DEEPSEEK_V3), vocab_size=163840)


def test_the_kimi_drafter_configuration_is_read_with_its_default_taps():
    config = drafter_config(KIMI_DRAFTER, kimi_target())

    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert (config.horizon, config.mask_token_id, config.sliding_window) == (7, 163838, 2048)
    assert not config.is_block_causal
    assert config.rope_attention_factor == 1.4158883083359672  # of serving stacks


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


def kimi_drafter(rope=None, dflash=None, **changes):
    changes |= {"rope_scaling": KIMI_DRAFTER["rope_scaling"] | (rope or {})}
    changes |= {"dflash_config": KIMI_DRAFTER["dflash_config"] | (dflash or {})}
    return KIMI_DRAFTER | changes


@pytest.mark.parametrize(
    ("rope", "amplitude"),
    [
        ({}, 1.4158883083359672),
        ({"attention_factor": 1.0}, 1.0),
        ({"mscale": 0.5}, (0.05 * math.log(64) + 1) / (0.1 * math.log(64) + 1)),
        ({"mscale": None, "mscale_all_dim": None}, 1.4158883083359672),
        ({"mscale": 0.5, "mscale_all_dim": 0.5}, 1.4158883083359672),
        ({"rope_type": "default"}, 1.0),
    ],
)
def test_a_drafters_amplitude_is_what_its_checkpoint_says_or_that_of_serving_stacks(
    rope, amplitude
):
    config = drafter_config(kimi_drafter(rope), kimi_target())

    assert config.rope_attention_factor == pytest.approx(amplitude, rel=1e-15)
    assert drafter_config(drafter_fields(config), kimi_target()) == config


def test_parameters_go_before_what_a_drafters_checkpoint_says():
    fields = kimi_drafter({"attention_factor": 1.0}, {"causal": False})

    config = drafter_config(
        fields, kimi_target(), is_block_causal=True, rope_attention_factor=1.4158883083359672
    )

    assert config.is_block_causal
    assert config.rope_attention_factor == 1.4158883083359672


@pytest.mark.parametrize(
    ("fields", "is_causal"),
    [
        (kimi_drafter(), False),
        (kimi_drafter(is_causal=True), True),
        (kimi_drafter(dflash={"is_causal": True}), True),
        (kimi_drafter(dflash={"causal": False}, is_causal=True), False),
        (kimi_drafter(dflash={"causal": None}, is_causal=True), True),
    ],
)
def test_causality_is_read_where_checkpoints_say_it(fields, is_causal):
    assert drafter_config(fields, kimi_target()).is_block_causal == is_causal


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("fields", "kinds", "window"),
    [
        (kimi_drafter(), {SLIDING, FULL}, 2048),
        (kimi_drafter(dflash={"swa_window_size": 4096}), {SLIDING, FULL}, 4096),
        (kimi_drafter(dflash={"use_swa": False}), {FULL}, None),
        (kimi_drafter(use_sliding_window=False), {FULL}, None),
        (kimi_drafter(layer_types=None, sliding_window=None), {FULL}, None),
        (kimi_drafter(layer_types=None, dflash={"use_swa": True}), {SLIDING}, 2048),
        (kimi_drafter(layer_types=[FULL] * 6, sliding_window=None), {FULL}, None),
    ],
)
def test_windows_are_read_where_checkpoints_say_them(fields, kinds, window):
    config = drafter_config(fields, kimi_target())

    assert (set(config.layer_types), config.sliding_window) == (kinds, window)


def test_a_drafters_block_size_may_stand_in_its_dflash_config():
    fields = {k: v for k, v in KIMI_DRAFTER.items() if k != "block_size"}

    config = drafter_config(
        fields | {"dflash_config": {"mask_token_id": 9, "block_size": 16}}, kimi_target()
    )

    assert config.block_size == 16


def test_a_drafters_rope_parameters_are_read_as_its_rope_scaling_is():
    old = {k: v for k, v in KIMI_DRAFTER.items() if k not in ("rope_theta", "rope_scaling")}

    new = old | {"rope_parameters": KIMI_DRAFTER["rope_scaling"] | {"rope_theta": 50000}}

    assert drafter_config(new, kimi_target()) == drafter_config(KIMI_DRAFTER, kimi_target())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (kimi_drafter(final_logit_softcapping=30.0), "final_logit_softcapping: expected 0.0"),
        (kimi_drafter(dflash={"output_multiplier": 2.0}), "output_multiplier: expected 1.0"),
        (kimi_drafter(dflash={"attention_sink_bias": True}), "attention_sink_bias"),
        (kimi_drafter(num_hidden_layers=None), "num_hidden_layers: expected an integer in"),
        (kimi_drafter(num_hidden_layers=10**12), "num_hidden_layers: expected an integer in"),
        (kimi_drafter(dflash={"target_layer_ids": 5}), "target_layer_ids: expected a list, got 5"),
        (kimi_drafter(layer_types="full_attention"), "layer_types: expected a list"),
        (kimi_drafter() | {"dflash_config": [1]}, "dflash_config: expected an object"),
        (kimi_drafter(dflash={"mask_token_id": None}), "expected mask_token_id, got none"),
        (kimi_drafter(sliding_window=None), "sliding_window"),
    ],
)
def test_a_drafter_the_engine_does_not_implement_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        drafter_config(fields, kimi_target())
