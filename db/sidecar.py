"""The telemetry sidecar as records: one line for each case and process.

The format is written beside the suites and shared by nothing but this text: JSON lines, all keys
always present, null where unknown, refused where a line is not that.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from db.errors import IngestError
from db.json_files import (
    fitting,
    name_of,
    optional,
    optional_count,
    optional_text,
    parse_object,
    read_bytes,
    require,
    require_text,
)

SCHEMA = 1
MOST_IN_LIST = 100_000  # samples, params, codes, counters or stages of one line
Many = TypeVar("Many", list[Any], dict[str, Any])
LONGEST_TEXT = 10_000  # characters of what has no width of its own


@dataclass(frozen=True, slots=True)
class Device:
    """What did the work, and under which limits."""

    kind: str
    name: str
    gpu_uuid: str | None
    driver: str | None
    power_limit_w: float | None
    num_sms: int | None
    runtime: str | None


@dataclass(frozen=True, slots=True)
class Rates:
    """Best rates known of the device in this run."""

    read_bytes_per_s: float | None
    matmul_flops_per_s: float | None
    source: str
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter over the window."""

    unit: str
    median: float | None
    low: float | None
    high: float | None
    n: int | None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Whose code ran."""

    engine_file: str | None
    engine_tree: str | None
    dirty: bool | None
    external: bool
    source: str | None


@dataclass(frozen=True, slots=True)
class SidecarLine:
    """What one process saw of one case."""

    where: str  # file and line, for messages
    window_id: str
    benchmark: str
    version: str | None
    params: tuple[str, ...]
    invocation: str
    run_id: str | None
    commit: str | None
    machine: str | None
    process_number: int | None
    pid: int
    n: int
    median_s: float
    samples_s: tuple[float, ...]
    started_at_s: float
    ended_at_s: float
    timer: str
    stage_seconds: Mapping[str, float]
    commit_length: float | None
    bytes: int | None
    kv_bytes: int | None
    flops: int | None
    context_tokens: int | None
    programs: int | None
    rates: Rates
    device: Device
    counters: Mapping[str, Counter]
    validity: tuple[str, ...]
    provenance: Provenance


def read_sidecar(path: Path, sole_machine: str | None) -> list[SidecarLine]:
    """Read a sidecar; a line that names no machine belongs to the only one of its tree.

    Raises
    ------
    IngestError
        A line is no JSON object (a process killed while writing leaves one), has another schema,
        or a value of the wrong type. The message names file and line.
    """
    raw = read_bytes(path).splitlines()
    return [
        _line(parse_object(text, f"{path}:{number}"), f"{path}:{number}", path.stem, sole_machine)
        for number, text in enumerate(raw, start=1)
        if text.strip()
    ]


def _line(
    found: dict[str, Any], where: str, file_name: str, sole_machine: str | None
) -> SidecarLine:
    schema = require(found, "schema", int, where)
    if schema != SCHEMA:
        raise IngestError(f"{where}: schema: expected {SCHEMA}, got {schema}")
    run_id = optional_text(found, "run_id", 200, where)
    return SidecarLine(
        where=where,
        window_id=require_text(found, "window_id", 64, where),
        benchmark=require_text(found, "benchmark", 500, where),
        version=optional_text(found, "version", 200, where),
        params=_texts(found, "params", where),
        invocation=run_id or fitting(file_name, 200, f"{where}: name of the file"),
        run_id=run_id,
        commit=optional_text(found, "commit", 64, where),
        machine=optional_text(found, "machine", 200, where) or sole_machine,
        process_number=optional_count(found, "process_number", where),
        pid=require(found, "pid", int, where),
        n=_count(found, "n", where),
        median_s=_finite(require(found, "median_s", float, where), "median_s", where),
        samples_s=_numbers(found, "samples_s", where),
        started_at_s=_finite(require(found, "started_at", float, where), "started_at", where),
        ended_at_s=_finite(require(found, "ended_at", float, where), "ended_at", where),
        timer=require_text(found, "timer", 16, where),
        stage_seconds=_stages(found, where),
        commit_length=_known(found, "commit_length", where),
        bytes=optional(found, "bytes", int, where),
        kv_bytes=optional(found, "kv_bytes", int, where),
        flops=optional(found, "flops", int, where),
        context_tokens=optional(found, "context_tokens", int, where),
        programs=optional(found, "programs", int, where),
        rates=_rates(require(found, "ceilings", dict, where), f"{where}: ceilings"),
        device=_device(require(found, "device", dict, where), f"{where}: device"),
        counters={
            fitting(name, 64, f"{where}: counters: {name:.80}"): _counter(
                value, f"{where}: counters: {name}"
            )
            for name, value in _bearable(require(found, "counters", dict, where), where).items()
        },
        validity=_texts(found, "validity", where),
        provenance=_provenance(require(found, "provenance", dict, where), f"{where}: provenance"),
    )


def _rates(found: dict[str, Any], where: str) -> Rates:
    return Rates(
        read_bytes_per_s=_known(found, "read_bytes_per_s", where),
        matmul_flops_per_s=_known(found, "matmul_flops_per_s", where),
        source=require_text(found, "source", 16, where),
        dtype=optional_text(found, "dtype", 32, where),
    )


def _device(found: dict[str, Any], where: str) -> Device:
    return Device(
        kind=require_text(found, "kind", 16, where),
        name=require_text(found, "name", 180, where),
        gpu_uuid=optional_text(found, "gpu_uuid", 180, where),
        driver=optional_text(found, "driver", 200, where),
        power_limit_w=_known(found, "power_limit_w", where),
        num_sms=optional_count(found, "num_sms", where),
        runtime=optional_text(found, "runtime", 200, where),
    )


def _counter(found: object, where: str) -> Counter:
    if not isinstance(found, dict):
        raise IngestError(f"{where}: expected a JSON object, got {name_of(found)}")
    return Counter(
        unit=require_text(found, "unit", 32, where),
        median=_known(found, "median", where),
        low=_known(found, "min", where),
        high=_known(found, "max", where),
        n=optional_count(found, "n", where),
    )


def _provenance(found: dict[str, Any], where: str) -> Provenance:
    return Provenance(
        engine_file=optional_text(found, "engine_file", LONGEST_TEXT, where),
        engine_tree=optional_text(found, "engine_tree", 64, where),
        dirty=optional(found, "dirty", bool, where),
        external=require(found, "external", bool, where),
        source=optional_text(found, "source", LONGEST_TEXT, where),
    )


def _stages(found: dict[str, Any], where: str) -> dict[str, float]:
    stages = optional(found, "stage_seconds", dict, where) or {}
    return {
        fitting(name, 64, f"{where}: {name:.80}"): _finite(
            require(stages, name, float, where), name, where
        )
        for name in _bearable(stages, where)
    }


def _texts(found: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = require(found, key, list, where)
    if not all(isinstance(value, str) for value in values):
        raise IngestError(f"{where}: {key}: expected texts, got {values!r:.80}")
    fitting("".join(values), LONGEST_TEXT, f"{where}: {key}")
    return tuple(_bearable(values, where))


def _numbers(found: dict[str, Any], key: str, where: str) -> tuple[float, ...]:
    values = require(found, key, list, where)
    if not all(type(value) in {int, float} for value in values):
        raise IngestError(f"{where}: {key}: expected numbers, got {values!r:.80}")
    return tuple(_finite(value, key, where) for value in _bearable(values, where))


def _count(found: dict[str, Any], key: str, where: str) -> int:
    require(found, key, int, where)
    return optional_count(found, key, where) or 0


def _bearable(values: Many, where: str) -> Many:
    if len(values) > MOST_IN_LIST:
        raise IngestError(f"{where}: expected at most {MOST_IN_LIST} entries, got {len(values)}")
    return values


def _known(found: dict[str, Any], key: str, where: str) -> float | None:
    value = optional(found, key, float, where)
    return None if value is None else _finite(value, key, where)


def _finite(value: float, key: str, where: str) -> float:
    """Give a float; a whole number may be longer than any of them."""
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise IngestError(f"{where}: {key}: expected a finite number, got {value!r:.80}")
    return float(value)
