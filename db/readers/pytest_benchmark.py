"""pytest-benchmark's JSON: `--benchmark-json` and the files of `--benchmark-autosave`.

The value of a case is the median of its rounds. Numbers that a test put into `extra_info` are
metrics of their own; what they mean, only the configuration can say.

Source: ionelmc/pytest-benchmark src/pytest_benchmark/stats.py, plugin.py, utils.py
"""

from collections.abc import Iterator
from typing import Any

from db.columns import Direction
from db.json_files import optional, optional_text, require
from db.readers.records import (
    SECONDS,
    ForeignRun,
    Measurement,
    count,
    instant,
    name_in,
    number,
    objects,
    samples,
)

TOOL = "pytest-benchmark"
KEYS = frozenset({"machine_info", "commit_info", "benchmarks"})
NO_COMMIT = "unversioned"  # what it calls the commit outside of a repository
TIME = "time"


def read(found: dict[str, Any], where: str) -> ForeignRun:
    """Read one file's object; raises IngestError where it is not what the tool writes."""
    machine = require(found, "machine_info", dict, where)
    commit = require(found, "commit_info", dict, where)
    named = optional_text(commit, "id", 64, f"{where}: commit_info")
    cpu = machine.get("cpu")
    brand = cpu.get("brand_raw") if isinstance(cpu, dict) else None
    facts = {
        "arch": machine.get("machine"),
        "cpu": brand or machine.get("processor"),
        "os": " ".join(str(machine.get(key) or "") for key in ("system", "release")).strip(),
    }
    return ForeignRun(
        tool=TOOL,
        measurements=tuple(
            one
            for index, entry in enumerate(objects(found["benchmarks"], f"{where}: benchmarks"))
            for one in _measurements(entry, f"{where}: benchmarks: {index}")
        ),
        machine=optional_text(machine, "node", 200, f"{where}: machine_info"),
        machine_facts={name: str(value)[:200] for name, value in facts.items() if value},
        commit=None if named == NO_COMMIT else named,
        committed_at_s=instant(commit.get("time"), f"{where}: commit_info: time"),
        started_at_s=instant(found.get("datetime"), f"{where}: datetime"),
        python=_minor(optional_text(machine, "python_version", 200, f"{where}: machine_info")),
        dirty=bool(optional(commit, "dirty", bool, f"{where}: commit_info")),
    )


def _measurements(entry: dict[str, Any], where: str) -> Iterator[Measurement]:
    full = name_in(require(entry, "fullname", str, where), f"{where}: fullname")
    name, params = _case(full, entry, where)
    stats = require(entry, "stats", dict, where)
    recorded = samples(stats.get("data"), f"{where}: data")
    value = number(stats.get("median"), f"{where}: median")
    yield Measurement(
        benchmark=name,
        params=params,
        metric=TIME,
        unit=SECONDS,
        direction=Direction.LOWER,
        value=value,
        n=count(stats.get("rounds"), f"{where}: rounds"),
        number=count(stats.get("iterations"), f"{where}: iterations"),
        q25=number(stats.get("q1"), f"{where}: q1"),
        q75=number(stats.get("q3"), f"{where}: q3"),
        samples=recorded,
    )
    for metric, extra in (optional(entry, "extra_info", dict, where) or {}).items():
        if type(extra) in {int, float}:
            meaning = name_in(metric, f"{where}: extra_info")
            told = number(extra, f"{where}: extra_info: {metric:.80}")
            yield Measurement(name, params, meaning, None, None, told)


def _case(full: str, entry: dict[str, Any], where: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Part a test's name from its parameters, which its id only abbreviates."""
    shown = optional(entry, "param", str, where)
    name = full.removesuffix(f"[{shown}]") if shown else full
    params = optional(entry, "params", dict, where) or {}
    if params:
        return name, tuple((key, str(value)) for key, value in params.items())
    return name, (("param", shown),) if shown else ()


def _minor(version: str | None) -> str:
    """Give the interpreter's minor version: asv, too, declares no patch level."""
    return ".".join((version or "").split(".")[:2])
