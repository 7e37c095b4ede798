"""What benchmarks.json says of the numbers: units, directions, names of parameters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from db.columns import Direction
from db.errors import IngestError
from db.json_files import fitting, load_json, name_of, optional, require, require_text
from db.metrics import UNIT_BY_KIND, UNKNOWN_UNIT, MetricSpec, kind_of, metric_of


@dataclass(frozen=True, slots=True)
class BenchmarkFacts:
    """What a benchmark measures and how its parameters are called."""

    kind: str
    metric: MetricSpec
    param_names: tuple[str, ...]


def read_benchmarks(path: Path) -> dict[str, BenchmarkFacts]:
    """Read benchmarks.json."""
    found, _ = load_json(path)
    return {
        name: _facts(entry, f"{path}: {name}") for name, entry in found.items() if name != "version"
    }


def orphan_facts(name: str) -> BenchmarkFacts:
    """Guess what a benchmark measured that benchmarks.json no longer has."""
    kind = kind_of(name)
    return BenchmarkFacts(kind, metric_of(kind, UNIT_BY_KIND.get(kind, UNKNOWN_UNIT)), ())


def _facts(entry: object, where: str) -> BenchmarkFacts:
    if not isinstance(entry, dict):
        raise IngestError(f"{where}: expected a JSON object, got {name_of(entry)}")
    kind = require_text(entry, "type", 32, where)
    unit = fitting(require(entry, "unit", str, where), 200, f"{where}: unit")
    metric = metric_of(kind, unit, _direction(entry, where))
    names = require(entry, "param_names", list, where)
    if not all(isinstance(name, str) for name in names):
        raise IngestError(f"{where}: param_names: expected texts, got {names!r:.80}")
    fitting("".join(names), 2000, f"{where}: param_names")
    return BenchmarkFacts(kind, metric, tuple(names))


def _direction(entry: dict[str, Any], where: str) -> Direction | None:
    stated = optional(entry, "direction", str, where)
    if stated is None:
        return None
    if stated not in set(Direction):
        raise IngestError(f"{where}: direction: expected lower or higher, got {stated!r}")
    return Direction(stated)
