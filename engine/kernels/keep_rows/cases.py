"""What keep_rows is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.op import Case, Cost, Tolerance

HEAD_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class KeepRowsCase(Case):
    """Sizes of one call."""

    num_rows: int  # M
    num_key_heads: int = 1  # H_kv
    head_dim: int = 8  # D
    num_places: int = 40  # R
    gap: int = 0  # numbers behind every row that is kept: a view
    seed: int = 0


def inputs(
    case: KeepRowsCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `keep_rows`, without the backend, from the case's seed.

    Keys and values are views of one product of two layers; rows that are not to be written hold 7.
    """
    generator = torch.Generator().manual_seed(case.seed)
    M, heads, D = case.num_rows, case.num_key_heads, case.head_dim
    sums = torch.promote_types(dtype, torch.float32)
    made = torch.randn(M, 2, 2, heads, D, generator=generator).to(device, dtype)
    angles = torch.randn(M, D // 2, generator=generator) * 100
    rows = torch.full((case.num_places, 2 * D + case.gap), 7.0, dtype=dtype, device=device)
    places = torch.randperm(case.num_places, generator=generator)[: M * heads]
    return {
        "keys": made[:, 1, 0],
        "values": made[:, 1, 1],
        "key_norm": (1.0 + 0.1 * torch.randn(D, generator=generator)).to(device, dtype),
        "cos": angles.cos().to(device, sums),
        "sin": angles.sin().to(device, sums),
        "eps": HEAD_EPS,
        "rows": rows[:, : 2 * D],
        "places": places.to(device),
    }


def cost(case: KeepRowsCase, *, itemsize: int = 2) -> Cost:
    """Bytes of a call; its arithmetic is none of a matrix unit's."""
    heads, D = case.num_rows * case.num_key_heads, case.head_dim
    numbers = 4 * heads * D + D
    angles = case.num_rows * D * max(itemsize, 4)
    return Cost(bytes=numbers * itemsize + angles + 8 * heads, flops=0)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far an implementation may be from the reference on the same inputs."""
    if dtype == torch.float64:
        return Tolerance(1e-14, 0.0, "float64 sums of D squares in another order")
    if dtype == torch.float32:
        return Tolerance(1e-6, 0.0, "float32 sums of D squares in another order")
    return Tolerance(4e-3 if dtype == torch.bfloat16 else 5e-4, 0.0, "results are rounded")


CASES: tuple[KeepRowsCase, ...] = (
    KeepRowsCase("one-pair", "smallest legal call", 1, head_dim=2, num_places=1),
    KeepRowsCase("odd", "no size a power of two", 5, 3, 6),
    KeepRowsCase("view", "rows of wider ones, all of them written", 8, 2, num_places=16, gap=5),
)

PRODUCTION: tuple[KeepRowsCase, ...] = tuple(
    KeepRowsCase(f"kimi-keep-{heads}", "a shape that is served", 8, heads, 128, 2183 * heads)
    for heads in (1, 8)
)
