"""What grouped experts are tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.kernels.op import Case, Cost, Tolerance

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN, INT4 = "plain", "int4"
_INT_BYTES = 4  # of a word, an id as it is counted, a weight of a choice


@dataclass(frozen=True, slots=True)
class GroupedExpertsCase(Case):
    """Sizes of one call, and which experts its rows choose."""

    num_rows: int  # M
    num_experts: int = 8  # E
    top_k: int = 2  # K
    hidden: int = 64
    inner: int = 32  # I
    stored: str = PLAIN
    group_size: int = 32  # inputs that share a scale of int4
    scale_dtype: torch.dtype = torch.bfloat16
    routing: str = "spread"  # or "one", "ends", "repeated", see `expert_ids`
    padding_rows: int = 0  # last rows that choose no expert: NaN with NaN weights
    zero_weights: bool = False  # every second choice weighs nothing
    row_gap: int = 0  # elements behind every row of every operand: views
    is_one_expert: bool = False  # the weights of one expert stand for all: memory of one
    seed: int = 0


def expert_ids(case: GroupedExpertsCase) -> Tensor:
    """Experts that each row chooses, [M, K] int64; -1 in rows of padding.

    "spread": K random experts of each row · "one": the same K for all · "ends": the first and the
    last in turn · "repeated": one expert K times in a row.
    """
    generator = torch.Generator().manual_seed(case.seed)
    M, E, K = case.num_rows, case.num_experts, case.top_k
    if case.routing == "spread":
        ids = torch.rand(M, E, generator=generator).argsort(1)[:, :K]
    elif case.routing == "one":
        ids = torch.randperm(E, generator=generator)[:K].expand(M, K)
    elif case.routing == "ends":
        ids = torch.tensor([0, E - 1]).repeat(M * K)[: M * K].view(M, K)
    else:
        ids = torch.randint(E, (M, 1), generator=generator).expand(M, K)
    ids = ids.clone()
    ids[M - case.padding_rows :] = -1
    return ids


def inputs(
    case: GroupedExpertsCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `grouped_experts`, without the backend, from the case's seed.

    What must not matter is made to hurt: the weights of experts that no row chose are NaN (their
    scales, where values are packed), and so are rows of padding and the weights of their choices.
    """
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    M, K, E = case.num_rows, case.top_k, case.num_experts
    ids = expert_ids(case)
    sums = torch.promote_types(dtype, torch.float32)
    weights = (normal(M, K).sigmoid() / K).to(sums)
    if case.zero_weights:
        weights[:, ::2] = 0.0
    x = normal(M, case.hidden).to(dtype)
    padding = slice(M - case.padding_rows, None)
    x[padding] = torch.nan
    weights[padding] = torch.nan
    idle = [] if case.is_one_expert else sorted(set(range(E)) - set(ids.flatten().tolist()))
    num_stored = 1 if case.is_one_expert else E
    operands: dict[str, Any] = {"x": x, "expert_ids": ids.to(device), "expert_weights": weights}
    for name, shape in _shapes(case).items():
        scaled = normal(num_stored, *shape) * shape[1] ** -0.5
        if case.stored == PLAIN:
            operands[name] = _with_nan(scaled, idle).to(dtype)
            continue
        words = torch.randint(
            -(2**31), 2**31, (num_stored, shape[0], shape[1] // 8),
            generator=generator, device=device,
        )  # fmt: skip
        scale = scaled[..., :: case.group_size].abs() / 4
        operands[name] = words.to(torch.int32)
        operands[f"{name}_scale"] = _with_nan(scale, idle).to(case.scale_dtype)
    if case.row_gap:
        operands = {name: _inside_larger(one, case.row_gap) for name, one in operands.items()}
    if case.is_one_expert:
        heavy = {name: one for name, one in operands.items() if one.dim() == 3}
        operands |= {name: one.expand(E, -1, -1) for name, one in heavy.items()}
    return operands


def _shapes(case: GroupedExpertsCase) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the projections of an expert."""
    wide, narrow = (case.inner, case.hidden), (case.hidden, case.inner)
    return {"gate": wide, "up": wide, "down": narrow}


def _with_nan(weights: Tensor, idle: Sequence[int]) -> Tensor:
    """Return the weights, mutated: those of idle experts are NaN."""
    weights[idle] = torch.nan
    return weights


def _inside_larger(tensor: Tensor, gap: int) -> Tensor:
    """Return the same values as a view with a gap behind every row; the gap is not a value."""
    *leading, last = tensor.shape
    hole = torch.nan if tensor.is_floating_point() else -2
    larger = torch.full((*leading, last + gap), hole, dtype=tensor.dtype, device=tensor.device)
    larger[..., :last] = tensor
    return larger[..., :last]


def cost(case: GroupedExpertsCase, *, itemsize: int = 2, ids: Tensor | None = None) -> Cost:
    """Bytes and FLOP of a call: the weights of each expert that is hit once, rows in and out.

    `ids` [M, K] are the choices made, by default the case's own. Results on their way between
    launches are not counted: another kernel may keep them. FLOP are those of the chosen pairs.
    """
    ids = expert_ids(case) if ids is None else ids
    chosen = ids[ids >= 0]
    num_hit, num_pairs = len(set(chosen.tolist())), chosen.numel()
    num_rows = int((ids >= 0).any(1).sum())
    matrix = case.hidden * case.inner
    if case.stored == PLAIN:
        expert_bytes = 3 * matrix * itemsize
    else:
        scale_bytes = matrix // case.group_size * case.scale_dtype.itemsize
        expert_bytes = 3 * (matrix // 2 + scale_bytes)
    row_bytes = (num_rows + len(ids)) * case.hidden * itemsize  # rows of padding are only written
    return Cost(
        bytes=num_hit * expert_bytes + row_bytes + 2 * ids.numel() * _INT_BYTES,
        flops=num_pairs * 3 * 2 * matrix,
    )


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far an implementation may be from the reference on the same inputs."""
    if dtype == torch.float64:
        return Tolerance(1e-12, 0.0, "float64 sums of up to 7168 terms in another order")
    if dtype == torch.float32:
        return Tolerance(1e-5, 0.0, "float32 sums of up to 7168 terms in another order")
    return Tolerance(
        2e-2 if dtype == torch.bfloat16 else 3e-3,
        0.0,
        "what goes into down, int4 weights and outputs are rounded to the rows' dtype",
    )


CASES: tuple[GroupedExpertsCase, ...] = (
    GroupedExpertsCase("one-row", "smallest legal call: one row, one choice", 1, top_k=1),
    GroupedExpertsCase("one-expert", "one expert is all there are", 3, num_experts=1, top_k=1),
    GroupedExpertsCase("spread", "experts with no, one and several tokens", 9),
    GroupedExpertsCase("spread-int4", "the same, packed", 9, stored=INT4),
    GroupedExpertsCase("all-to-one", "one expert's tokens fill several tiles", 37,
                       routing="one"),
    GroupedExpertsCase("all-to-one-int4", "the same, packed", 37, routing="one", stored=INT4),
    GroupedExpertsCase("tile-edge", "a tile exactly full, and by one too many", 17, top_k=1,
                       routing="one"),
    GroupedExpertsCase("ends", "the first and the last expert alone", 6, num_experts=24,
                       routing="ends"),
    GroupedExpertsCase("repeated", "one expert several times in a row", 7, top_k=3,
                       routing="repeated"),
    GroupedExpertsCase("zero-weights", "choices that weigh nothing", 5, zero_weights=True),
    GroupedExpertsCase("padding", "rows of NaN that choose no expert", 9, padding_rows=4),
    GroupedExpertsCase("all-padding", "no row chooses any", 3, padding_rows=3),
    GroupedExpertsCase("odd-widths", "widths that no tile divides", 3, hidden=70, inner=90),
    GroupedExpertsCase("odd-widths-int4", "the same, packed in small groups", 3, hidden=72,
                       inner=40, stored=INT4, group_size=8),
    GroupedExpertsCase("int4-tail", "a packed tile that the width cuts", 3, hidden=160,
                       inner=96, stored=INT4),
    GroupedExpertsCase("float32-scales", "scales that are not rounded to sixteen bits", 4,
                       stored=INT4, scale_dtype=torch.float32),
    GroupedExpertsCase("strided", "views of larger tensors, gaps filled with NaN", 6, row_gap=8),
    GroupedExpertsCase("strided-int4", "the same, packed", 6, row_gap=3, stored=INT4),
    GroupedExpertsCase("tiny", "the trained pair's widths", 2, num_experts=12, top_k=3,
                       hidden=256, inner=64),
    GroupedExpertsCase("many-experts", "more experts than a histogram has threads, few hit", 1,
                       num_experts=130, top_k=8, hidden=32, inner=16),
    GroupedExpertsCase("most-rows", "full tiles, more pairs than are counted in one go", 1024,
                       hidden=16, inner=16),
    GroupedExpertsCase("long-sums", "sums over many tiles, packed", 1, num_experts=2, top_k=1,
                       hidden=1792, inner=64, stored=INT4),
)  # fmt: skip

# Kimi K2.6: one of eight tensor-parallel ranks packed and plain, a whole model; the trained pair.
PRODUCTION: tuple[GroupedExpertsCase, ...] = (
    *(
        GroupedExpertsCase(
            name=f"rank-{stored}-{num_rows}",
            reason="a shape that is served",
            num_rows=num_rows,
            num_experts=384,
            top_k=8,
            hidden=7168,
            inner=256,
            stored=stored,
            is_one_expert=True,
        )
        for stored in (INT4, PLAIN)
        for num_rows in (1, 9, 65, 256, 1024)
    ),
    GroupedExpertsCase("whole-int4-9", "a whole model's experts", 9, 384, 8, 7168, 2048, INT4,
                       is_one_expert=True),
    GroupedExpertsCase("tiny-9", "the trained pair", 9, 12, 3, 256, 64, is_one_expert=True),
)  # fmt: skip
