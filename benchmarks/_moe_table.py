"""A rank's experts as a table, without asv: ``python -m benchmarks._moe_table [--tokens N ...]``.

For each number of tokens the distinct experts that they hit, the bytes of these, the time of the
whole layer and of its routed experts alone, the rate at which the latter read, and the time of a
token beside its floor, cold caches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks._ceilings import measure_ceilings
from benchmarks._device import DEVICE, cpu_device, cuda_device
from benchmarks._rank_table import floor_s
from benchmarks._timing import CacheFlush, CudaQueue, captured, settled_clock
from benchmarks.moe import RANK, layer_cost, random_rows, rank_layer, routed_cost, routed_operands
from engine.kernels import grouped_experts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks._ceilings import Ceilings
    from benchmarks._suite import Clock
    from engine.moe import Moe

TOKENS: Final = (1, 9, 17, 33, 65, 256, 1024)
ROUNDS: Final = 15
BACKENDS: Final = {"cpu": ("reference",), "cuda": ("cuda", "triton")}


@dataclass(frozen=True, slots=True)
class Row:
    """All figures of one number of tokens and backend."""

    num_tokens: int
    backend: str
    num_hit: int  # distinct experts
    layer_bytes: int  # that a layer cannot do without
    layer_s: float
    layer_floor_s: float
    routed_bytes: int  # of the routed experts alone
    routed_s: float
    read_share: float  # of the measured read rate, by the routed experts

    def line(self) -> str:
        """Return the line of the table."""
        rate = self.routed_bytes / self.routed_s
        times, share = self.layer_s / self.layer_floor_s, 100 * self.read_share
        per_token = self.layer_s / self.num_tokens, self.layer_floor_s / self.num_tokens
        return (
            f"{self.num_tokens:6} {self.backend:10} {self.num_hit:4} {self.layer_bytes / 1e6:8.1f} "
            f"{self.layer_s * 1e6:9.1f} {self.layer_floor_s * 1e6:8.1f} {times:6.2f} "
            f"{self.routed_s * 1e6:9.1f} {rate / 1e9:6.0f} {share:5.0f}% "
            f"{per_token[0] * 1e6:9.2f} {per_token[1] * 1e6:8.2f}"
        )


def head() -> str:
    """Return the table's first line."""
    titles = ("tokens", "backend", "hit", "MB", "layer us", "floor", "times", "routed us", "GB/s",
              "share", "us/token", "floor")  # fmt: skip
    widths = (6, -10, 4, 8, 9, 8, 6, 9, 6, 6, 9, 8)
    pairs = zip(titles, widths, strict=True)
    return " ".join(f"{title:<{-w}}" if w < 0 else f"{title:>{w}}" for title, w in pairs)


def rows(
    moe: Moe, tokens: Sequence[int], backend: str, num_rounds: int, ceilings: Ceilings
) -> Iterator[Row]:
    """Measure the passes of one layer."""
    flush = CacheFlush.of(DEVICE)
    peak = ceilings.read_bytes_per_s or float("inf")
    for num_tokens in tokens:
        x = random_rows(num_tokens, moe)
        operands = routed_operands(moe, x)
        cost, routed = layer_cost(moe, x), routed_cost(moe, x)
        routed_s = seconds(partial(grouped_experts, **operands, backend=backend), flush, num_rounds)
        yield Row(
            num_tokens=num_tokens,
            backend=backend,
            num_hit=len(set(operands["expert_ids"].flatten().tolist())),
            layer_bytes=cost.bytes,
            layer_s=seconds(partial(moe, x, backend=backend), flush, num_rounds),
            layer_floor_s=floor_s(cost, ceilings),
            routed_bytes=routed.bytes,
            routed_s=routed_s,
            read_share=routed.bytes / routed_s / peak,
        )


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
    parser.add_argument("--backends", nargs="+", default=BACKENDS[DEVICE])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    asked = parser.parse_args(arguments)
    moe, ceilings = rank_layer(RANK, DEVICE), measure_ceilings()
    sys.stdout.write(head() + "\n")
    measured = []
    for backend in asked.backends:
        for row in rows(moe, asked.tokens, backend, asked.rounds, ceilings):
            measured.append(asdict(row))
            sys.stdout.write(row.line() + "\n")
            sys.stdout.flush()
    if asked.json is not None:
        device = cpu_device() if DEVICE == "cpu" else cuda_device()[0]
        facts = {"device": asdict(device), "ceilings": asdict(ceilings), "rows": measured}
        asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
