"""What head_rows is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.op import Case, Cost, Tolerance

HEAD_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class HeadRowsCase(Case):
    """Sizes of one call."""

    num_seqs: int  # N
    block_size: int  # S
    num_key_heads: int = 1  # H_kv
    group: int = 2  # G
    head_dim: int = 8  # D
    spare: int = 3  # rows of a sequence beside its block: the block is a view
    seed: int = 0


def inputs(
    case: HeadRowsCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `head_rows`, without the backend, from the case's seed.

    Queries, keys and values are views of one product; rows that are not to be written hold 7.
    """
    generator = torch.Generator().manual_seed(case.seed)
    N, S, heads, D = case.num_seqs, case.block_size, case.num_key_heads, case.head_dim
    sums = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    made = normal(N * S, (case.group + 2) * heads, D).to(device, dtype)
    queries, keys, values = made.split_with_sizes([case.group * heads, heads, heads], dim=1)
    angles = normal(N * S, D // 2) * 100
    rows = torch.full((N, heads, S + case.spare, 2 * D), 7.0, dtype=dtype, device=device)
    return {
        "queries": queries,
        "keys": keys,
        "values": values,
        "query_norm": (1.0 + 0.1 * normal(D)).to(device, dtype),
        "key_norm": (1.0 + 0.1 * normal(D)).to(device, dtype),
        "cos": angles.cos().to(device, sums),
        "sin": angles.sin().to(device, sums),
        "eps": HEAD_EPS,
        "block": rows[:, :, case.spare :],
    }


def cost(case: HeadRowsCase, *, itemsize: int = 2) -> Cost:
    """Bytes of a call; its arithmetic is none of a matrix unit's."""
    rows, D = case.num_seqs * case.block_size, case.head_dim
    numbers = 2 * rows * (case.group + 2) * case.num_key_heads * D + 2 * D
    return Cost(bytes=numbers * itemsize + rows * D * max(itemsize, 4), flops=0)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far an implementation may be from the reference on the same inputs."""
    if dtype == torch.float64:
        return Tolerance(1e-14, 0.0, "float64 sums of D squares in another order")
    if dtype == torch.float32:
        return Tolerance(1e-6, 0.0, "float32 sums of D squares in another order")
    return Tolerance(
        8e-3 if dtype == torch.bfloat16 else 1e-3, 0.0, "results are rounded once or twice"
    )


CASES: tuple[HeadRowsCase, ...] = (
    HeadRowsCase("one-pair", "smallest legal call", 1, 1, group=1, head_dim=2, spare=0),
    HeadRowsCase("odd", "no size a power of two", 3, 5, 3, 3, head_dim=6),
    HeadRowsCase("one-group", "every query head has its own keys", 2, 4, 2, 1),
    HeadRowsCase("nano", "the preset's widths", 2, 8, 1, 2, 8),
)

PRODUCTION: tuple[HeadRowsCase, ...] = tuple(
    HeadRowsCase(f"kimi-{heads}-{seqs}", "a shape that is served", seqs, 8, heads, 8, 128)
    for heads, seqs in ((1, 1), (1, 4), (8, 1))
)
