"""What lies between a slow tree attention and a fast one, a factor at a time.

One layer of a TP8 rank's verify pass, 9 tree tokens x 8 heads in bfloat16, batch 1, cold caches.
A variant is the factors that are on, '+'-joined in the order of `FACTORS`; none on is `none`:

- `read_once`, `split`, `packed`: switches of `engine.kernels.ladder_attention`
- `page_64`: pages of 64 rows instead of 1
- `in_order`: pages that follow each other in memory instead of shuffled ones

What a factor is worth depends on where it stands, so it is read three times: in the fixed order,
alone at the slow end, and removed at the fast end. All variants of a context are measured in turns
in one process, each after its result agreed with the op's reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from benchmarks._interleaved import Stored, _InterleavedSuite
from benchmarks._regimes import PROFILE, ladder_axes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks._interleaved import Absent, Contestant

FACTORS: Final = ("read_once", "split", "packed", "page_64", "in_order")
VALUE_DIM: Final = 512
ROPE_DIM: Final = 64
NUM_ROUNDS: Final = 56  # in twice as many as variants each follows each other equally often
CONTEXTS: Final = ladder_axes(PROFILE).context_tokens


def name_of(factors: Sequence[str]) -> str:
    """Name the variant in which these factors are on."""
    return "+".join(factor for factor in FACTORS if factor in factors) or "none"


def visited() -> list[str]:
    """Return the variants: the fixed order, each factor alone, each removed from all; no twins."""
    climbed = [FACTORS[:count] for count in range(len(FACTORS) + 1)]
    alone = [(factor,) for factor in FACTORS]
    removed = [tuple(other for other in FACTORS if other != factor) for factor in FACTORS]
    return list(dict.fromkeys(name_of(factors) for factors in (*climbed, *alone, *removed)))


class Ladder(_InterleavedSuite):
    """Attend 9 tree tokens to `context_tokens` committed rows, with some of the factors on."""

    version = "1"
    num_rounds = NUM_ROUNDS
    window_s = 1.0
    params: ClassVar[tuple[list[int], list[str]]] = (CONTEXTS, visited())
    param_names: ClassVar[list[str]] = ["context_tokens", "variant"]
    value_dim: ClassVar[int] = VALUE_DIM
    rope_dim: ClassVar[int] = ROPE_DIM

    def setup_cache(self) -> dict[tuple[Any, ...], Stored]:
        """Measure all variants of all contexts; asv knows a cache by the line of this method."""
        return self.measured()

    def contestants(self, group: Any) -> Sequence[Contestant | Absent]:
        """Build the variants of a context; skipped where no Triton kernel can run."""
        from benchmarks._ladder_rungs import Problem, rungs  # noqa: PLC0415 - imports torch

        (context_tokens,) = group
        problem = Problem(context_tokens, self.value_dim, self.rope_dim)
        return rungs(problem, self.axes()[1])
