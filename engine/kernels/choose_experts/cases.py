"""What choose_experts is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.op import Case, Cost, Tolerance

ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class ChooseExpertsCase(Case):
    """Sizes of one call."""

    num_rows: int  # M
    num_experts: int = 8  # E
    top_k: int = 2  # K
    num_groups: int = 1
    kept_groups: int = 1
    scaling: float = 2.5
    is_normalised: bool = True
    row_gap: int = 0  # numbers behind every row: a view
    spread: float = 1.0  # of the logits; large ones leave scores of 0 and 1
    seed: int = 0


def inputs(
    case: ChooseExpertsCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `choose_experts`, without the backend, from the case's seed.

    Sixteen-bit rows have float32 logits. The gap behind a row is NaN.
    """
    generator = torch.Generator().manual_seed(case.seed)
    dtype = torch.promote_types(dtype, torch.float32)
    wide = torch.full((case.num_rows, case.num_experts + case.row_gap), torch.nan)
    drawn = torch.randn(case.num_rows, case.num_experts, generator=generator)
    wide[:, : case.num_experts] = drawn * case.spread
    bias = torch.randn(case.num_experts, generator=generator) * 0.1
    return {
        "logits": wide.to(device, dtype)[:, : case.num_experts],
        "bias": bias.to(device, dtype),
        "top_k": case.top_k,
        "scaling": case.scaling,
        "is_normalised": case.is_normalised,
        "num_groups": case.num_groups,
        "kept_groups": case.kept_groups,
    }


def cost(case: ChooseExpertsCase, *, itemsize: int = 4) -> Cost:
    """Bytes of a call; its arithmetic, a few operations a logit, is none of a matrix unit's."""
    itemsize = max(itemsize, 4)
    chosen = case.num_rows * case.top_k * (ID_BYTES + itemsize)
    read = (case.num_rows + 1) * case.num_experts * itemsize
    return Cost(bytes=read + chosen, flops=0)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far the weights of an implementation may be from the reference's."""
    if dtype == torch.float64:
        return Tolerance(1e-14, 0.0, "float64 sums of K scores in another order")
    return Tolerance(1e-6, 0.0, "another exp in float32, sums of K scores in another order")


CASES: tuple[ChooseExpertsCase, ...] = (
    ChooseExpertsCase("one-expert", "nothing to choose from", 1, num_experts=1, top_k=1),
    ChooseExpertsCase("all", "every expert is chosen, in its order", 3, num_experts=5, top_k=5),
    ChooseExpertsCase("odd", "no power of two", 7, num_experts=13, top_k=3),
    ChooseExpertsCase("plain", "weights are scores", 4, is_normalised=False, scaling=1.0),
    ChooseExpertsCase("groups", "half of the groups are kept", 9, 16, 3, 4, 2),
    ChooseExpertsCase("odd-groups", "groups of three", 9, 15, 4, 5, 3),
    ChooseExpertsCase("one-group", "all experts are of one group", 5, 12, 4, 3, 1),
    ChooseExpertsCase("strided", "rows of a wider matrix", 6, num_experts=12, row_gap=5),
    ChooseExpertsCase("sharp", "scores that vanish", 6, num_experts=12, spread=25.0, top_k=4),
    ChooseExpertsCase("many-rows", "more rows than warps", 40),
)

PRODUCTION: tuple[ChooseExpertsCase, ...] = (
    *(
        ChooseExpertsCase(f"kimi-{rows}", "a shape that is served", rows, 384, 8, scaling=2.827)
        for rows in (1, 9, 1024)
    ),
    ChooseExpertsCase("deepseek-9", "groups that are served", 9, 256, 8, 8, 4),
)
