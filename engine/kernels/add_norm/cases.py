"""What add_norm is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.op import Case, Cost, Tolerance

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class AddNormCase(Case):
    """Sizes of one call."""

    num_rows: int  # M
    hidden: int = 32
    num_addends: int = 1
    gap: int = 0  # numbers behind every row of x and addends: views
    seed: int = 0


def inputs(
    case: AddNormCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `add_norm`, without the backend, from the case's seed.

    The gap behind a row is NaN.
    """
    generator = torch.Generator().manual_seed(case.seed)

    def rows() -> Tensor:
        shape = (case.num_rows, case.hidden + case.gap)
        wide = torch.full(shape, torch.nan, dtype=dtype, device=device)
        drawn = torch.randn(case.num_rows, case.hidden, generator=generator)
        wide[:, : case.hidden] = drawn.to(device, dtype)
        return wide[:, : case.hidden]

    norm_weight = 1.0 + 0.1 * torch.randn(case.hidden, generator=generator)
    return {
        "x": rows(),
        "addends": tuple(rows() for _ in range(case.num_addends)),
        "norm_weight": norm_weight.to(device, dtype),
        "eps": NORM_EPS,
    }


def cost(case: AddNormCase, *, itemsize: int = 2) -> Cost:
    """Bytes of a call; its arithmetic is none of a matrix unit's."""
    written = 2 if case.num_addends else 1
    rows = case.num_rows * (1 + case.num_addends + written)
    return Cost(bytes=(rows + 1) * case.hidden * itemsize, flops=0)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far an implementation may be from the reference on the same inputs."""
    if dtype == torch.float64:
        return Tolerance(1e-14, 0.0, "float64 sums of squares in another order")
    if dtype == torch.float32:
        return Tolerance(1e-6, 0.0, "float32 sums of squares in another order")
    return Tolerance(
        8e-3 if dtype == torch.bfloat16 else 1e-3, 0.0, "results are rounded once or twice"
    )


CASES: tuple[AddNormCase, ...] = (
    AddNormCase("one-number", "smallest legal call", 1, hidden=1),
    AddNormCase("nothing-added", "a norm alone", 3, num_addends=0),
    AddNormCase("odd", "no size a power of two", 5, hidden=37),
    AddNormCase("two", "two addends, summed first", 9, num_addends=2),
    AddNormCase("strided", "rows of wider matrices", 6, hidden=24, num_addends=2, gap=5),
)

PRODUCTION: tuple[AddNormCase, ...] = tuple(
    AddNormCase(f"kimi-{rows}-{count}", "a shape that is served", rows, 7168, count)
    for rows, count in ((9, 1), (9, 2), (9, 0), (1024, 2))
)
