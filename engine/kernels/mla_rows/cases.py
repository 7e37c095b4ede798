"""What mla_rows is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.op import Case, Cost, Tolerance

SLOT_BYTES = 8
LATENT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MlaRowsCase(Case):
    """Sizes of one call."""

    num_rows: int  # M
    num_heads: int = 2  # H
    value_dim: int = 16  # C
    rope_dim: int = 8  # R
    nope_dim: int = 8  # of a query before its rotated dims
    num_slots: int = 64  # S
    gap: int = 0  # numbers behind every row of every operand: views
    seed: int = 0


def inputs(
    case: MlaRowsCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `mla_rows`, without the backend, from the case's seed.

    What is not to be written holds 7, what is not to be read NaN.
    """
    generator = torch.Generator().manual_seed(case.seed)
    M, H, R = case.num_rows, case.num_heads, case.rope_dim
    width, sums = case.value_dim + R, torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    queries = normal(M, H, case.nope_dim + R)
    up_keys = normal(H, case.nope_dim, case.value_dim) / max(case.nope_dim, 1) ** 0.5
    angles = normal(M, R // 2) * 100
    operands = {
        "kv_a": normal(M, width).to(dtype),
        "norm_weight": (1.0 + 0.1 * normal(case.value_dim)).to(dtype),
        "queries": queries.to(dtype),
        "up_keys": up_keys.to(dtype),
        "cos": angles.cos().to(sums),
        "sin": angles.sin().to(sums),
        "rows": torch.full((case.num_slots, width), 7.0, dtype=dtype),
        "out": torch.full((M, H, width), 7.0, dtype=dtype),
    }
    slots = torch.randperm(case.num_slots, generator=generator)[:M]
    placed = {name: one.to(device) for name, one in operands.items()}
    if case.gap:  # a copy to a device closes the gaps
        placed = {name: _inside_wider(one, case.gap) for name, one in placed.items()}
    return placed | {"slots": slots.to(device), "eps": LATENT_EPS}


def _inside_wider(tensor: Tensor, gap: int) -> Tensor:
    """Return the same values as a view with a gap of NaN behind every row."""
    *leading, last = tensor.shape
    if not leading:
        return tensor
    wider = tensor.new_full((*leading, last + gap), torch.nan)
    wider[..., :last] = tensor
    return wider[..., :last]


def cost(case: MlaRowsCase, *, itemsize: int = 2) -> Cost:
    """Bytes of a call, and the arithmetic of its products."""
    M, H, C, R = case.num_rows, case.num_heads, case.value_dim, case.rope_dim
    absorbing = H * case.nope_dim * C
    queries = M * H * (case.nope_dim + R + C + R)
    numbers = 2 * M * (C + R) + C + queries + absorbing
    angles = M * R * max(itemsize, 4)
    return Cost(bytes=numbers * itemsize + angles + M * SLOT_BYTES, flops=2 * M * absorbing)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far an implementation may be from the reference on the same inputs."""
    if dtype == torch.float64:
        return Tolerance(1e-14, 0.0, "float64 sums of C squares in another order")
    if dtype == torch.float32:
        return Tolerance(1e-6, 0.0, "float32 sums of C squares in another order")
    return Tolerance(
        8e-3 if dtype == torch.bfloat16 else 1e-3, 0.0, "results are rounded once or twice"
    )


CASES: tuple[MlaRowsCase, ...] = (
    MlaRowsCase("one-row", "smallest legal call", 1, num_heads=1, rope_dim=2, num_slots=1),
    MlaRowsCase("odd", "no size a power of two", 5, num_heads=3, value_dim=19, rope_dim=6),
    MlaRowsCase("no-nope", "queries that are rotated whole: nothing is absorbed", 4, nope_dim=0),
    MlaRowsCase("strided", "views of wider tensors", 6, gap=3),
    MlaRowsCase("wide-keys", "more dims than a tile, and no multiple", 18, 2, 70, 4, 20),
    MlaRowsCase("full", "every slot is written", 33, num_slots=33),
    MlaRowsCase("pair", "the trained pair's widths", 17, 4, 64, 16, 32),
)

PRODUCTION: tuple[MlaRowsCase, ...] = tuple(
    MlaRowsCase(f"mla-{heads}-{rows}", "a shape that is served", rows, heads, 512, 64, 128, 1088)
    for heads, rows in ((8, 1), (8, 9), (128, 65))
)
