"""What likeliest_tokens is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.op import Case, Cost, Tolerance

LOGIT_BYTES = 4
CHOICE_BYTES = 8 + 4  # an id and a log-prob


@dataclass(frozen=True, slots=True)
class LikeliestTokensCase(Case):
    """Sizes of one call."""

    num_seqs: int  # N
    vocab_size: int  # V
    width: int  # K, or more than V
    horizon: int = 2
    step: float = 0.0  # logits are multiples of it: ties
    banned: int = 0  # tokens of each row that are -inf
    spread: float = 2.0
    gap: int = 0  # NaN behind every row: a view
    seed: int = 0


def inputs(
    case: LikeliestTokensCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `likeliest_tokens`, without the backend; float32 for every dtype."""
    del dtype
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.num_seqs, case.horizon, case.vocab_size)
    logits = torch.randn(shape, generator=generator) * case.spread
    if case.step:
        logits = (logits / case.step).round() * case.step  # zeros of both signs among them
    if case.banned:
        banned = torch.rand(shape, generator=generator).argsort(-1)[..., : case.banned]
        logits.scatter_(-1, banned, -torch.inf)
    wide = torch.full((*shape[:2], case.vocab_size + case.gap), torch.nan)
    wide[..., : case.vocab_size] = logits
    return {
        "draft_logits": wide.to(device)[..., : case.vocab_size],
        "width": case.width,
    }


def cost(case: LikeliestTokensCase, *, itemsize: int = 4) -> Cost:
    """Bytes of a call: every logit, every choice; its arithmetic is none of a matrix unit's."""
    del itemsize
    rows = case.num_seqs * case.horizon
    chosen = min(case.width, case.vocab_size) * CHOICE_BYTES
    return Cost(bytes=rows * (case.vocab_size * LOGIT_BYTES + chosen), flops=0)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """Ids are equal; how far the log-probs of a row may be from the reference's."""
    del dtype
    return Tolerance(2e-6, 0.0, "a float32 sum of V exponentials in another order, another exp")


CASES: tuple[LikeliestTokensCase, ...] = (
    LikeliestTokensCase("one", "nothing to choose from", 1, 1, 1, horizon=1),
    LikeliestTokensCase("all", "as many as there are", 2, 5, 9),
    LikeliestTokensCase("chain", "the best alone, of two parts", 1, 1030, 1),
    LikeliestTokensCase("whole-part", "a part is full", 1, 1024, 16),
    LikeliestTokensCase("part-and-one", "a part of one token", 2, 1025, 16),
    LikeliestTokensCase("one-less", "a part's last place is empty", 2, 2047, 17),
    LikeliestTokensCase("ties", "equals around the edge, in many parts", 1, 4200, 40, step=1.0),
    LikeliestTokensCase("all-equal", "nothing but ids decides", 1, 3000, 33, spread=0.0),
    LikeliestTokensCase("banned", "fewer tokens than places", 2, 1500, 16, banned=1490),
    LikeliestTokensCase("all-banned", "a row of no tokens", 1, 1100, 3, banned=1100),
    LikeliestTokensCase("strided", "rows of a wider matrix", 2, 1300, 8, step=0.5, gap=7),
    LikeliestTokensCase("far", "logits of all sizes", 1, 2500, 64, horizon=3, spread=1e30),
    LikeliestTokensCase("large", "the width of the largest tree", 1, 2600, 512, step=0.25),
)

PRODUCTION: tuple[LikeliestTokensCase, ...] = tuple(
    LikeliestTokensCase(f"{name}-{width}", "a shape that is served", 1, size, width, horizon=7)
    for name, size in (("rank", 20480), ("whole", 163840))
    for width in (1, 8, 16, 64, 512)
)
