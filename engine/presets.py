"""Small models: a trained pair whose commits come from the text, and a random toy for properties.

`tiny` is the pair in `checkpoints/tiny`, which has the parts of a Kimi K2.6 with a DFlash drafter
and steps in milliseconds on one CPU core: YaRN, one dense layer, routed experts beside a shared
one, sliding and full drafter layers, bytes as tokens. `nano` has random weights, the same on every
device for the same seed, and steps thousands of times a minute: compressed queries, expert groups,
a window shorter than a prompt.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.config import DrafterConfig, TargetConfig
from engine.drafter import Drafter, drafter_shapes
from engine.errors import ConfigError
from engine.layers import accumulation_dtype
from engine.target import Shape, Target, target_shapes
from engine.weights import load_drafter, load_target

TINY = Path(__file__).parent / "checkpoints" / "tiny"
TEXTS = ("predictable", "code", "prose")  # held-out texts of the pair, in `checkpoints/tiny/texts`
NUM_BYTES = 256  # where bytes are the tokens; the special ones follow them
END_TOKEN = 256
MASK_TOKEN = 259
SPREAD = 0.1  # of norm weights around 1 and of the router's bias around 0: neither may be idle


@dataclass(frozen=True, slots=True)
class Preset:
    """A target and its drafter."""

    target: Target
    drafter: Drafter


_TARGETS = {
    "nano": TargetConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=16,
        intermediate_size=32,
        first_k_dense_replace=1,
        vocab_size=23,
        max_position_embeddings=4096,
        q_lora_rank=12,
        n_group=2,
        topk_group=1,
        rope_theta=50000.0,
    ),
}

_DRAFTERS = {
    "nano": DrafterConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        vocab_size=23,
        max_position_embeddings=4096,
        num_target_layers=2,
        block_size=8,
        target_layer_ids=(0,),
        mask_token_id=22,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=6,
    ),
}

NAMES = ("tiny", *_TARGETS)


def preset(
    name: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
) -> Preset:
    """Return a preset's target and drafter.

    Parameters
    ----------
    name : str
        "tiny" is trained, "nano" random.
    device, dtype
        Of the weights.
    seed : int, optional
        Of random weights, 0 if None; trained ones have none.

    Raises
    ------
    ConfigError
        There is no preset of that name, or a trained one is given a seed.
    """
    if name not in NAMES:
        raise ConfigError(
            f"preset: expected one of {', '.join(NAMES)}, got {name!r} (models that ship)"
        )
    if name in _TARGETS:
        target = random_target(_TARGETS[name], device=device, dtype=dtype, seed=seed or 0)
        return Preset(target, random_drafter(_DRAFTERS[name], target, seed=seed or 0))
    if seed is not None:
        raise ConfigError(f"seed: expected None for {name!r}, got {seed} (its weights are trained)")
    target = load_target(TINY / "target", device=device, dtype=dtype)
    return Preset(target, load_drafter(TINY / "drafter", target))


def sample_text(name: str) -> bytes:
    """Return a text that the trained pair never saw: one of `TEXTS`.

    Raises
    ------
    ConfigError
        There is no text of that name.
    """
    if name not in TEXTS:
        raise ConfigError(
            f"text: expected one of {', '.join(TEXTS)}, got {name!r} (shipped with the pair)"
        )
    return (TINY / "texts" / f"{name}.txt").read_bytes()


def random_target(
    config: TargetConfig, *, device: torch.device | str, dtype: torch.dtype, seed: int
) -> Target:
    """Make a target with random weights: the generator is the CPU's, whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    tensors = _random_tensors(target_shapes(config), generator, dtype)
    return Target(config, {name: tensor.to(device) for name, tensor in tensors.items()})


def random_drafter(config: DrafterConfig, target: Target, *, seed: int) -> Drafter:
    """Make a drafter with random weights for `target`, on its device and of its dtype."""
    generator = torch.Generator().manual_seed(seed)
    tensors = _random_tensors(drafter_shapes(config), generator, target.dtype)
    return Drafter(
        config, {name: tensor.to(target.device) for name, tensor in tensors.items()}, target
    )


def _random_tensors(
    shapes: Mapping[str, Shape], generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Draw every tensor in float32, so that all dtypes round the same weights."""
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = (values * SPREAD).to(accumulation_dtype(dtype))
        elif len(shape) == 1:
            tensors[name] = (1.0 + values * SPREAD).to(dtype)  # a norm's weight
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = values.to(dtype)
        else:
            tensors[name] = (values / math.sqrt(shape[-1])).to(dtype)
    return tensors
