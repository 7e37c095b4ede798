"""Tree attention of one layer at the shape one of eight ranks sees of Kimi K2.6.

8 heads, a tree of 9 tokens, latent rows of 576 elements (512 + 64), one sequence, pages in shuffled
order; bfloat16 on CUDA, float32 on a CPU. The cache is cold before every sample.
"""

from typing import ClassVar, Final

import torch

from benchmarks._regimes import DEVICE, PROFILE, attention_axes
from benchmarks._suite import CaseFacts, Clock, _Suite
from benchmarks._timing import ColdCache, CudaQueue, QueuedClock
from engine.kernels import OPS
from engine.kernels.tree_attention import TreeAttentionCase, num_programs, tree_attention

PARENTS: Final = (-1, 0, 1, 2, 0, 4, 5, 1, 7)  # golden tree G1: three branches, four deep
NUM_HEADS: Final = 8
VALUE_DIM: Final = 512
ROPE_DIM: Final = 64
DTYPE: Final = torch.bfloat16 if DEVICE == "cuda" else torch.float32
AXES = attention_axes(PROFILE, DEVICE)


class TreeAttention(_Suite):
    """One call over a committed prefix of `context_tokens` rows and the tree's own rows."""

    version = "1"
    params: ClassVar[tuple[list[int], list[int], list[str]]] = (
        AXES.context_tokens,
        AXES.page_sizes,
        AXES.backends,
    )
    param_names: ClassVar[list[str]] = ["context_tokens", "page_size", "attention_backend"]

    def build(self, context_tokens: int, page_size: int, attention_backend: str) -> None:
        self.case = TreeAttentionCase(
            name="kimi-k2.6-tp8",
            reason="the shape of the incident",
            context_lens=(context_tokens,),
            trees=(PARENTS,),
            num_heads=NUM_HEADS,
            value_dim=VALUE_DIM,
            rope_dim=ROPE_DIM,
            page_size=page_size,
        )
        self.inputs = OPS["tree_attention"].inputs(self.case, device=DEVICE, dtype=DTYPE)
        out, lse = tree_attention(**self.inputs, backend=attention_backend)
        self.inputs |= {"out": out, "lse": lse}
        self.backend = attention_backend
        self.cache = ColdCache(DEVICE)

    def reset(self) -> None:
        self.cache.flush()

    def make_clock(self) -> Clock:
        """Return the device's own time; on a CPU the body is all there is."""
        if DEVICE == "cpu":
            return super().make_clock()
        return QueuedClock(CudaQueue(), lambda: tree_attention(**self.inputs, backend=self.backend))

    def facts(self) -> CaseFacts:
        """Say what the call must move and compute, and how many programs share the work."""
        cost = OPS["tree_attention"].cost(self.case, itemsize=DTYPE.itemsize)
        return CaseFacts(
            context_tokens=self.case.context_lens[0],
            bytes=cost.bytes,
            kv_bytes=cost.kv_bytes,
            flops=cost.flops,
            programs=num_programs(self.backend, **self.inputs),
        )

    def time_cold(self, context_tokens: int, page_size: int, attention_backend: str) -> None:
        del context_tokens, page_size
        tree_attention(**self.inputs, backend=attention_backend)
