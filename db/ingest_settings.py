"""What the files do not say: units and directions of metrics, and what was renamed.

[machines]                       # old label = the label its results go under
"gpu-old" = "h200-01"

[[renamed]]                      # a benchmark's old name; its history goes on under the new one
benchmark = "attention.Verify.time_walk"
to = "attention.TreeAttention.time_verify"
version = "1"                    # only results of this version (optional)
to_version = "2"                 # where the new name has another version (optional)
params = { ctx = "context" }     # parameters renamed with it (optional)

[[metrics]]                      # the first entry that fits counts
benchmark = "bench_attention.py::*"    # a pattern; all benchmarks if absent
metric = "gflops"                # a pattern
unit = "GFLOP/s"
direction = "higher"
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from db.benchmark_facts import BenchmarkFacts
from db.columns import Direction
from db.errors import IngestError
from db.json_files import name_of, optional_text, read_bytes, require_text
from db.metrics import MetricSpec

LONGEST = 200
LONGEST_NAME = 500
TABLES = {"machines": dict, "renamed": list, "metrics": list}
KEYS = {
    "renamed": {"benchmark", "to", "version", "to_version", "params"},
    "metrics": {"benchmark", "metric", "unit", "direction"},
}


@dataclass(frozen=True, slots=True)
class Renamed:
    """One benchmark that goes by another name now."""

    benchmark: str
    to: str
    version: str | None = None  # None: of every version
    to_version: str | None = None  # None: the version stays
    params: Mapping[str, str] = field(default_factory=dict)

    def fits(self, benchmark: str, version: str | None) -> bool:
        """Say whether results of this name and version are meant; an unknown version fits."""
        return benchmark == self.benchmark and (
            self.version is None or version is None or version == self.version
        )

    def param_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Give the parameters' names as they are called now."""
        return tuple(self.params.get(name, name) for name in names)


@dataclass(frozen=True, slots=True)
class Meaning:
    """Unit and direction of the metrics that two patterns name."""

    benchmark: str
    metric: str
    unit: str
    direction: Direction


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a configuration file says; without one nothing is renamed or reinterpreted."""

    machines: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[Renamed, ...] = ()
    metrics: tuple[Meaning, ...] = ()

    def machine(self, name: str) -> str:
        """Give the label a machine's results go under."""
        return self.machines.get(name, name)

    def renaming(self, benchmark: str, version: str | None) -> Renamed | None:
        """Give what became of a benchmark's name; None where it kept it."""
        return next((one for one in self.renamed if one.fits(benchmark, version)), None)

    def meaning(self, benchmark: str, metric: str) -> Meaning | None:
        """Give the first entry that speaks of this metric."""
        return next(
            (
                one
                for one in self.metrics
                if fnmatchcase(metric, one.metric) and fnmatchcase(benchmark, one.benchmark)
            ),
            None,
        )

    def facts(self, benchmark: str, facts: BenchmarkFacts) -> BenchmarkFacts:
        """Give an asv benchmark's facts with the unit and direction that were configured."""
        found = self.meaning(benchmark, facts.metric.name)
        if found is None:
            return facts
        return replace(facts, metric=MetricSpec(facts.metric.name, found.unit, found.direction))


def read_settings(path: Path) -> Settings:
    """Read a configuration file.

    Raises
    ------
    IngestError
        It is no TOML, or a table or key is unknown, missing or of the wrong type.
    """
    where = str(path)
    try:
        found = tomllib.loads(read_bytes(path).decode("utf-8"))
    except ValueError as error:
        raise IngestError(f"{where}: expected TOML, got text that is none ({error})") from None
    _refuse_unknown(found, set(TABLES), where)
    for name, kind in TABLES.items():
        if not isinstance(found.get(name, kind()), kind):
            raise IngestError(f"{where}: {name}: expected {kind.__name__}, got another kind")
    return Settings(
        machines=_texts(found.get("machines", {}), f"{where}: machines"),
        renamed=tuple(_renamed(one, at) for one, at in _entries(found, "renamed", where)),
        metrics=tuple(_meaning(one, at) for one, at in _entries(found, "metrics", where)),
    )


def _entries(found: dict[str, Any], name: str, where: str) -> list[tuple[dict[str, Any], str]]:
    entries = []
    for number, one in enumerate(found.get(name, []), start=1):
        at = f"{where}: {name}: entry {number}"
        if not isinstance(one, dict):
            raise IngestError(f"{at}: expected a table, got {name_of(one)}")
        _refuse_unknown(one, KEYS[name], at)
        entries.append((one, at))
    return entries


def _renamed(entry: dict[str, Any], where: str) -> Renamed:
    params = entry.get("params", {})
    if not isinstance(params, dict):
        raise IngestError(f"{where}: params: expected a table, got {name_of(params)}")
    return Renamed(
        benchmark=require_text(entry, "benchmark", LONGEST_NAME, where),
        to=require_text(entry, "to", LONGEST_NAME, where),
        version=optional_text(entry, "version", LONGEST, where),
        to_version=optional_text(entry, "to_version", LONGEST, where),
        params=_texts(params, f"{where}: params"),
    )


def _meaning(entry: dict[str, Any], where: str) -> Meaning:
    direction = require_text(entry, "direction", 16, where)
    if direction not in set(Direction):
        raise IngestError(f"{where}: direction: expected lower or higher, got {direction!r}")
    return Meaning(
        benchmark=optional_text(entry, "benchmark", LONGEST_NAME, where) or "*",
        metric=require_text(entry, "metric", LONGEST_NAME, where),
        unit=require_text(entry, "unit", LONGEST, where),
        direction=Direction(direction),
    )


def _texts(table: dict[str, Any], where: str) -> dict[str, str]:
    return {key: require_text(table, key, LONGEST, where) for key in table}


def _refuse_unknown(table: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise IngestError(f"{where}: expected {', '.join(sorted(known))}, got {unknown[0]!r}")
