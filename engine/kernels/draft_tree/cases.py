"""What draft_tree is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.kernels.draft_tree.problem import WORD_BITS
from engine.kernels.op import Case, Cost, Tolerance

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATE_BYTES = 4 + 8
ROW_BYTES = 8 + 8 + 4 + 4 + 8  # of a tree, without its ancestor words


@dataclass(frozen=True, slots=True)
class DraftTreeCase(Case):
    """Sizes of one call."""

    num_seqs: int  # N
    horizon: int = 7
    num_candidates: int = 16  # K
    node_budget: int = 16
    extra_rows: int = 0  # rows of a tree beyond root and budget
    step: float = 0.0  # log-probs are multiples of it, so that many weights tie; 0 = as drawn
    spread: float = 1.0  # of the logits; 0 = all are equal
    banned: int = 0  # candidates at the end of a row that are -inf, one more at every depth
    gap: int = 0  # candidates behind every row: views
    seed: int = 0


def inputs(
    case: DraftTreeCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `draft_tree`, without the backend, from the case's seed.

    Log-probs are float32 whatever the dtype. The gap behind a row is NaN.
    """
    del dtype
    generator = torch.Generator().manual_seed(case.seed)
    N, K = case.num_seqs, case.num_candidates
    shape = (N, case.horizon, K)
    logits = torch.randn(shape, generator=generator) * case.spread
    log_probs = logits.log_softmax(-1).sort(-1, descending=True).values
    if case.step:
        log_probs = (log_probs / case.step).round() * case.step
    if case.banned:
        kept = (K - case.banned - torch.arange(case.horizon)).clamp(min=0)
        log_probs[:, torch.arange(K) >= kept.unsqueeze(1)] = -torch.inf
    token_ids = torch.rand(shape, generator=generator).argsort(-1) * 3 + 1
    return {
        "log_probs": _with_gap(log_probs.to(device), case.gap, torch.nan),
        "token_ids": _with_gap(token_ids.to(device), case.gap, -1),
        "root_tokens": torch.randint(1000, (N,), generator=generator).to(device),
        "root_positions": torch.randint(2**20, (N,), generator=generator).to(device),
        "node_budget": case.node_budget,
        "num_rows": 1 + case.node_budget + case.extra_rows,
    }


def _with_gap(values: Tensor, gap: int, fill: float) -> Tensor:
    """Return the same values as a view with `gap` of `fill` behind every row."""
    wider = values.new_full((*values.shape[:-1], values.shape[-1] + gap), fill)
    wider[..., : values.shape[-1]] = values
    return wider[..., : values.shape[-1]]


def cost(case: DraftTreeCase, *, itemsize: int = 4) -> Cost:
    """Bytes of a call: every candidate that is looked at, every row; no arithmetic to speak of."""
    del itemsize
    T = 1 + case.node_budget + case.extra_rows
    candidates = case.horizon * min(case.num_candidates, case.node_budget)
    rows = T * (ROW_BYTES + -(-T // WORD_BITS) * 4)
    return Cost(bytes=case.num_seqs * (candidates * CANDIDATE_BYTES + rows), flops=0)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """Nothing is allowed: a tree is equal or another one."""
    del dtype
    return Tolerance(0.0, 0.0, "float64 sums in the same order, ties settled by the same ranks")


CASES: tuple[DraftTreeCase, ...] = (
    DraftTreeCase("root", "nothing is chosen", 2, node_budget=0, extra_rows=1),
    DraftTreeCase("one-node", "the smallest tree", 3, node_budget=1),
    DraftTreeCase("one-depth", "no node has a child", 3, horizon=1, num_candidates=9),
    DraftTreeCase("exhausted", "fewer prefixes than nodes", 2, 2, 3, 16),
    DraftTreeCase("chain", "one candidate a depth", 2, num_candidates=1, node_budget=7),
    DraftTreeCase("ties", "many equal weights, exact in binary", 5, step=0.5, node_budget=40),
    DraftTreeCase("all-equal", "nothing but ranks decides", 2, spread=0.0, node_budget=63),
    DraftTreeCase("banned", "rows that end at different ranks", 4, banned=8, node_budget=32),
    DraftTreeCase("all-banned", "a depth without candidates", 2, num_candidates=3, banned=1),
    DraftTreeCase("filled", "rows behind the trees", 3, node_budget=31, extra_rows=33),
    DraftTreeCase("strided", "candidates of wider rows", 3, num_candidates=9, gap=5),
    DraftTreeCase("words", "a row more than two words hold", 2, 4, 70, 64),
    DraftTreeCase("sharp", "weights far apart", 2, spread=30.0),
    DraftTreeCase("large", "the largest tree", 1, 15, 512, 512, step=0.25),
)

PRODUCTION: tuple[DraftTreeCase, ...] = tuple(
    DraftTreeCase(f"tree-{budget}", "a budget that is served", 1, 7, budget, budget)
    for budget in (16, 64, 128, 256, 512)
)
