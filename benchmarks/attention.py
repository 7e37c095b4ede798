"""Tree attention alone: one layer of the verify pass, over context, backend and page size.

The shape is that of one rank of Kimi K2.6 under TP8: 8 heads, a tree of 9 tokens, latent rows of
576 elements. On CUDA the body is the replay of a graph in bfloat16, timed between two events
without the launch gap; on a CPU it is the reference in float32, timed by the wall. Pages are
shuffled. Before every sample the caches are flushed: cold. `Fp8Attention` is the same call over
rows in fp8, which are 656 bytes instead of 1152.
"""

from functools import partial
from typing import Any, ClassVar, Final

import torch

from benchmarks._device import DEVICE
from benchmarks._regimes import PROFILE, attention_axes, fp8_attention_axes
from benchmarks._suite import CaseFacts, Clock, _Suite
from benchmarks._timing import CacheFlush, CudaQueue, captured, settled_clock
from engine.kernels import OPS, TreeAttentionCase, launched_programs

NUM_HEADS: Final = 8
TREE: Final = (-1, 0, 0, 1, 1, 2, 3, 4, 6)  # parents of 9 tokens, root first
VALUE_DIM: Final = 512
ROPE_DIM: Final = 64
DTYPE: Final = torch.bfloat16 if DEVICE == "cuda" else torch.float32
OP: Final = OPS["tree_attention"]
AXES = attention_axes(PROFILE, DEVICE)
FP8_AXES = fp8_attention_axes(PROFILE, DEVICE)


class TreeAttention(_Suite):
    """Attend 9 tree tokens to `context_tokens` committed rows and to their ancestors."""

    version = "1"
    window_validity = ("warm_window",) if DEVICE == "cuda" else ()
    params: ClassVar[tuple[list[int], list[str], list[int]]] = (
        AXES.context_tokens,
        AXES.attention_backends,
        AXES.page_sizes,
    )
    param_names: ClassVar[list[str]] = ["context_tokens", "attention_backend", "page_size"]
    is_fp8: ClassVar[bool] = False

    def build(self, context_tokens: int, attention_backend: str, page_size: int) -> None:
        if not _runs_here(attention_backend):
            raise NotImplementedError(
                f"{attention_backend}: not there, or not for this GPU"
            )  # asv's skip
        self.case = TreeAttentionCase(
            name="benchmark",
            reason="one layer of a TP8 rank's verify pass",
            context_lens=(context_tokens,),
            trees=(TREE,),
            num_heads=NUM_HEADS,
            value_dim=VALUE_DIM,
            rope_dim=ROPE_DIM,
            page_size=page_size,
            is_fp8=self.is_fp8,
        )
        self.backend = attention_backend
        self.arguments = OP.inputs(self.case, device=DEVICE, dtype=DTYPE)
        if self.is_fp8 and not _has_kernels(attention_backend, self.arguments):
            raise NotImplementedError(f"{attention_backend}: no fp8 rows on this GPU")
        self.flush = CacheFlush.of(DEVICE)
        call = partial(OP.implementations[attention_backend], **self.arguments)
        self.body = captured(call) if DEVICE == "cuda" else call

    def reset(self) -> None:
        self.flush()

    def reset_in_window(self) -> None:
        """Flush nothing: a flush moves more bytes than the shorter bodies, and would be counted."""

    def make_clock(self) -> Clock:
        """Return the clock that leaves the launch gap out; on a CPU there is none."""
        if DEVICE == "cuda":
            return settled_clock(CudaQueue(), self.body)
        return super().make_clock()

    def facts(self) -> CaseFacts:
        """Say what one call must move and compute, and how many programs do it."""
        cost = OP.cost(self.case, itemsize=DTYPE.itemsize)
        programs = None
        if self.backend != "reference":
            programs = launched_programs(**self.arguments, backend=self.backend)
        return CaseFacts(
            context_tokens=self.case.context_lens[0],
            bytes=cost.bytes,
            kv_bytes=cost.kv_bytes,
            flops=cost.flops,
            programs=programs,
        )

    def time_cold(self, context_tokens: int, attention_backend: str, page_size: int) -> None:
        del context_tokens, attention_backend, page_size
        self.body()


class Fp8Attention(TreeAttention):
    """Attend 9 tree tokens to `context_tokens` committed fp8 rows and to their ancestors."""

    version = "1"
    params: ClassVar[tuple[list[int], list[str], list[int]]] = (
        FP8_AXES.context_tokens,
        FP8_AXES.attention_backends,
        FP8_AXES.page_sizes,
    )
    is_fp8 = True


def _has_kernels(backend: str, arguments: dict[str, Any]) -> bool:
    """Say whether a backend that is here takes these arguments too."""
    if backend == "reference":
        return True
    major, minor = torch.cuda.get_device_capability()
    return bool(OP.kernels(backend, 10 * major + minor, **arguments))


def _runs_here(backend: str) -> bool:
    """Say whether a backend is there, and has kernels for this device or needs none."""
    if backend not in OP.implementations:
        return False
    archs = getattr(OP, "archs", {}).get(backend)  # older engines do not tell
    if DEVICE == "cpu" or archs is None:
        return True
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor in archs
