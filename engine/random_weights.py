"""Models with random weights, for properties and for time: drawn where they are needed.

Every layer keeps the size of its rows, so that many of them in a row neither vanish nor overflow.
Plain numbers are drawn in float32, so that all dtypes round the same weights. Packed experts are
drawn as they are stored, bit by bit: they never exist as plain numbers, which would take four times
their memory.

Rows that differ stay different, and a layer's experts are chosen equally often, as in a model
trained for that: 9 rows hit 66 of 384 experts, not 12. Two things see to it. Packed numbers have a
mean of zero: with sixteen equally likely integers it would be -1/2, what a layer adds would lie
along one direction, larger from layer to layer, until all rows pointed there. And a router's bias
undoes what its rows' different sizes would do to its choices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from engine.checkpoint_config import INT4, Quantization
from engine.config import DrafterConfig, TargetConfig
from engine.drafter import Drafter, drafter_shapes
from engine.errors import ConfigError
from engine.layers import accumulation_dtype
from engine.quantized import INT4_PER_WORD, INT4_ZERO, Int4GroupWeight, Weight, check_int4_groups
from engine.target import Shape, Target, target_shapes

SPREAD = 0.1  # of norm weights around 1 and of the router's bias around 0: neither may be idle
INT4_SPREAD = math.sqrt(2 * sum(n * n for n in range(8)) / 16)  # of -7..7, zero twice as likely
BYTES_PER_WORD = 4
LOWEST_BITS = 0x11111111  # of the eight numbers in an int32
ROUTER, BIAS = "mlp.gate.weight", "mlp.gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Draws:
    """Where random numbers come from, and where they are put."""

    generator: torch.Generator | None  # its device draws; None = nothing is drawn, only shaped
    device: torch.device

    @classmethod
    def of_seed(cls, seed: int, device: torch.device | str) -> "Draws":
        """Draw on the CPU, so that every device gets the same numbers."""
        return cls(torch.Generator().manual_seed(seed), torch.device(device))

    @classmethod
    def on_device(cls, seed: int, device: torch.device | str) -> "Draws":
        """Draw where the numbers stay; others on every kind of device, shapes alone on `meta`."""
        place = torch.device(device)
        if place.type == "meta":
            return cls(None, place)
        return cls(torch.Generator(place).manual_seed(seed), place)

    def normal(self, shape: Shape) -> Tensor:
        """Return standard normal float32 numbers, on the device that draws."""
        if self.generator is None:
            return torch.empty(shape, device=self.device)
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def words(self, shape: Shape) -> Tensor:
        """Return int32 words of which every bit is random, on the device that draws."""
        if self.generator is None:
            return torch.empty(shape, dtype=torch.int32, device=self.device)
        *rows, width = shape
        words = (*rows, width * BYTES_PER_WORD)
        drawn = torch.empty(words, dtype=torch.uint8, device=self.generator.device)
        return drawn.random_(generator=self.generator).view(torch.int32)


def random_target(
    config: TargetConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
) -> Target:
    """Make a target with plain random weights: the generator is the CPU's, whatever the device."""
    draws = Draws.of_seed(seed, device)
    return Target(config, _random_tensors(target_shapes(config), draws, dtype))


def random_packed_target(
    config: TargetConfig,
    experts: Quantization,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int,
) -> Target:
    """Make a target whose routed experts are packed in 4 bits, drawn on `device` itself.

    On `meta` there are shapes and dtypes only. Raises a ConfigError for another storage than int4.
    """
    if experts.kind != INT4:
        raise ConfigError(f"experts: expected {INT4} storage, got {experts.kind!r} (drawn as bits)")
    draws = Draws.on_device(seed, device)
    shapes = target_shapes(config)
    routed = {name: shape for name, shape in shapes.items() if ".mlp.experts." in name}
    plain = {name: shape for name, shape in shapes.items() if name not in routed}
    tensors = _random_tensors(plain, draws, dtype)
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        _balance(config, tensors, f"model.layers.{layer}")
    weights: dict[str, Weight] = dict(tensors)
    for name, shape in routed.items():
        weights[name] = _random_int4(shape, experts.block[1], draws)
    return Target(config, weights)


def random_drafter(
    config: DrafterConfig, target: Target, *, seed: int, draws_on_device: bool = False
) -> Drafter:
    """Make a drafter with random weights for `target`, on its device and of its dtype.

    They are the same on every device, unless they are drawn on the device itself.
    """
    draw = Draws.on_device if draws_on_device else Draws.of_seed
    tensors = _random_tensors(drafter_shapes(config), draw(seed, target.device), target.dtype)
    return Drafter(config, tensors, target)


def _random_tensors(
    shapes: Mapping[str, Shape], draws: Draws, dtype: torch.dtype
) -> dict[str, Tensor]:
    return {
        name: _random_plain(name, shape, draws, dtype).to(draws.device)
        for name, shape in shapes.items()
    }


def _random_plain(name: str, shape: Shape, draws: Draws, dtype: torch.dtype) -> Tensor:
    values = draws.normal(shape)
    if name.endswith("e_score_correction_bias"):
        return values.mul_(SPREAD).to(accumulation_dtype(dtype))
    if len(shape) == 1:
        return values.mul_(SPREAD).add_(1.0).to(dtype)  # a norm's weight
    if name.endswith("embed_tokens.weight"):
        return values.to(dtype)
    return values.div_(math.sqrt(shape[-1])).to(dtype)


def _balance(config: TargetConfig, tensors: dict[str, Tensor], layer: str) -> None:
    """Give a router rows of different sizes and the bias with which all are chosen equally often.

    The drawn bias becomes what the sizes differ by. Normalised rows are about normal, so an
    expert's logits are, too, and spread by the size n of its row: the share K / E of its scores
    lies above sigmoid(n z), z being the quantile of that share.
    """
    norm = tensors[f"{layer}.post_attention_layernorm.weight"].float()
    router, sizes = tensors[f"{layer}.{ROUTER}"], 1.0 + tensors[f"{layer}.{BIAS}"]
    router.mul_(sizes.unsqueeze(1))
    spread = (router.float() * norm).norm(dim=1)
    chosen = config.num_experts_per_tok / (config.n_routed_experts + 1)  # above the K-th of E
    quantile = NormalDist().inv_cdf(1.0 - chosen)
    scores = (quantile * torch.stack((torch.ones_like(spread), spread))).sigmoid()
    tensors[f"{layer}.{BIAS}"] = (scores[0] - scores[1]).to(sizes.dtype)


def _random_int4(shape: Shape, group_size: int, draws: Draws) -> Int4GroupWeight:
    """Draw a packed weight [..., out, in] around zero; its groups differ in scale by `SPREAD`."""
    *rows, width = shape
    check_int4_groups(width, group_size)
    packed = _without_lowest(draws.words((*rows, width // INT4_PER_WORD)))
    scale = draws.normal((*rows, width // group_size)).mul_(SPREAD).add_(1.0)
    scale = scale.div_(INT4_SPREAD * math.sqrt(width)).to(torch.bfloat16)
    return Int4GroupWeight(packed.to(draws.device), scale.to(draws.device))


def _without_lowest(words: Tensor) -> Tensor:
    """Make zeros of the lowest of sixteen integers, which has no counterpart; `words` mutated."""
    is_other = words | (words >> 1)
    is_other |= is_other >> 2  # the lowest bit of each number now says whether one of its four is 1
    is_lowest = is_other.bitwise_not_().bitwise_and_(LOWEST_BITS)
    return words.bitwise_or_(is_lowest.mul_(INT4_ZERO))
