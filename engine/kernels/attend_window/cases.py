"""What attend_window is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.op import Case, Cost, Tolerance


@dataclass(frozen=True, slots=True)
class AttendWindowCase(Case):
    """Sizes of one call."""

    lengths: tuple[int, ...]
    block_size: int = 8  # S
    num_key_heads: int = 1  # H_kv
    group: int = 2  # G
    head_dim: int = 16  # D
    behind: int = 12
    ahead: int | None = 12
    spare: int = 5  # slots of a ring beyond the keys that a row sees behind itself
    slots: int | None = None  # that there are; None: the whole ring
    gap: int = 0  # rows of a head in front of its block: a view
    seed: int = 0

    @property
    def ring(self) -> int:
        """Slots of a whole ring."""
        return self.behind - 1 + self.spare

    @property
    def num_slots(self) -> int:
        """Slots there are."""
        return self.ring if self.slots is None else self.slots


def inputs(
    case: AttendWindowCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `attend_window`, without the backend, from the case's seed.

    Rows that no row of a block sees are NaN.
    """
    generator = torch.Generator().manual_seed(case.seed)
    N, S, heads, D = len(case.lengths), case.block_size, case.num_key_heads, case.head_dim
    queries = torch.randn(N, heads, case.group * S, D, generator=generator)
    wide = torch.randn(N, heads, case.gap + S + case.num_slots, 2 * D, generator=generator)
    wide[:, :, : case.gap] = torch.nan
    rows = wide[:, :, case.gap :]
    for n, length in enumerate(case.lengths):
        held = range(max(0, length - case.behind + 1), length)  # of these the first row sees all
        unseen = set(range(case.num_slots)) - {position % case.ring for position in held}
        rows[n, :, [S + slot for slot in sorted(unseen)]] = torch.nan
    return {
        "queries": queries.to(device, dtype),
        "rows": wide.to(device, dtype)[:, :, case.gap :],
        "lengths": torch.tensor(case.lengths, device=device),
        "block_size": S,
        "ring": case.ring,
        "behind": case.behind,
        "ahead": case.ahead,
    }


def cost(case: AttendWindowCase, *, itemsize: int = 2) -> Cost:
    """Bytes and arithmetic of a call, of all the slots there are."""
    S, heads, D = case.block_size, len(case.lengths) * case.num_key_heads, case.head_dim
    keys, packed = S + case.num_slots, case.group * S
    numbers = heads * (2 * packed * D + 2 * keys * D)
    return Cost(bytes=numbers * itemsize, flops=4 * heads * packed * keys * D)


def tolerance(dtype: torch.dtype) -> Tolerance:
    """How far an implementation may be from the reference on the same inputs."""
    if dtype == torch.float64:
        return Tolerance(1e-13, 0.0, "float64 sums in another order")
    if dtype == torch.float32:
        return Tolerance(1e-5, 0.0, "float32 sums in another order")
    return Tolerance(
        1e-2 if dtype == torch.bfloat16 else 2e-3, 0.0, "weights and results are rounded"
    )


CASES: tuple[AttendWindowCase, ...] = (
    AttendWindowCase("one-row", "smallest legal call: a row that sees itself", (0,), 1, group=1,
                     behind=1, ahead=1, spare=1),
    AttendWindowCase("no-context", "an empty window", (0, 0), 3),
    AttendWindowCase("edges", "one key less than a window, as many, one more", (10, 11, 12, 13)),
    AttendWindowCase("turned", "rings that turned, one to the slot", (16, 31, 32, 75, 149), 5),
    AttendWindowCase("causal", "no row ahead", (40, 1), 8, 2, 4, ahead=1),
    AttendWindowCase("partly-ahead", "few rows ahead", (90,), 8, 1, 3, ahead=3),
    AttendWindowCase("long-block", "a block longer than a window", (30, 2), 19, behind=7, ahead=7),
    AttendWindowCase("unbounded-ahead", "a bounded layer that sees everything else", (130,), 7,
                     1, 3, behind=40, ahead=None),
    AttendWindowCase("half-a-ring", "fewer slots than a ring has", (20, 7), 4, behind=70,
                     slots=20),
    AttendWindowCase("wide", "more tiles than one, of more packed rows than one", (300, 171), 16, 1,
                     5, 24, behind=140, ahead=140, spare=64),
    AttendWindowCase("view", "rows of wider ones", (17, 90), 6, 2, 2, 6, gap=3),
)  # fmt: skip

WINDOW, REWIND = 2048, 64
PRODUCTION: tuple[AttendWindowCase, ...] = tuple(
    AttendWindowCase(
        f"kimi-{heads}-{seqs}", "a shape that is served", (65536,) * seqs, 8, heads, 8, 128,
        behind=WINDOW, ahead=WINDOW, spare=REWIND, gap=56,
    )
    for heads, seqs in ((1, 1), (1, 4), (8, 1))
)  # fmt: skip
