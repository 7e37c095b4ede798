"""What skinny_linear is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.op import Case, Cost, Tolerance

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SkinnyLinearCase(Case):
    """Sizes of one call."""

    num_rows: int  # M
    num_outputs: int = 48  # N
    num_inputs: int = 64
    num_heads: int = 0  # H; 0: there are none
    is_normalised: bool = False
    is_gated: bool = False
    gates_out: bool = False
    is_wide_in: bool = False  # x, where gated, of the accumulation dtype
    is_wide_out: bool = False
    gap: int = 0  # numbers behind every row of x, weight and out: views
    seed: int = 0

    @property
    def width_out(self) -> int:
        """Numbers in a row of the result."""
        return self.num_outputs // 2 if self.gates_out else self.num_outputs


def inputs(
    case: SkinnyLinearCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `skinny_linear`, without the backend, from the case's seed.

    What is not to be written holds 7, what is not to be read NaN.
    """
    generator = torch.Generator().manual_seed(case.seed)
    wide = torch.promote_types(dtype, torch.float32)
    heads = (case.num_heads,) if case.num_heads else ()
    M, N, width = case.num_rows, case.num_outputs, case.num_inputs

    def placed(values: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (*values.shape[:-1], values.shape[-1] + case.gap)
        wider = torch.full(shape, torch.nan, dtype=dtype, device=device)
        wider[..., : values.shape[-1]] = values
        return wider[..., : values.shape[-1]]

    x = torch.randn(*heads, M, 2 * width if case.is_gated else width, generator=generator)
    weight = torch.randn(*heads, N, width, generator=generator) / width**0.5
    norm_weight = 1.0 + 0.1 * torch.randn(width, generator=generator)
    return {
        "x": placed(x, wide if case.is_wide_in else dtype),
        "weight": placed(weight, dtype),
        "norm_weight": norm_weight.to(device, dtype) if case.is_normalised else None,
        "eps": NORM_EPS,
        "is_gated": case.is_gated,
        "gates_out": case.gates_out,
        "out": placed(
            torch.full((*heads, M, case.width_out), 7.0), wide if case.is_wide_out else dtype
        ),
    }


def cost(case: SkinnyLinearCase, *, itemsize: int = 2) -> Cost:
    """Bytes and arithmetic of a call."""
    heads, M, N, width = max(case.num_heads, 1), case.num_rows, case.num_outputs, case.num_inputs
    wide = max(itemsize, 4)
    read = M * width * (2 if case.is_gated else 1) * (wide if case.is_wide_in else itemsize)
    written = M * case.width_out * (wide if case.is_wide_out else itemsize)
    norm = width * itemsize if case.is_normalised else 0
    moved = heads * (N * width * itemsize + read + written) + norm
    return Cost(bytes=moved, flops=2 * heads * M * N * width)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far an implementation may be from the reference on the same inputs."""
    if dtype == torch.float64:
        return Tolerance(1e-13, 0.0, "float64 sums in another order")
    if dtype == torch.float32:
        return Tolerance(1e-5, 0.0, "float32 sums in another order")
    return Tolerance(
        8e-3 if dtype == torch.bfloat16 else 1e-3, 0.0, "two roundings, of activation and result"
    )


CASES: tuple[SkinnyLinearCase, ...] = (
    SkinnyLinearCase("one-row", "smallest legal call", 1, 1, 32),
    SkinnyLinearCase("odd", "outputs that fill no tile, rows that fill no instruction", 9, 37, 96),
    SkinnyLinearCase("few-turns", "fewer turns than warps are usual", 5, 16, 32),
    SkinnyLinearCase("uneven-turns", "warps with different numbers of turns", 3, 33, 32 * 37),
    SkinnyLinearCase("many-rows", "as many rows as the kernels take", 32, 40, 256),
    SkinnyLinearCase("heads", "a weight for every head", 10, 24, 64, num_heads=3),
    SkinnyLinearCase("normed", "a norm before", 17, 40, 224, is_normalised=True),
    SkinnyLinearCase("normed-wide", "a norm before, uneven turns, nothing rounded", 9, 33, 32 * 37,
                     is_normalised=True, is_wide_out=True),
    SkinnyLinearCase("gated", "a gate before", 9, 40, 128, is_gated=True),
    SkinnyLinearCase("gated-wide", "a gate that comes in float32", 9, 40, 96, is_gated=True,
                     is_wide_in=True),
    SkinnyLinearCase("gates", "a gate behind, of outputs that fill no block", 9, 74, 96,
                     gates_out=True),
    SkinnyLinearCase("gates-wide", "a gate before and a gate behind, not rounded to store", 3, 40,
                     160, is_gated=True, gates_out=True, is_wide_out=True),
    SkinnyLinearCase("wide", "a result that is not rounded", 9, 40, 128, is_wide_out=True),
    SkinnyLinearCase("strided", "views of wider tensors", 6, 20, 64, num_heads=2, gap=8),
    SkinnyLinearCase("two-tiles", "enough outputs for two tiles a block", 9, 4100, 64),
)  # fmt: skip

HIDDEN = 7168
PRODUCTION: tuple[SkinnyLinearCase, ...] = tuple(
    case
    for rows in (9, 17)
    for case in (
        SkinnyLinearCase(f"values-{rows}", "W_uv", rows, 128, 512, num_heads=8),
        SkinnyLinearCase(f"queries-{rows}", "q_b", rows, 1536, 1536, is_normalised=True),
        SkinnyLinearCase(f"latents-{rows}", "q_a and kv_a", rows, 2112, HIDDEN),
        SkinnyLinearCase(f"output-{rows}", "o_proj", rows, HIDDEN, 1024),
        SkinnyLinearCase(f"router-{rows}", "router, and gate and up of the shared expert", rows,
                         896, HIDDEN, is_wide_out=True),
        SkinnyLinearCase(f"shared-{rows}", "down of the shared expert", rows, HIDDEN, 256,
                         is_gated=True, is_wide_in=True),
        SkinnyLinearCase(f"dense-{rows}", "gate and up of a dense layer", rows, 4608, HIDDEN,
                         gates_out=True),
        SkinnyLinearCase(f"down-{rows}", "down of a dense layer", rows, HIDDEN, 2304),
    )
)  # fmt: skip
