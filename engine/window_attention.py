"""Attention of those drafter layers whose rows see a window of the context, not all of it."""

from dataclasses import dataclass

from torch import Tensor

from engine.context_rows import ContextRows
from engine.kernels import attend_window


@dataclass(frozen=True, slots=True, eq=False)
class WindowAttention:
    """Of blocks behind contexts of any lengths, which are known on the device alone."""

    behind: int  # as `Sight` counts
    ahead: int | None
    ring: int
    lengths: Tensor  # [N] int64, context rows
    num_slots: int  # at least those that hold rows
    backend: str  # of `attend_window`

    def __call__(self, queries: Tensor, rows: ContextRows, layer: int) -> Tensor:
        """Mix what the block's queries see, [N * S, H * head_dim]."""
        return attend_window(
            queries,
            rows.attended(layer, rows.block_size + self.num_slots),
            self.lengths,
            block_size=rows.block_size,
            ring=self.ring,
            behind=self.behind,
            ahead=self.ahead,
            backend=self.backend,
        )
