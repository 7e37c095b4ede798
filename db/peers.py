"""Which cases are other people's code: measured beside ours, never ours to explain or to alarm."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "peers."  # of the benchmarks in which peers stand beside our backends
IMPLEMENTATION: Final = "implementation"
OURS: Final = frozenset({"cuda", "triton_split", "triton_serial"})


def is_peer(benchmark: str, params: str) -> bool:
    """Whether a case times the code of somebody else."""
    if not benchmark.startswith(PREFIX):
        return False
    settings = dict(item.split("=", 1) for item in params.split(", ") if "=" in item)
    return settings.get(IMPLEMENTATION, "").strip("'\"") not in OURS
