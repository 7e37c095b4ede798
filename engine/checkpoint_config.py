"""Between a checkpoint's `config.json` and the frozen configurations, in both directions.

Only what changes the numbers is read; a setting the engine does not implement is refused. Where
a field is absent the published model code's default holds; null counts as absent, except where
that code gives it a meaning. The Kimi K2.5 wrapper nests its text model in `text_config`.
Source: DeepSeek-V3, Kimi-K2.5, z-lab/dflash and Qwen3 configurations; transformers'
modeling_rope_utils.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, TypeVar

from engine.config import (
    DrafterConfig,
    TargetConfig,
    YarnConfig,
    check_number,
    default_target_layer_ids,
)
from engine.errors import ConfigError
from engine.json_fields import Fields, require_fixed, require_layers, require_list, section

Config = TypeVar("Config", TargetConfig, DrafterConfig)

FP8, INT4 = "fp8", "int4"
TEXT_TYPES = ("deepseek_v3", "kimi_k2")
WRAPPER_TYPES = ("kimi_k25",)

_YARN_KEYS = tuple(field.name for field in fields(YarnConfig))
_ROPE_FIXED: dict[str, Any] = {"truncate": True, "partial_rotary_factor": 1.0}
_TARGET_FIXED: dict[str, Any] = {  # the only values the target's code has, also where absent
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_interleave": True,
    "moe_layer_freq": 1,
}
_TARGET_DEFAULTS: dict[str, Any] = {  # of the published code, where ours are others
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_DRAFTER_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False}
_DRAFTER_EXTRAS: dict[str, Any] = {  # seen in some drafters; the same without them
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "final_logit_softcapping": 0.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "logit_scale": 1.0,
    "shift_label": False,
}
_DRAFTER_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6}
_FP8_FIXED: dict[str, Any] = {"activation_scheme": "dynamic", "fmt": "e4m3"}
_INT4_FIXED: dict[str, Any] = {
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
}
_INT4_GROUP_FIXED: dict[str, Any] = {"input_activations": None, "output_activations": None}
_INT4_WEIGHT_FIXED: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "dynamic": False,
    "actorder": None,
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint stores the projections that are not plain numbers."""

    kind: str  # FP8 or INT4
    block: tuple[int, int]  # rows and columns of a weight that share a scale


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """What `config.json` says of a target and of how its tensors lie on disk."""

    config: TargetConfig
    quantization: Quantization | None
    is_wrapped: bool  # its tensors' names carry the wrapper's prefix
    is_tied: bool  # the embedding stands in for an output head that is not there
    num_prediction_layers: int  # of multi-token prediction, behind the last layer


def target_layout(config: Fields) -> TargetLayout:
    """Read a target's `config.json`; a `ConfigError` names what is missing or not implemented."""
    text = config.get("text_config")
    is_wrapped = isinstance(text, Mapping)
    if is_wrapped:
        _require_type(config, WRAPPER_TYPES)
    text = text if isinstance(text, Mapping) else config
    holder = config if config.get("quantization_config") is not None else text
    is_quantized = holder.get("quantization_config") is not None
    stored = section(holder, "quantization_config")
    is_said = text.get("num_nextn_predict_layers") is not None
    return TargetLayout(
        config=target_config(text),
        quantization=_quantization(stored) if is_quantized else None,
        is_wrapped=is_wrapped,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        num_prediction_layers=require_layers(text, "num_nextn_predict_layers") if is_said else 1,
    )


def target_config(config: Fields) -> TargetConfig:
    """Read the architecture of a DeepSeek-V3 or Kimi-K2 text model; `ConfigError` as above."""
    _require_type(config, TEXT_TYPES)
    require_fixed(config, _TARGET_FIXED)
    rope = _rope(config)
    absent = {k: v for k, v in _TARGET_DEFAULTS.items() if k not in config}
    if "n_shared_experts" in config and config["n_shared_experts"] is None:
        absent["n_shared_experts"] = 0
    known = absent | _known(TargetConfig, config) | {"yarn": _yarn(rope)}
    return _make(TargetConfig, known | _theta(rope))


def target_fields(
    config: TargetConfig, quantization: Quantization | None = None, plain: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return what `target_layout` reads back; `plain` names the linear modules left unquantised."""
    named = {k: v for k, v in asdict(config).items() if k != "yarn"}
    stored = {} if quantization is None else {"quantization_config": _stored(quantization, plain)}
    return (
        named
        | _TARGET_FIXED
        | stored
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": config.num_attention_heads,  # other readers ask for it
            "num_nextn_predict_layers": 0,
            "rope_scaling": _scaling(config),
            "tie_word_embeddings": False,
        }
    )


def drafter_config(
    config: Fields,
    target: TargetConfig,
    *,
    is_block_causal: bool | None = None,
    rope_attention_factor: float | None = None,
) -> DrafterConfig:
    """Read a DFlash configuration for `target`, whose sizes stand in where none is given.

    What `dflash_config` says goes before the top level. The two parameters go before both.
    """
    sources = (config, section(config, "dflash_config"))
    merged = {k: v for source in sources for k, v in source.items() if v is not None}
    require_fixed(merged, _DRAFTER_FIXED | _DRAFTER_EXTRAS)
    rope = _rope(config)
    sizes = {"vocab_size": target.vocab_size, "num_target_layers": target.num_hidden_layers}
    known = _DRAFTER_DEFAULTS | sizes | _known(DrafterConfig, merged)
    known["yarn"] = _literal_yarn(rope)
    known["rope_attention_factor"] = (
        _drafter_amplitude(rope) if rope_attention_factor is None else rope_attention_factor
    )
    says_causal = merged.get("causal", merged.get("is_causal"))
    known["is_block_causal"] = bool(says_causal if is_block_causal is None else is_block_causal)
    num_layers = require_layers(merged, "num_hidden_layers")
    known |= _windows(merged, num_layers)
    if "target_layer_ids" not in known:
        num_target_layers = require_layers(known, "num_target_layers")
        known["target_layer_ids"] = default_target_layer_ids(num_target_layers, num_layers)
    known["target_layer_ids"] = require_list(known, "target_layer_ids")
    return _make(DrafterConfig, known | _theta(rope))


def drafter_fields(config: DrafterConfig) -> dict[str, Any]:
    """Return what `drafter_config` reads back as `config`."""
    apart = ("yarn", "rope_attention_factor", "is_block_causal", "target_layer_ids")
    named = {k: v for k, v in asdict(config).items() if k not in (*apart, "mask_token_id")}
    rope = (_scaling(config) or {"rope_type": "default"}) | {
        "attention_factor": config.rope_attention_factor
    }
    dflash = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "causal": config.is_block_causal,
    }
    window = {"use_sliding_window": "sliding_attention" in config.layer_types}
    return named | _DRAFTER_FIXED | window | {"rope_scaling": rope, "dflash_config": dflash}


def _windows(merged: Fields, num_layers: int) -> dict[str, Any]:
    """Return the layer types and the window: `use_swa` turns both on or off where it is said."""
    window = merged.get("swa_window_size") or merged.get("sliding_window")
    use_swa = merged.get("use_swa", merged.get("use_sliding_window"))
    if use_swa is False or "layer_types" not in merged:
        kind = "sliding_attention" if merged.get("use_swa") else "full_attention"
        return {
            "layer_types": (kind,) * num_layers,
            "sliding_window": None if use_swa is False else window,
        }
    return {"layer_types": require_list(merged, "layer_types"), "sliding_window": window}


def _drafter_amplitude(rope: Fields) -> float:
    """Return the amplitude of a drafter's cos and sin: what the checkpoint says, or the default.

    With YaRN and equal `mscale` and `mscale_all_dim`, serving stacks run drafters at
    0.1 ln(factor) + 1 where transformers would have a ratio of 1; drafters are published for the
    former. It changes commit lengths only. Source: vllm-project/vllm-ascend's and
    mirage-project/mirage's handling of the Kimi drafters.
    """
    if rope.get("attention_factor") is not None:
        factor: float = rope["attention_factor"]
        return factor
    literal, yarn = _literal_yarn(rope), _yarn(rope)
    if literal is None or yarn is None:
        return 1.0
    is_equal = literal.mscale == literal.mscale_all_dim
    return _mscale(yarn.factor) if is_equal else yarn.rope_mscale


def _require_type(config: Fields, known: tuple[str, ...]) -> None:
    kind = config.get("model_type", known[0])
    if kind not in known:
        raise ConfigError(
            f"model_type: expected one of {', '.join(known)}, got {kind!r} (the architectures the "
            "engine has)"
        )


def _known(kind: type[TargetConfig | DrafterConfig], config: Fields) -> dict[str, Any]:
    """Return the entries of `config` that are fields of `kind`; null counts as absent."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in config.items() if name in names and value is not None}


def _make(kind: type[Config], known: Fields) -> Config:
    required = {f.name for f in fields(kind) if f.default is MISSING}
    if missing := sorted(required - known.keys()):
        raise ConfigError(
            f"config.json: expected {missing[0]}, got none ({kind.__name__} has no default)"
        )
    return kind(**known)


def _rope(config: Fields) -> dict[str, Any]:
    rope = section(config, "rope_parameters") or section(config, "rope_scaling")
    if (amplitude := rope.get("attention_factor")) is not None:
        check_number("rope attention_factor", amplitude, "the amplitude of cos and sin")
    return rope


def _theta(rope: Fields) -> dict[str, Any]:
    return {} if rope.get("rope_theta") is None else {"rope_theta": rope["rope_theta"]}


def _literal_yarn(rope: Fields) -> YarnConfig | None:
    """Read YaRN's parameters as they stand; where absent, `mscale` is 1, `mscale_all_dim` 0."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"rope type: expected yarn or default, got {kind!r} (not implemented)")
    require_fixed(rope, _ROPE_FIXED, "rope_scaling.")
    known = {name: rope[name] for name in _YARN_KEYS if rope.get(name) is not None}
    if missing := {"factor", "original_max_position_embeddings"} - known.keys():
        raise ConfigError(f"rope_scaling: expected {min(missing)}, got none (YaRN needs it)")
    return YarnConfig(**({"mscale_all_dim": 0.0} | known))


def _yarn(rope: Fields) -> YarnConfig | None:
    """Read YaRN's parameters; whatever else sets the amplitude becomes the `mscale` that gives it.

    The amplitude is `attention_factor` where that is given, the ratio of the two mscales where
    both are, and 0.1 ln(factor) + 1 otherwise. DeepSeek's own code takes the ratio also where
    only one of them is given, as no published checkpoint does.
    """
    yarn = _literal_yarn(rope)
    if yarn is None:
        return None
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        has_both = rope.get("mscale") and rope.get("mscale_all_dim")
        amplitude = yarn.rope_mscale if has_both else _mscale(yarn.factor)
    if math.isclose(amplitude, yarn.rope_mscale, rel_tol=1e-12):
        return yarn
    if yarn.factor == 1.0:
        raise ConfigError(
            f"rope_scaling.attention_factor: expected 1 with a factor of 1, got {amplitude!r} "
            "(nothing else is implemented)"
        )
    mscale = (amplitude * yarn.softmax_mscale - 1.0) / (0.1 * math.log(yarn.factor))
    return replace(yarn, mscale=mscale)


def _mscale(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0


def _scaling(config: TargetConfig | DrafterConfig) -> dict[str, Any] | None:
    if config.yarn is None:
        return None
    scaling = {"rope_type": "yarn", **asdict(config.yarn)}
    is_plain = _yarn(scaling) == config.yarn
    return scaling if is_plain else scaling | {"attention_factor": config.yarn.rope_mscale}


def _quantization(stored: Fields) -> Quantization:
    where = "quantization_config."
    method = stored.get("quant_method")
    if stored.get("transform_config"):
        raise ConfigError(
            f"{where}transform_config: expected none, got {stored['transform_config']!r} (rotated "
            "weights need their activations rotated, and a drafter's taps turned back)"
        )
    if method == "fp8":
        require_fixed(stored, _FP8_FIXED, where)
        return Quantization(FP8, _block(stored.get("weight_block_size")))
    if method != "compressed-tensors":
        raise ConfigError(
            f"{where}quant_method: expected fp8 or compressed-tensors, got {method!r} (no other "
            "storage is implemented)"
        )
    require_fixed(stored, _INT4_FIXED, where)
    groups = section(stored, "config_groups")
    group = section(groups, next(iter(groups))) if len(groups) == 1 else {}
    weights = section(group, "weights")
    if not weights or stored.get("format") is None:
        raise ConfigError(
            f"{where}config_groups: expected one group with weights, packed, got {len(groups)} "
            "groups (one storage for all quantised weights)"
        )
    require_fixed(group, _INT4_GROUP_FIXED, f"{where}config_groups.")
    require_fixed(weights, _INT4_WEIGHT_FIXED, f"{where}weights.")
    return Quantization(INT4, _block([1, weights.get("group_size")]))


def _block(sizes: object) -> tuple[int, int]:
    match sizes:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(
        f"quantization_config: expected a block of [rows, columns], got {sizes!r} (which weights "
        "share a scale)"
    )


def _stored(quantization: Quantization, plain: tuple[str, ...]) -> dict[str, Any]:
    if quantization.kind == FP8:
        return _FP8_FIXED | {
            "quant_method": "fp8",
            "weight_block_size": list(quantization.block),
            "modules_to_not_convert": list(plain),
        }
    weights = _INT4_WEIGHT_FIXED | {"group_size": quantization.block[1]}
    group = _INT4_GROUP_FIXED | {"targets": ["Linear"], "weights": weights}
    return _INT4_FIXED | {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": list(plain),
    }
