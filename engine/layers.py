"""Products, sums, normalisation, rotary positions and the gated MLP, shared by target and drafter.

Everything here is a function of its arguments: no cache, no device choice, no configuration
beyond the numbers passed in. Angles are computed in float64 and rounded once, so that positions
far out keep their phase whatever the model's dtype.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import DrafterConfig, TargetConfig, YarnConfig
from engine.kernels import add_norm, skinny_linear
from engine.quantized import Weight, dense

MOST_GATED_INPUTS = 1024  # of a product that gates its own rows: every block gates all of them


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype reductions run in: at least float32, float64 where the model is."""
    return torch.promote_types(dtype, torch.float32)


def linear(x: Tensor, weight: Weight, *, backend: str = "reference") -> Tensor:
    """Multiply `x` [M, in] by the transpose of `weight` [out, in], dequantised for this use.

    `backend` is that of `skinny_linear`.
    """
    return skinny_linear(x, dense(weight, x.dtype), backend=backend)


def joined(*weights: Weight) -> Tensor | None:
    """Return matrices [out, in] that lie behind each other in memory as one, a view of them.

    None if they do not, or are no plain numbers of one dtype and width.
    """
    parts = [weight for weight in weights if isinstance(weight, Tensor) and weight.is_contiguous()]
    if len(parts) < len(weights):
        return None
    first = parts[0]
    storage, ends = first.untyped_storage().data_ptr(), int(first.storage_offset())
    for part in parts:
        is_alike = part.dtype == first.dtype and part.shape[1:] == first.shape[1:]
        is_next = part.storage_offset() == ends and part.untyped_storage().data_ptr() == storage
        if not (is_alike and is_next):
            return None
        ends += part.numel()
    shape = (sum(map(len, parts)), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


KeptT = TypeVar("KeptT", Tensor, Weight)


def behind_each_other(
    tensors: Mapping[str, KeptT], groups: Iterable[Sequence[str]]
) -> dict[str, KeptT]:
    """Return the tensors with the named matrices of each group as views of one, which is a copy.

    A group stays as it is where its matrices are one already, or not all plain numbers of a dtype.
    """
    placed = dict(tensors)
    for names in groups:
        parts = [one for one in map(placed.get, names) if isinstance(one, Tensor)]
        is_alike = len({part.dtype for part in parts}) == 1 and len(parts) == len(names)
        if is_alike and joined(*parts) is None:
            views = torch.split_with_sizes(torch.cat(parts), [len(part) for part in parts])
            placed |= zip(names, views, strict=True)
    return placed


def products(x: Tensor, *weights: Tensor, backend: str = "reference") -> Sequence[Tensor]:
    """Multiply `x` [M, in] by the transpose of each weight, in one go where they are `joined`."""
    whole = joined(*weights)
    if whole is None:
        return [linear(x, weight, backend=backend) for weight in weights]
    made = linear(x, whole, backend=backend)
    return made.split_with_sizes([len(one) for one in weights], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of `x` to unit root mean square, then by `weight`."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def rope_frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> Tensor:
    """Return the rotary frequencies of `dim` rotated dimensions, YaRN's interpolation included.

    Returns
    -------
    Tensor
        [dim // 2] float64, CPU, radians per position, descending.

    Notes
    -----
    Pairs that turn more than `beta_fast` times within the original context keep their frequency,
    pairs below `beta_slow` turns are slowed by `factor`, a linear ramp lies between.
    Source: arXiv 2309.00071 section 3.2.
    """
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    plain = theta ** (-2.0 * pairs / dim)
    if yarn is None:
        return plain
    low, high = yarn_correction_range(dim, theta, yarn)
    ramp = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (1.0 - ramp) + plain / yarn.factor * ramp


def yarn_correction_range(dim: int, theta: float, yarn: YarnConfig) -> tuple[float, float]:
    """Return the pair indices between which YaRN's ramp runs from 0 to 1."""

    def pair_of(rotations: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (2.0 * math.pi * rotations)
        return dim * math.log(wavelength) / (2.0 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    return (low, high) if low != high else (low, high + 0.001)  # a ramp needs a width


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosine and sine of every row's angles, `[M, dim // 2]` each."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary embedding: frequencies in radians per position and the amplitude of cos and sin."""

    frequencies: Tensor
    amplitude: float

    @classmethod
    def of_target(cls, config: TargetConfig, device: torch.device) -> "Rotary":
        """Make the rotary embedding of a target's `k_rope` part."""
        frequencies = rope_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
        amplitude = 1.0 if config.yarn is None else config.yarn.rope_mscale
        return cls(frequencies.to(device), amplitude)

    @classmethod
    def of_drafter(cls, config: DrafterConfig, device: torch.device) -> "Rotary":
        """Make the rotary embedding of a drafter's heads."""
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.yarn)
        return cls(frequencies.to(device), config.rope_attention_factor)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of `positions` [M] int64, in the accumulation dtype of `dtype`."""
        angles = positions.unsqueeze(-1) * self.frequencies
        # Of few rows both in few launches: polar is amplitude * cos and amplitude * sin in one.
        turned = torch.view_as_real(torch.polar(angles.new_full((), self.amplitude), angles))
        both = angles.new_empty((2, *angles.shape), dtype=accumulation_dtype(dtype))
        both.copy_(turned.movedim(-1, 0))
        return Rotation(both[0], both[1])


def rotate_interleaved(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (2i, 2i + 1) of the last dimension: the target's layout.

    Parameters
    ----------
    x : [M, ..., dim] any float dtype
        Dimensions between the row and `dim` share the row's angles.
    rotation
        The angles of the M rows.

    Returns
    -------
    Tensor
        Like `x`.
    """
    cos, sin = _broadcast(rotation, x)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotate_half_split(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + dim // 2) of the last dimension: the drafter's layout.

    Takes and returns what `rotate_interleaved` does; mixing the two raises no error and only
    lowers what the drafter gets right.
    """
    cos, sin = _broadcast(rotation, x)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _broadcast(rotation: Rotation, x: Tensor) -> tuple[Tensor, Tensor]:
    rows, pairs = rotation.cos.shape
    shape = (rows, *(1,) * (x.dim() - 2), pairs)
    return rotation.cos.view(shape), rotation.sin.view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The residual stream [M, hidden] as a sum that is still to be done."""

    x: Tensor
    addends: tuple[Tensor, ...] = ()

    def normed(self, weight: Tensor, eps: float, backend: str) -> tuple[Tensor, Tensor]:
        """Return the sum and its norm; `backend` is that of `add_norm`."""
        return add_norm(self.x, self.addends, weight, eps=eps, backend=backend)


@dataclass(frozen=True, slots=True)
class SwiGlu:
    """The gated MLP `down(silu(gate(x)) * up(x))`, one product for both where they are `joined`.

    That product gates what it gives itself, in one launch.
    """

    gate_proj: Weight  # [I, hidden]
    up_proj: Weight  # [I, hidden]
    down_proj: Weight  # [hidden, I]

    @classmethod
    def read(cls, tensors: Mapping[str, Weight], prefix: str) -> "SwiGlu":
        """Take the three projections named under `prefix` in a checkpoint."""
        return cls(*(tensors[f"{prefix}.{name}.weight"] for name in swiglu_shapes(1, 1)))

    def __call__(self, x: Tensor, *, backend: str = "reference") -> Tensor:
        """Map `x` [M, hidden] to the same shape; `backend` is that of `skinny_linear`."""
        both = joined(self.gate_proj, self.up_proj)
        if both is None:
            gate = functional.silu(linear(x, self.gate_proj, backend=backend))
            gated = gate * linear(x, self.up_proj, backend=backend)
            return linear(gated, self.down_proj, backend=backend)
        gated = skinny_linear(x, both, gates_out=True, backend=backend)
        return linear(gated, self.down_proj, backend=backend)

    def down(self, gated: Tensor, dtype: torch.dtype, *, backend: str) -> Tensor:
        """Return `down(silu(gate) * up)` in `dtype`, given gate and up beside each other."""
        weight = dense(self.down_proj, dtype)
        if weight.shape[1] <= MOST_GATED_INPUTS:
            return skinny_linear(gated, weight, is_gated=True, backend=backend)
        gate, up = gated.to(dtype).chunk(2, dim=-1)
        return skinny_linear(functional.silu(gate) * up, weight, backend=backend)


def swiglu_shapes(hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a gated MLP's projections by their names in a checkpoint."""
    wide, narrow = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    return {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
