"""What greedy_tokens is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.op import Case, Cost, Tolerance

LOGIT_BYTES = 4
CHOICE_BYTES = 8 + 4  # an id and a log-prob


@dataclass(frozen=True, slots=True)
class GreedyTokensCase(Case):
    """Sizes of one call."""

    num_rows: int  # M
    vocab_size: int  # V
    step: float = 0.0  # logits are multiples of it: ties
    spread: float = 2.0
    gap: int = 0  # NaN behind every row: a view
    seed: int = 0


def inputs(
    case: GreedyTokensCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `greedy_tokens`, without the backend; float32 for every dtype."""
    del dtype
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.num_rows, case.vocab_size)
    logits = torch.randn(shape, generator=generator) * case.spread
    if case.step:
        logits = (logits / case.step).round() * case.step
    wide = torch.full((case.num_rows, case.vocab_size + case.gap), torch.nan)
    wide[:, : case.vocab_size] = logits
    return {"logits": wide.to(device)[:, : case.vocab_size]}


def cost(case: GreedyTokensCase, *, itemsize: int = 4) -> Cost:
    """Bytes of a call: every logit, every choice; its arithmetic is none of a matrix unit's."""
    del itemsize
    return Cost(bytes=case.num_rows * (case.vocab_size * LOGIT_BYTES + CHOICE_BYTES), flops=0)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """Tokens are equal; how far a log-prob may be from the reference's."""
    del dtype
    return Tolerance(2e-6, 0.0, "a float32 sum of V exponentials in another order, another exp")


CASES: tuple[GreedyTokensCase, ...] = (
    GreedyTokensCase("one", "nothing to choose from", 1, 1),
    GreedyTokensCase("odd", "no power of two", 7, 23),
    GreedyTokensCase("whole-part", "a part is full", 2, 2048),
    GreedyTokensCase("part-and-one", "a part of one token", 2, 2049),
    GreedyTokensCase("one-less", "a part's last place is empty", 2, 4095),
    GreedyTokensCase("ties", "equal maxima in several parts", 4, 4200, step=2.0),
    GreedyTokensCase("all-equal", "nothing but ids decides", 2, 4100, spread=0.0),
    GreedyTokensCase("strided", "rows of a wider matrix", 3, 2500, step=1.0, gap=7),
    GreedyTokensCase("far", "logits of all sizes", 3, 2500, spread=1e30),
)

PRODUCTION: tuple[GreedyTokensCase, ...] = tuple(
    GreedyTokensCase(f"{name}-{rows}", "a shape that is served", rows, size)
    for name, size in (("rank", 20480), ("whole", 163840))
    for rows in (1, 9, 65)
)
