"""Where implementations of one layer's verify attention are compared, and which ones.

Knows shapes and names, no tensor: asv starts a process for each case, and most only hand on what
another one measured. Importing this module imports no torch.
"""

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PEERS_VARIABLE: Final = "DDTREE_BENCH_PEERS"  # folder of peers that are not importable
# Backends of the op, with the tree's mask.
OURS: Final = ("cuda", "cuda_mma", "triton_split", "triton_serial")
TREE_PEERS: Final = ("sglang_triton", "fa3_cascade", "flashinfer_fa3_cascade")
CHAIN_PEERS: Final = ("flashmla", "fa3", "flashinfer_fa3", "flashinfer_fa2", "vllm_triton")
IMPLEMENTATIONS: Final = (*OURS, *TREE_PEERS, *CHAIN_PEERS)
PAGE_ORDERS: Final = ("shuffled", "in_order")


@dataclass(frozen=True, slots=True)
class PeerCell:
    """One problem all implementations get: the same rows, queries and pages."""

    num_heads: int
    tree_tokens: int
    context_tokens: int  # of each sequence; their mean where `uneven`
    num_seqs: int
    page_size: int
    page_order: str
    uneven: bool = False

    @property
    def context_lens(self) -> tuple[int, ...]:
        """Committed rows of each sequence; uneven ones lie between 1/8 and 15/8 of the mean."""
        if not self.uneven:
            return (self.context_tokens,) * self.num_seqs
        low, high = self.context_tokens // 8, 15 * self.context_tokens // 8
        return tuple(
            low + (high - low) * _rank(index, self.num_seqs) // max(1, self.num_seqs - 1)
            for index in range(self.num_seqs)
        )

    @property
    def label(self) -> str:
        """The cell in one word, for logs and for choosing cells by a regular expression."""
        batch = f"{self.num_seqs}{'-uneven' if self.uneven else ''}"
        shape = f"{self.num_heads}x{self.tree_tokens}-c{self.context_tokens}-b{batch}"
        return f"{shape}-p{self.page_size}-{self.page_order}"


def _rank(index: int, count: int) -> int:
    """Order of a length among `count`: short and long ones take turns."""
    return count - 1 - index // 2 if index % 2 else index // 2


def mask_of(implementation: str) -> str:
    """Say which mask an implementation computes: the tree's, or a causal chain of its size."""
    return "chain" if implementation in CHAIN_PEERS else "tree"


def implementations(
    profile: str, environ: Mapping[str, str] = os.environ, *, has_driver: bool
) -> list[str]:
    """Return who is compared: nobody, unless peers were named or a GPU gets the full profile."""
    wanted = environ.get(PEERS_VARIABLE) or (profile == "full" and has_driver)
    return list(IMPLEMENTATIONS) if wanted else []


def has_cuda_driver() -> bool:
    """Say whether CUDA's driver is installed, which is cheaper than to ask torch for a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
