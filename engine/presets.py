"""Models found by name: a trained pair, a random toy, and what one rank of a served model sees.

`tiny` is the pair in `checkpoints/tiny`, which has the parts of a Kimi K2.6 with a DFlash drafter
and steps in milliseconds on one CPU core: YaRN, one dense layer, routed experts beside a shared
one, sliding and full drafter layers, bytes as tokens. `nano` has random weights, the same on every
device for the same seed, and steps thousands of times a minute: compressed queries, expert groups,
a window shorter than a prompt.

`kimi-k2.6-tp8-rank` has the shapes of Kimi K2.6 and its drafter on one of eight tensor-parallel
ranks, for time on a GPU of 141 GB: `rank_of` says which are divided. Its weights are random, its
experts packed as published. It is a rank alone: the sums over ranks that would follow each
attention output, MLP and logit are left out, so its step is a step without collectives, and its
tokens mean nothing. `kimi-k2.6-tp8-rank-4-layers` has the dense layer and three more of them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint_config import INT4, Quantization
from engine.config import DrafterConfig, TargetConfig, YarnConfig
from engine.drafter import Drafter
from engine.errors import ConfigError
from engine.random_weights import random_drafter, random_packed_target, random_target
from engine.target import Target
from engine.weights import load_drafter, load_target

TINY = Path(__file__).parent / "checkpoints" / "tiny"
TEXTS = ("predictable", "code", "prose")  # held-out texts of the pair, in `checkpoints/tiny/texts`
NUM_BYTES = 256  # where bytes are the tokens; the special ones follow them
END_TOKEN = 256
MASK_TOKEN = 259


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

_YARN = YarnConfig(factor=64, original_max_position_embeddings=4096)

# Source: the published configuration of Kimi K2.6, as TokenSpeed's and vLLM's tests have it.
KIMI = TargetConfig(
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=64,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    moe_intermediate_size=2048,
    intermediate_size=18432,
    first_k_dense_replace=1,
    vocab_size=163840,
    max_position_embeddings=262144,
    q_lora_rank=1536,
    routed_scaling_factor=2.827,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    yarn=_YARN,
)
KIMI_EXPERTS = Quantization(INT4, (1, 32))

# Source: mirage-project/mirage tests/runtime_python/blackwell/sm100_dflash README. Its amplitude is
# that of serving stacks, 0.1 * ln(64) + 1.
KIMI_DRAFTER = DrafterConfig(
    hidden_size=7168,
    num_hidden_layers=6,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=18432,
    vocab_size=163840,
    max_position_embeddings=262144,
    num_target_layers=61,
    block_size=8,
    target_layer_ids=(1, 12, 24, 35, 47, 58),
    mask_token_id=163838,
    layer_types=("sliding_attention",) * 5 + ("full_attention",),
    sliding_window=2048,
    rope_theta=50000.0,
    rope_attention_factor=_YARN.softmax_mscale,
    yarn=_YARN,
)


@dataclass(frozen=True, slots=True)
class Rank:
    """The configurations that one rank of a tensor-parallel pair has."""

    target: TargetConfig
    drafter: DrafterConfig

    def cut(self, num_layers: int, target_layer_ids: tuple[int, ...]) -> "Rank":
        """Return the rank with the target's first layers only; the drafter taps some of them."""
        drafter = replace(
            self.drafter, num_target_layers=num_layers, target_layer_ids=target_layer_ids
        )
        return Rank(replace(self.target, num_hidden_layers=num_layers), drafter)


def rank_of(target: TargetConfig, drafter: DrafterConfig, num_ranks: int) -> Rank:
    """Return what one of `num_ranks` tensor-parallel ranks has of a pair.

    Divided are the heads, with `q_b_proj`, `kv_b_proj` and `o_proj`; the inner widths of dense
    layers, shared and routed experts; the drafter's heads and MLPs; the rows of embedding and
    output head. Whole on every rank, as serving stacks keep them, are what all heads share (the
    down-projections `q_a_proj` and `kv_a_proj_with_mqa`, the latent cache), the router, the norms
    and the drafter's `fc`. The mask token is the one in its place within a rank's rows.

    Raises
    ------
    ConfigError
        A size is not a multiple of `num_ranks`.
    """
    own = _parts(target, _DIVIDED, num_ranks)
    drafts = _parts(drafter, _DRAFTER_DIVIDED, num_ranks)
    mask = drafter.mask_token_id % drafts["vocab_size"]
    return Rank(replace(target, **own), replace(drafter, **drafts, mask_token_id=mask))


def _parts(
    config: TargetConfig | DrafterConfig, names: tuple[str, ...], num_ranks: int
) -> dict[str, Any]:
    """Return the named sizes divided among ranks."""
    sizes: dict[str, int] = {name: getattr(config, name) for name in names}
    for name, size in sizes.items():
        if size % num_ranks:
            raise ConfigError(
                f"num_ranks: expected a divisor of {name} = {size}, got {num_ranks} (each rank "
                "has an equal part)"
            )
    return {name: size // num_ranks for name, size in sizes.items()}


_DIVIDED = ("num_attention_heads", "moe_intermediate_size", "intermediate_size", "vocab_size")
_DRAFTER_DIVIDED = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
_RANK = rank_of(KIMI, KIMI_DRAFTER, 8)
RANKS = {
    "kimi-k2.6-tp8-rank": _RANK,
    "kimi-k2.6-tp8-rank-4-layers": _RANK.cut(4, (0, 1, 2)),
}
NAMES = ("tiny", *_TARGETS, *RANKS)


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
        One of `NAMES`; "tiny" is trained.
    device, dtype
        Of the weights; packed ones stay packed. Ranks are drawn on the device itself: on "meta"
        there are their shapes alone.
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
    if name in RANKS:
        return random_rank(RANKS[name], device=device, dtype=dtype, seed=seed or 0)
    if name in _TARGETS:
        target = random_target(_TARGETS[name], device=device, dtype=dtype, seed=seed or 0)
        return Preset(target, random_drafter(_DRAFTERS[name], target, seed=seed or 0))
    if seed is not None:
        raise ConfigError(f"seed: expected None for {name!r}, got {seed} (its weights are trained)")
    target = load_target(TINY / "target", device=device, dtype=dtype)
    return Preset(target, load_drafter(TINY / "drafter", target))


def random_rank(rank: Rank, *, device: torch.device | str, dtype: torch.dtype, seed: int) -> Preset:
    """Draw the weights of a rank on `device`, experts packed in 4 bits as published."""
    target = random_packed_target(rank.target, KIMI_EXPERTS, device=device, dtype=dtype, seed=seed)
    return Preset(target, random_drafter(rank.drafter, target, seed=seed, draws_on_device=True))


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
