"""One block of drafts behind a context, over its length, what is kept of it, and how far it sees.

The drafter of the trained `tiny` pair in float32 has sliding layers and a full one, and positions
beyond what YaRN was stretched from. `cached` drafts behind context rows that are there, as a step
does; `recomputed` makes them anew from the features first, as an engine that kept none would.
`drafter_context` is the knob of full layers: the most rows they see, 0 for all. Features are drawn:
what a draft reads and computes depends on how many there are alone.
"""

from typing import ClassVar, Final

import torch

from benchmarks._device import DEVICE
from benchmarks._regimes import PROFILE, drafter_axes
from benchmarks._suite import CaseFacts, _Suite
from engine import StepShape, preset
from engine.cost import draft_cost
from engine.drafter import DraftRequest
from engine.drafter_context import DrafterContext

AXES = drafter_axes(PROFILE, DEVICE)
REQUEST: Final = DraftRequest(root_tokens=(0,), num_generated=(1,), sequence_ids=(0,))


class Draft(_Suite):
    """Draft the block behind `context_tokens` positions of one sequence."""

    version = "1"
    params: ClassVar[tuple[list[int], list[str], list[int]]] = (
        AXES.context_tokens,
        AXES.context_rows,
        AXES.drafter_contexts,
    )
    param_names: ClassVar[list[str]] = ["context_tokens", "context_rows", "drafter_context"]

    def build(self, context_tokens: int, context_rows: str, drafter_context: int) -> None:
        self.context_tokens, self.most_rows = context_tokens, drafter_context or None
        self.drafter = preset("tiny", device=DEVICE, dtype=torch.float32).drafter
        draws = torch.Generator().manual_seed(0)
        shape = (context_tokens, self.drafter.config.hidden_size)
        self.features = torch.randn(shape, generator=draws).to(DEVICE)
        self.kept = self.filled() if context_rows == "cached" else None

    def filled(self) -> DrafterContext:
        """Return a context with a row for every feature that can still be seen."""
        context = self.drafter.new_context(1, max_context=self.most_rows)
        self.drafter.extend_features(context, self.features, [len(self.features)])
        return context

    def facts(self) -> CaseFacts:
        """Say what a draft reads and computes; what `recomputed` does beside it is its excess."""
        shape = StepShape(self.context_tokens, 1, itemsize=4, drafter_context=self.most_rows)
        cost = draft_cost(self.drafter.config, shape)
        return CaseFacts(
            context_tokens=self.context_tokens,
            bytes=cost.bytes,
            kv_bytes=cost.kv_bytes,
            flops=cost.flops,
        )

    def time_draft(self, context_tokens: int, context_rows: str, drafter_context: int) -> None:
        del context_tokens, context_rows, drafter_context
        self.drafter.draft(self.filled() if self.kept is None else self.kept, REQUEST)
