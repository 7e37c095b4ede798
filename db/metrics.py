"""What asv's numbers mean: name, unit and which way is better.

asv itself takes lower for better everywhere, so a throughput that falls is invisible to it. A
benchmark may say `direction = "higher"`, which asv carries into benchmarks.json; else the unit
decides.
"""

from dataclasses import dataclass

from db.columns import Direction

# asv's types by the prefix of a method's name, for benchmarks that benchmarks.json lost.
KIND_BY_PREFIX = {
    "timeraw_": "time",
    "time_": "time",
    "peakmem_": "peakmemory",
    "mem_": "memory",
    "track_": "track",
}
UNIT_BY_KIND = {"time": "seconds", "memory": "bytes", "peakmemory": "bytes"}
UNKNOWN_UNIT = "unit"  # asv's own word for a track_* without one
RATE_SUFFIXES = ("/s", "per second", "/sec", "/j")
MORE_IS_BETTER = frozenset({"tokens", "flops", "speedup", "hit ratio"})


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Name, unit and better direction of a number."""

    name: str
    unit: str
    direction: Direction


def metric_of(kind: str, unit: str, direction: Direction | None = None) -> MetricSpec:
    """Give the metric of a benchmark of asv's type `kind`; a stated direction wins."""
    return MetricSpec(kind, unit, direction or _direction_of(unit))


def kind_of(benchmark: str) -> str:
    """Guess asv's type from a benchmark's name, as asv itself does when it finds one."""
    method = benchmark.rpartition(".")[2]
    return next(
        (kind for prefix, kind in KIND_BY_PREFIX.items() if method.startswith(prefix)), "track"
    )


def _direction_of(unit: str) -> Direction:
    plain = unit.strip().lower()
    higher = plain.endswith(RATE_SUFFIXES) or plain in MORE_IS_BETTER
    return Direction.HIGHER if higher else Direction.LOWER
