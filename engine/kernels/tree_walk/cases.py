"""What walk_tree is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.op import Case, Cost, Tolerance

ROW_BYTES = 8 + 8 + 4  # what the target says of a node, its token and its parent
STEP_BYTES = 8 + 8 + 8 + 8  # of a node of a path: slot read; path, token and source written


@dataclass(frozen=True, slots=True)
class WalkTreeCase(Case):
    """Sizes of one call."""

    num_seqs: int  # N
    num_rows: int = 17  # T
    width: int = 8
    behind: int = 0  # rows behind the smallest tree; each tree has one more than the one before
    agreement: float = 0.9  # share of nodes after which the target says a child's token
    step: int = 4  # a node's parent is at most so many nodes before it: 1 is a chain
    unsaid: bool = False  # whether the target says nothing after a node of the first tree
    gap: int = 0  # tokens behind every row of the target's: a view
    seed: int = 0


def inputs(
    case: WalkTreeCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `walk_tree`, without the backend, from the case's seed.

    Tokens of siblings differ; the rows behind a tree would be walked to if they were looked at.
    """
    del dtype
    generator = torch.Generator().manual_seed(case.seed)
    N, T = case.num_seqs, case.num_rows
    nodes = torch.arange(T)
    back = torch.randint(1, case.step + 1, (N, T), generator=generator)
    parents = torch.where(nodes > 0, (nodes - back).clamp(min=0), -1).int()
    token_ids = torch.rand(N, T, generator=generator).argsort(1)
    said = torch.randint(T, 2 * T, (N, T), generator=generator)  # no node's token
    agrees = torch.rand(N, T, generator=generator) < case.agreement
    agrees[:, 0] = False
    rows = torch.arange(N).unsqueeze(1).expand(N, T)[agrees]
    said[rows, parents[agrees].long()] = token_ids[agrees]
    tree_sizes = (T - case.behind + torch.arange(N)).clamp(1, T).int()
    if case.unsaid:
        said[0, int(tree_sizes[0]) - 1] = -1
    said_wide = torch.full((N, T + case.gap), -1)
    said_wide[:, :T] = said
    operands = {
        "token_ids": token_ids,
        "parents": parents,
        "tree_sizes": tree_sizes,
        "slots": torch.rand(N * T, generator=generator).argsort().view(N, T) + 2**33,
    }
    return {
        "target_tokens": said_wide.to(device)[:, :T],
        **{name: one.to(device) for name, one in operands.items()},
        "width": case.width,
    }


def cost(case: WalkTreeCase, *, itemsize: int = 4) -> Cost:
    """Bytes of a call: every row of the trees, every node of the paths; no arithmetic."""
    del itemsize
    tree = case.num_rows * ROW_BYTES + case.width * STEP_BYTES
    return Cost(bytes=case.num_seqs * tree, flops=0)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """Nothing is allowed: a walk is equal or another one."""
    del dtype
    return Tolerance(0.0, 0.0, "integers")


CASES: tuple[WalkTreeCase, ...] = (
    WalkTreeCase("root", "nothing to walk to", 2, num_rows=1, width=1),
    WalkTreeCase("disagree", "no child is what the target says", 2, agreement=0.0),
    WalkTreeCase("chain", "every node is accepted", 3, width=17, agreement=1.0, step=1),
    WalkTreeCase("cut", "paths longer than they may be", 3, width=3, agreement=1.0, step=1),
    WalkTreeCase("bushy", "many siblings", 5, num_rows=65, step=30),
    WalkTreeCase("behind", "rows behind the trees", 9, behind=9),
    WalkTreeCase("unsaid", "a row is no distribution", 3, behind=4, unsaid=True),
    WalkTreeCase("strided", "what the target says is part of wider rows", 3, gap=5),
    WalkTreeCase("large", "the largest tree", 2, num_rows=513, width=16, step=60),
)

PRODUCTION: tuple[WalkTreeCase, ...] = tuple(
    WalkTreeCase(f"walk-{rows}", "a budget that is served", 1, rows, 8, step=20)
    for rows in (17, 65, 513)
)
