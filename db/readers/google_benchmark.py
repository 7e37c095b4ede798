"""google-benchmark's JSON: `--benchmark_out_format=json`.

The repetitions of a case are its samples and their median its value; of a file with aggregates
alone it is the aggregate called median, else mean. The tool names no commit.

Source: google/benchmark src/json_reporter.cc, src/benchmark_name.cc
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from db.columns import Direction
from db.errors import IngestError
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
    quartiles,
)

TOOL = "google-benchmark"
KEYS = frozenset({"context", "benchmarks"})
SECONDS_IN = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
TIMES = ("real_time", "cpu_time")
KNOWN = {
    "items_per_second": ("items/s", Direction.HIGHER),
    "bytes_per_second": ("bytes/s", Direction.HIGHER),
    "allocs_per_iter": ("allocations", Direction.LOWER),
    "max_bytes_used": ("bytes", Direction.LOWER),
    "total_allocated_bytes": ("bytes", Direction.LOWER),
    "net_heap_growth": ("bytes", Direction.LOWER),
}
# Numbers of an entry that say how it was measured.
HOW = frozenset(
    {
        *("family_index", "per_family_instance_index", "repetitions", "repetition_index"),
        *("threads", "iterations", *TIMES),
    }
)
ARGUMENT = re.compile(r"-?\d+|[^:/]+:[^/]*")
HOW_MEASURED = re.compile(
    r"(iterations|repeats|min_time|min_warmup_time):.*|real_time|process_time|manual_time"
)


def read(found: dict[str, Any], where: str) -> ForeignRun:
    """Read one file's object; raises IngestError where it is not what the tool writes."""
    context = require(found, "context", dict, where)
    cases: dict[str, list[dict[str, Any]]] = {}
    for index, entry in enumerate(objects(found["benchmarks"], f"{where}: benchmarks")):
        name = optional(entry, "run_name", str, f"{where}: benchmarks: {index}")
        name = name or require(entry, "name", str, f"{where}: benchmarks: {index}")
        cases.setdefault(name_in(name, f"{where}: benchmarks: {index}"), []).append(entry)
    cpus = optional(context, "num_cpus", int, f"{where}: context")
    return ForeignRun(
        tool=TOOL,
        measurements=tuple(
            one
            for name, entries in cases.items()
            for one in _measurements(name, entries, f"{where}: {name:.80}")
        ),
        machine=optional_text(context, "host_name", 200, f"{where}: context"),
        machine_facts={} if cpus is None else {"num_cpu": str(cpus)},
        started_at_s=instant(context.get("date"), f"{where}: context: date"),
    )


def _measurements(
    run_name: str, entries: Sequence[dict[str, Any]], where: str
) -> Iterator[Measurement]:
    name, params = _case(run_name)
    runs = [one for one in entries if one.get("run_type", "iteration") == "iteration"]
    if not runs:
        runs = _aggregate(entries, where)
    failed = any(one.get("error_occurred") for one in runs)
    skipped = not failed and any(one.get("skipped") for one in runs)
    if failed or skipped:
        yield Measurement(name, params, TIMES[0], SECONDS, Direction.LOWER, None, skipped=skipped)
        return
    metrics = [*TIMES, *dict.fromkeys(key for one in runs for key in one if _is_metric(one, key))]
    for metric in metrics:
        values = [
            value * _factor(one, metric, where)
            for one in runs
            if (value := number(one.get(metric), f"{where}: {metric:.80}")) is not None
        ]
        yield _measurement((name, params), metric, runs, values, where)


def _measurement(
    case: tuple[str, tuple[tuple[str, str], ...]],
    metric: str,
    runs: Sequence[dict[str, Any]],
    values: Sequence[float],
    where: str,
) -> Measurement:
    unit, direction = KNOWN.get(metric, (None, None))
    if metric in TIMES:
        unit, direction = SECONDS, Direction.LOWER
    is_aggregate = runs[0].get("run_type") == "aggregate"
    repetitions = count(runs[0].get("repetitions"), f"{where}: repetitions")
    number_of_calls = runs[0].get("iterations")
    q25, q75 = quartiles(values)
    return Measurement(
        benchmark=case[0],
        params=case[1],
        metric=name_in(metric, where),
        unit=unit,
        direction=direction,
        value=statistics.median(values) if values else None,
        n=repetitions if is_aggregate else len(values),
        # Of a long run it may be more than a column of counts holds; it decides nothing.
        number=None
        if is_aggregate or type(number_of_calls) is not int
        else min(max(number_of_calls, 0), 2**31 - 1),
        q25=q25,
        q75=q75,
        samples=() if is_aggregate else tuple(values),
    )


def _aggregate(entries: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Give the one aggregate that stands for a value."""
    for name in ("median", "mean"):
        named = [one for one in entries if one.get("aggregate_name") == name]
        if named:
            return named[:1]
    raise IngestError(f"{where}: expected repetitions, a median or a mean, got none")


def _is_metric(entry: dict[str, Any], key: str) -> bool:
    return key not in HOW and type(entry[key]) in {int, float}


def _factor(entry: dict[str, Any], metric: str, where: str) -> float:
    if metric not in TIMES:
        return 1.0
    unit = optional(entry, "time_unit", str, where) or "ns"
    if unit not in SECONDS_IN:
        raise IngestError(f"{where}: time_unit: expected one of {list(SECONDS_IN)}, got {unit!r}")
    return SECONDS_IN[unit]


def _case(run_name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Part a name from its arguments: `BM_walk/64/page:16/threads:4/real_time`."""
    parts = run_name.split("/")
    arguments: list[str] = []
    while len(parts) > 1 and (HOW_MEASURED.fullmatch(parts[-1]) or ARGUMENT.fullmatch(parts[-1])):
        part = parts.pop()
        if not HOW_MEASURED.fullmatch(part):
            arguments.insert(0, part)
    params = []
    for index, part in enumerate(arguments):
        name, colon, value = part.partition(":")
        params.append((name, value) if colon else (f"arg{index}", part))
    return "/".join(parts), tuple(params)
