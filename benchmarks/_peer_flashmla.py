"""FlashMLA's dense decoding: a causal chain over pages of 64 rows.

Its scheduling metadata is made by the first call and kept, as one serves all layers of a step.
Written for the interface whose metadata starts empty (deepseek-ai/FlashMLA of 2026); a build
that ships the dense kernel as its legacy half (sgl-flash-mla) is told to use it.
"""

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from benchmarks._peer_inputs import PeerInputs

PAGE_SIZE: Final = 64  # the only one its kernel has


def flashmla_chain(flash_mla: Any, inputs: PeerInputs) -> Callable[[], Tensor]:
    """Return the call that attends a causal chain behind the committed rows."""
    metadata, num_splits = flash_mla.get_mla_metadata()
    legacy = {"use_legacy": True} if hasattr(flash_mla, "has_legacy") else {}
    pool = inputs.kv_pages.view(-1, PAGE_SIZE, 1, inputs.case.latent_dim)
    page_table, lengths = inputs.page_table.contiguous(), inputs.lengths

    def call() -> Tensor:
        out: Tensor = flash_mla.flash_mla_with_kvcache(
            inputs.q,
            pool,
            page_table,
            lengths,
            inputs.case.value_dim,
            metadata,
            num_splits,
            softmax_scale=inputs.scale,
            causal=True,
            is_fp8_kvcache=False,
            **legacy,
        )[0]
        return out

    return call
