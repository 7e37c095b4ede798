"""The telemetry sidecar as records: one line for each case and process.

The format is written beside the suites and shared by nothing but this text: JSON lines, all keys
always present, null where unknown, refused where a line is not that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from db.errors import IngestError
from db.json_files import name_of, optional, parse_object, require

SCHEMA = 1


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
    try:
        raw = path.read_bytes().splitlines()
    except OSError as error:
        raise IngestError(f"{path}: expected a readable file, got {error.strerror}") from None
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
    run_id = optional(found, "run_id", str, where)
    return SidecarLine(
        where=where,
        window_id=require(found, "window_id", str, where),
        benchmark=require(found, "benchmark", str, where),
        version=optional(found, "version", str, where),
        params=_texts(found, "params", where),
        invocation=run_id or file_name,
        run_id=run_id,
        commit=optional(found, "commit", str, where),
        machine=optional(found, "machine", str, where) or sole_machine,
        process_number=optional(found, "process_number", int, where),
        pid=require(found, "pid", int, where),
        n=require(found, "n", int, where),
        median_s=_finite(require(found, "median_s", float, where), "median_s", where),
        samples_s=_numbers(found, "samples_s", where),
        started_at_s=_finite(require(found, "started_at", float, where), "started_at", where),
        ended_at_s=_finite(require(found, "ended_at", float, where), "ended_at", where),
        timer=require(found, "timer", str, where),
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
            name: _counter(value, f"{where}: counters: {name}")
            for name, value in require(found, "counters", dict, where).items()
        },
        validity=_texts(found, "validity", where),
        provenance=_provenance(require(found, "provenance", dict, where), f"{where}: provenance"),
    )


def _rates(found: dict[str, Any], where: str) -> Rates:
    return Rates(
        read_bytes_per_s=_known(found, "read_bytes_per_s", where),
        matmul_flops_per_s=_known(found, "matmul_flops_per_s", where),
        source=require(found, "source", str, where),
        dtype=optional(found, "dtype", str, where),
    )


def _device(found: dict[str, Any], where: str) -> Device:
    return Device(
        kind=require(found, "kind", str, where),
        name=require(found, "name", str, where),
        gpu_uuid=optional(found, "gpu_uuid", str, where),
        driver=optional(found, "driver", str, where),
        power_limit_w=_known(found, "power_limit_w", where),
        num_sms=optional(found, "num_sms", int, where),
        runtime=optional(found, "runtime", str, where),
    )


def _counter(found: object, where: str) -> Counter:
    if not isinstance(found, dict):
        raise IngestError(f"{where}: expected a JSON object, got {name_of(found)}")
    return Counter(
        unit=require(found, "unit", str, where),
        median=_known(found, "median", where),
        low=_known(found, "min", where),
        high=_known(found, "max", where),
        n=optional(found, "n", int, where),
    )


def _provenance(found: dict[str, Any], where: str) -> Provenance:
    return Provenance(
        engine_file=optional(found, "engine_file", str, where),
        engine_tree=optional(found, "engine_tree", str, where),
        dirty=optional(found, "dirty", bool, where),
        external=require(found, "external", bool, where),
        source=optional(found, "source", str, where),
    )


def _stages(found: dict[str, Any], where: str) -> dict[str, float]:
    stages = optional(found, "stage_seconds", dict, where) or {}
    return {
        str(name): _finite(require(stages, name, float, where), str(name), where) for name in stages
    }


def _texts(found: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = require(found, key, list, where)
    if not all(isinstance(value, str) for value in values):
        raise IngestError(f"{where}: {key}: expected texts, got {values!r:.80}")
    return tuple(values)


def _numbers(found: dict[str, Any], key: str, where: str) -> tuple[float, ...]:
    values = require(found, key, list, where)
    if not all(type(value) in {int, float} for value in values):
        raise IngestError(f"{where}: {key}: expected numbers, got {values!r:.80}")
    return tuple(_finite(float(value), key, where) for value in values)


def _known(found: dict[str, Any], key: str, where: str) -> float | None:
    value = optional(found, key, float, where)
    return None if value is None else _finite(value, key, where)


def _finite(value: float, key: str, where: str) -> float:
    if not math.isfinite(value):
        raise IngestError(f"{where}: {key}: expected a finite number, got {value}")
    return value
