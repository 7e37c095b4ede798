"""Linear weights kept in memory as their checkpoint stores them, beside plain tensors.

::

    fp8     value = values * scale_inv of its block             values float8_e4m3fn
    int4    value = (4 bits of packed - 8) * scale of its group      8 values in an int32

A group is a run of inputs of one output; a block is a rectangle, cut off at the matrix's edges.
The product is rounded once to the scale's dtype, as the packages that wrote the checkpoints do,
and only then cast. Every weight may have leading dimensions (experts), which index it.
Source: deepseek-ai/DeepSeek-V3 inference/kernel.py; vllm-project/compressed-tensors
compressors/pack_quantized.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint_config import FP8, INT4, Quantization
from engine.errors import WeightsError

INT4_PER_WORD = 8  # an int32 holds eight 4-bit values, the first in its lowest bits
INT4_ZERO = 8  # what stands for zero in them
FP8_DTYPE = torch.float8_e4m3fn
FP8_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)  # all within float32
PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INT4_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8BlockWeight:
    """An fp8 weight with one scale for each block.

    Raises
    ------
    WeightsError
        The tensors are of other dtypes, or the scales do not cover the values.
    """

    values: Tensor  # [..., out, in] float8_e4m3fn
    scale_inv: Tensor  # [..., ceil(out / block rows), ceil(in / block columns)] float32
    block: tuple[int, int]  # rows and columns that share a scale

    def __post_init__(self) -> None:
        expected = fp8_scale_shape(tuple(self.values.shape), self.block)
        _check("fp8 values", self.values, tuple(self.values.shape), (FP8_DTYPE,))
        _check("fp8 scales", self.scale_inv, expected, (torch.float32,))

    @property
    def shape(self) -> torch.Size:
        """The logical shape, [..., out, in]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return self.values.nbytes + self.scale_inv.nbytes

    def __getitem__(self, expert: int) -> "Fp8BlockWeight":
        return Fp8BlockWeight(self.values[expert], self.scale_inv[expert], self.block)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as plain numbers, [..., out, in]."""
        (rows, columns), (out, width) = self.block, self.shape[-2:]
        scale = self.scale_inv.repeat_interleave(rows, dim=-2)[..., :out, :]
        scale = scale.repeat_interleave(columns, dim=-1)[..., :width]
        return (self.values.to(scale.dtype) * scale).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Int4GroupWeight:
    """A symmetric 4-bit weight, packed, with one scale for each group of inputs of an output.

    Raises
    ------
    WeightsError
        The tensors are of other dtypes, or the scales do not cover the values.
    """

    packed: Tensor  # [..., out, in / 8] int32
    scale: Tensor  # [..., out, in / group_size], a plain float dtype

    def __post_init__(self) -> None:
        _check("int4 values", self.packed, tuple(self.packed.shape), (torch.int32,))
        rows, groups = tuple(self.packed.shape[:-1]), self.scale.shape[-1]
        _check("int4 scales", self.scale, (*rows, groups), INT4_SCALE_DTYPES)
        check_int4_groups(self.shape[-1], self.shape[-1] // max(groups, 1))

    @property
    def shape(self) -> torch.Size:
        """The logical shape, [..., out, in]."""
        return torch.Size((*self.packed.shape[:-1], self.packed.shape[-1] * INT4_PER_WORD))

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.packed.device

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes in memory, scales included."""
        return self.packed.nbytes + self.scale.nbytes

    def __getitem__(self, expert: int) -> "Int4GroupWeight":
        return Int4GroupWeight(self.packed[expert], self.scale[expert])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as plain numbers, [..., out, in]."""
        shifts = torch.arange(0, 32, 32 // INT4_PER_WORD, dtype=torch.int32, device=self.device)
        nibbles = (self.packed.unsqueeze(-1) >> shifts) & 0xF  # [..., out, in / 8, 8]
        values = (nibbles - INT4_ZERO).to(self.scale.dtype)
        grouped = values.view(*self.scale.shape, self.group_size)
        return (grouped * self.scale.unsqueeze(-1)).flatten(-2).to(dtype)


Weight = Tensor | Fp8BlockWeight | Int4GroupWeight


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return a weight as plain numbers: a tensor as it is, anything else dequantised to `dtype`."""
    return weight if isinstance(weight, Tensor) else weight.dequantize(dtype)


def plain(weights: Mapping[str, Weight], name: str) -> Tensor:
    """Return a weight that must not be quantised; a `WeightsError` says that it is."""
    weight = weights[name]
    if not isinstance(weight, Tensor):
        raise WeightsError(
            f"{name}: expected plain numbers, got {type(weight).__name__} (only the projections "
            "may be quantised)"
        )
    return weight


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors a checkpoint stores for a weight."""

    suffix: str  # behind the weight's name
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]  # that it may be stored in
    dtype: torch.dtype | None  # that it is read to; None = as it is stored

    def check(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Refuse what is stored under `name`, expected to be of `shape`: `WeightsError`."""
        if tuple(tensor.shape) != shape or tensor.dtype not in self.dtypes:
            is_plain = self.dtypes == PLAIN_DTYPES
            kind = "plain numbers" if is_plain else " or ".join(map(str, self.dtypes))
            raise WeightsError(
                f"{name}: expected {list(shape)} {kind}, got {list(tensor.shape)} {tensor.dtype} "
                "(the configuration says so)"
            )


def stored_parts(
    shape: tuple[int, ...], quantization: Quantization | None, dtype: torch.dtype
) -> tuple[StoredPart, ...]:
    """Return what is stored for a weight; `dtype` is that of plain numbers in memory."""
    if quantization is None:
        return (StoredPart("", shape, PLAIN_DTYPES, dtype),)
    if quantization.kind == FP8:
        scales = fp8_scale_shape(shape, quantization.block)
        return (
            StoredPart("", shape, (FP8_DTYPE,), FP8_DTYPE),
            StoredPart("_scale_inv", scales, FP8_SCALE_DTYPES, torch.float32),
        )
    *rows, width = shape
    group_size = quantization.block[1]
    check_int4_groups(width, group_size)
    sizes = (*shape[:-2], 2)
    return (
        StoredPart("_packed", (*rows, width // INT4_PER_WORD), (torch.int32,), torch.int32),
        StoredPart("_scale", (*rows, width // group_size), INT4_SCALE_DTYPES, None),
        StoredPart("_shape", sizes, (torch.int64, torch.int32), torch.int64),
    )


def join_parts(parts: Sequence[Tensor], quantization: Quantization | None) -> Weight:
    """Make a weight of the tensors `stored_parts` names, in its order."""
    if quantization is None:
        return parts[0]
    if quantization.kind == FP8:
        return Fp8BlockWeight(parts[0], parts[1], quantization.block)
    weight = Int4GroupWeight(parts[0], parts[1])
    sizes = torch.tensor(weight.shape[-2:], device=weight.device)
    if not torch.equal(parts[2], sizes.expand_as(parts[2])):
        raise WeightsError(
            f"weight_shape: expected {sizes.tolist()}, got {parts[2].tolist()} (the packed values "
            "have the former)"
        )
    return weight


def split_parts(weight: Weight) -> dict[str, Tensor]:
    """Return the tensors to store for a weight, by their suffixes."""
    if isinstance(weight, Tensor):
        return {"": weight}
    if isinstance(weight, Fp8BlockWeight):
        return {"": weight.values, "_scale_inv": weight.scale_inv}
    sizes = torch.tensor(weight.shape[-2:]).expand(*weight.shape[:-2], 2)
    return {"_packed": weight.packed, "_scale": weight.scale, "_shape": sizes}


def quantization_of(weight: Weight) -> Quantization | None:
    """Return how a weight is stored, None for plain numbers."""
    if isinstance(weight, Tensor):
        return None
    if isinstance(weight, Fp8BlockWeight):
        return Quantization(FP8, weight.block)
    return Quantization(INT4, (1, weight.group_size))


def fp8_scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of an fp8 weight: blocks at the edges may be cut off."""
    rows, columns = (-(-size // step) for size, step in zip(shape[-2:], block, strict=True))
    return (*shape[:-2], rows, columns)


def check_int4_groups(width: int, group_size: int) -> None:
    """Refuse inputs that groups of `group_size` do not divide with a `WeightsError`."""
    if group_size < 1 or group_size % INT4_PER_WORD or width % group_size:
        raise WeightsError(
            f"int4 group: expected a multiple of {INT4_PER_WORD} that divides {width} inputs, got "
            f"{group_size} (a group is whole words of packed values)"
        )


def _check(
    what: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or len(shape) < 2:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise WeightsError(
            f"{what}: expected {list(shape)} {names}, got {list(tensor.shape)} {tensor.dtype} "
            "(values and scales belong together)"
        )
