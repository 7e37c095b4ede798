"""A rank's experts as a table, without asv: ``python -m benchmarks._moe_table [--tokens N ...]``.

For each number of tokens the distinct experts that they hit, the bytes of these, the time of the
whole layer and of its routed experts alone, the rate at which the latter read, and the time of a
token beside its floor, cold caches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from benchmarks._ceilings import measure_ceilings
from benchmarks._device import DEVICE
from benchmarks._rank_table import floor_s
from benchmarks._timing import CacheFlush, CudaQueue, captured, settled_clock
from benchmarks.moe import RANK, layer_cost, random_rows, rank_layer, routed_cost, routed_operands
from engine.kernels import grouped_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks._suite import Clock
    from engine.moe import Moe

TOKENS: Final = (1, 9, 17, 33, 65, 256, 1024)
ROUNDS: Final = 15


def table(moe: Moe, tokens: Sequence[int], backend: str, num_rounds: int) -> list[str]:
    """Measure the passes of one layer and return the table's lines."""
    ceilings, flush = measure_ceilings(), CacheFlush.of(DEVICE)
    peak = ceilings.read_bytes_per_s or float("inf")
    head = ("tokens", "hit", "MB", "layer us", "floor", "times", "routed us", "GB/s", "share")
    widths = (6, 4, 8, 9, 8, 6, 9, 6, 6)
    titles = " ".join(f"{title:>{width}}" for title, width in zip(head, widths, strict=True))
    lines = [f"{titles} {'us/token':>9} {'floor':>8}"]
    for num_tokens in tokens:
        x = random_rows(num_tokens, moe)
        layer_s = seconds(partial(moe, x, backend=backend), flush, num_rounds)
        operands = routed_operands(moe, x)
        routed_s = seconds(partial(grouped_experts, **operands, backend=backend), flush, num_rounds)
        cost, routed = layer_cost(moe, x), routed_cost(moe, x)
        least_s = floor_s(cost, ceilings)
        num_hit = len(set(operands["expert_ids"].flatten().tolist()))
        rate = routed.bytes / routed_s
        lines.append(
            f"{num_tokens:6} {num_hit:4} {cost.bytes / 1e6:8.1f} {layer_s * 1e6:9.1f} "
            f"{least_s * 1e6:8.1f} {layer_s / least_s:6.2f} {routed_s * 1e6:9.1f} "
            f"{rate / 1e9:6.0f} {100 * rate / peak:5.0f}% {layer_s / num_tokens * 1e6:9.2f} "
            f"{least_s / num_tokens * 1e6:8.2f}"
        )
    return lines


def seconds(call: Callable[[], Any], flush: CacheFlush, num_rounds: int) -> float:
    """Return the median seconds of a call that finds nothing in the caches."""
    body = captured(call) if DEVICE == "cuda" else call
    clock = _clock(body)
    times_s = []
    for _ in range(num_rounds):
        flush()
        clock.start()
        body()
        times_s.append(clock.stop())
    return statistics.median(times_s)


def _clock(body: Callable[[], object]) -> Clock:
    from benchmarks._suite import WallClock  # noqa: PLC0415 - the profile of suites is no matter

    return settled_clock(CudaQueue(), body) if DEVICE == "cuda" else WallClock()


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a layer and print its table."""
    parser = argparse.ArgumentParser(description="a layer's experts by the tokens of a pass")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--moe-backend", default="triton")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args(arguments)
    lines = table(rank_layer(RANK, DEVICE), asked.tokens, asked.moe_backend, asked.rounds)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
