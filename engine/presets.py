"""Small models with random weights, the same on every device for the same seed.

`tiny` has the parts of a Kimi K2.6 with a DFlash drafter, at a size that steps in milliseconds on
one CPU core: YaRN, one dense layer, routed experts beside a shared one, a sliding and a full
drafter layer. `nano` is its toy for property tests that step thousands of times: compressed
queries, expert groups, a window shorter than a prompt.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import DrafterConfig, TargetConfig, YarnConfig
from engine.drafter import Drafter, drafter_shapes
from engine.errors import ConfigError
from engine.layers import accumulation_dtype
from engine.target import Shape, Target, target_shapes

NUM_BYTES = 256  # `tiny` speaks bytes; the special tokens follow them
END_TOKEN = 256
MASK_TOKEN = 259
SPREAD = 0.1  # of norm weights around 1 and of the router's bias around 0: neither may be idle


@dataclass(frozen=True, slots=True)
class Preset:
    """A target and its drafter."""

    target: Target
    drafter: Drafter


_YARN = YarnConfig(factor=32.0, original_max_position_embeddings=4096)

_TARGETS = {
    "tiny": TargetConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        intermediate_size=256,
        first_k_dense_replace=1,
        vocab_size=NUM_BYTES + 4,
        max_position_embeddings=131072,
        routed_scaling_factor=2.5,
        rope_theta=50000.0,
        yarn=_YARN,
    ),
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
    "tiny": DrafterConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        vocab_size=NUM_BYTES + 4,
        max_position_embeddings=131072,
        num_target_layers=3,
        block_size=8,
        target_layer_ids=(0, 1),
        mask_token_id=MASK_TOKEN,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=256,
        rope_theta=50000.0,
        yarn=_YARN,
    ),
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

NAMES = tuple(_TARGETS)


def preset(
    name: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Preset:
    """Make a preset's target and drafter with random weights of `seed`.

    Raises
    ------
    ConfigError
        There is no preset of that name.
    """
    if name not in _TARGETS:
        raise ConfigError(
            f"preset: expected one of {', '.join(NAMES)}, got {name!r} (models with random weights)"
        )
    target = random_target(_TARGETS[name], device=device, dtype=dtype, seed=seed)
    return Preset(target, random_drafter(_DRAFTERS[name], target, seed=seed))


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
