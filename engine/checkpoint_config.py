"""Between a checkpoint's `config.json` and the frozen configurations, in both directions.

Only what changes the numbers is read; a setting the engine does not implement is refused. Where
a field is absent the published model code's default holds, which for YaRN's `mscale_all_dim` is
none at all. Source: DeepSeek-V3 and z-lab/dflash configurations.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, TypeVar

from engine.config import DrafterConfig, TargetConfig, YarnConfig, default_target_layer_ids
from engine.errors import ConfigError

Fields = Mapping[str, Any]
Config = TypeVar("Config", TargetConfig, DrafterConfig)

_YARN_KEYS = tuple(field.name for field in fields(YarnConfig))
_TARGET_FIXED: dict[str, Any] = {  # the only values the target's code has, also where absent
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_interleave": True,
}
_DRAFTER_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False}


def target_config(config: Fields) -> TargetConfig:
    """Read a DeepSeek-V3 configuration; a `ConfigError` names what is missing or not there."""
    _require_fixed(config, _TARGET_FIXED)
    rope = _rope(config)
    known = _known(TargetConfig, config) | {"yarn": _yarn(rope)}
    return _make(TargetConfig, known | _theta(rope))


def target_fields(config: TargetConfig) -> dict[str, Any]:
    """Return what `target_config` reads back as `config`."""
    named = {k: v for k, v in asdict(config).items() if k != "yarn"}
    return (
        named
        | _TARGET_FIXED
        | {
            "model_type": "deepseek_v3",
            "num_key_value_heads": config.num_attention_heads,  # other readers ask for it
            "rope_scaling": _scaling(config),
        }
    )


def drafter_config(config: Fields, target: TargetConfig) -> DrafterConfig:
    """Read a DFlash configuration for `target`, whose sizes stand in where none is given."""
    _require_fixed(config, _DRAFTER_FIXED)
    rope, dflash = _rope(config), dict(config.get("dflash_config") or {})
    known: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_hidden_layers,
    }
    known |= _known(DrafterConfig, config) | _known(DrafterConfig, dflash)
    yarn = _yarn(rope)
    known["yarn"] = yarn
    known["rope_attention_factor"] = rope.get(
        "attention_factor", 1.0 if yarn is None else yarn.rope_mscale
    )
    known["is_block_causal"] = dflash.get("causal", False)
    if "swa_window_size" in dflash:
        known["sliding_window"] = dflash["swa_window_size"]
    num_layers = known.get("num_hidden_layers", 0)
    known.setdefault("layer_types", ["full_attention"] * num_layers)
    if "target_layer_ids" not in known:
        known["target_layer_ids"] = default_target_layer_ids(known["num_target_layers"], num_layers)
    for name in ("target_layer_ids", "layer_types"):
        known[name] = tuple(known[name])
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
    return named | _DRAFTER_FIXED | {"rope_scaling": rope, "dflash_config": dflash}


def _require_fixed(config: Fields, fixed: Fields) -> None:
    for name, wanted in fixed.items():
        if config.get(name, wanted) != wanted:
            raise ConfigError(
                f"{name}: expected {wanted!r}, got {config[name]!r} (nothing else is implemented)"
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
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _theta(rope: Fields) -> dict[str, Any]:
    return {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}


def _yarn(rope: Fields) -> YarnConfig | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"rope type: expected yarn or default, got {kind!r} (not implemented)")
    known = {name: rope[name] for name in _YARN_KEYS if rope.get(name) is not None}
    if missing := {"factor", "original_max_position_embeddings"} - known.keys():
        raise ConfigError(f"rope_scaling: expected {min(missing)}, got none (YaRN needs it)")
    return YarnConfig(**({"mscale_all_dim": 0.0} | known))


def _scaling(config: TargetConfig | DrafterConfig) -> dict[str, Any] | None:
    return None if config.yarn is None else {"rope_type": "yarn", **asdict(config.yarn)}
