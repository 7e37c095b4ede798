"""nvbench's JSON: `--json`.

The value of a state is the median of its isolated GPU times where the file has one, else their
mean, under the tag nvbench gives it. Binary files of samples that it names are not opened: a file
from outside does not decide what is read. The tool names neither host nor commit.

Source: NVIDIA/nvbench nvbench/json_printer.cu, nvbench/detail/measure_cold.cu
"""

from collections.abc import Iterator, Mapping
from typing import Any

from db.columns import Direction
from db.errors import IngestError
from db.json_files import MOST_COUNT, optional, require, require_text
from db.readers.records import (
    SECONDS,
    ForeignRun,
    Measurement,
    name_in,
    number,
    objects,
)

TOOL = "nvbench"
KEYS = frozenset({"devices", "benchmarks", "meta"})
GPU_MEDIAN, GPU_MEAN = "nv/cold/time/gpu/median", "nv/cold/time/gpu/mean"
QUARTILES = ("nv/cold/time/gpu/q1", "nv/cold/time/gpu/q3")
SAMPLE_SIZE = "nv/cold/sample_size"
NUMERIC = ("int64", "float64")
OWN = "nv/"  # tags of the tool; all others are the author's
KNOWN = {
    "nv/batch/time/gpu/mean": (SECONDS, Direction.LOWER),
    "nv/cold/time/cpu/mean": (SECONDS, Direction.LOWER),
    "nv/cpu_only/time/cpu/mean": (SECONDS, Direction.LOWER),
    "nv/cold/bw/global/bytes_per_second": ("bytes/s", Direction.HIGHER),
    "nv/cold/bw/item_rate": ("items/s", Direction.HIGHER),
}


def read(found: dict[str, Any], where: str) -> ForeignRun:
    """Read one file's object; raises IngestError where it is not what the tool writes."""
    devices = {
        one.get("id"): require_text(one, "name", 200, f"{where}: devices")
        for one in objects(found["devices"], f"{where}: devices")
        if isinstance(one.get("id"), int)
    }
    return ForeignRun(
        tool=TOOL,
        measurements=tuple(
            one
            for index, entry in enumerate(objects(found["benchmarks"], f"{where}: benchmarks"))
            for one in _of_benchmark(entry, devices, f"{where}: benchmarks: {index}")
        ),
    )


def _of_benchmark(
    entry: dict[str, Any], devices: Mapping[object, str], where: str
) -> Iterator[Measurement]:
    name = name_in(require(entry, "name", str, where), f"{where}: name")
    read = []
    for index, state in enumerate(objects(entry.get("states"), f"{where}: states")):
        at = f"{where}: states: {index}"
        is_skipped = optional(state, "is_skipped", bool, at) or False
        read.append((_params(state, devices, at), is_skipped, _values(state, at)))
    has_medians = any(GPU_MEDIAN in values for _, _, values in read)
    main = GPU_MEDIAN if has_medians else GPU_MEAN
    for params, is_skipped, values in read:
        if is_skipped:
            yield Measurement(name, params, main, SECONDS, Direction.LOWER, None, skipped=True)
        else:
            yield from _of_state((name, params), main, values)


def _of_state(
    case: tuple[str, tuple[tuple[str, str], ...]], main: str, values: Mapping[str, float | None]
) -> Iterator[Measurement]:
    sampled = values.get(SAMPLE_SIZE)
    n = None if sampled is None or not 0 <= sampled <= MOST_COUNT else int(sampled)
    if main in values:
        q25, q75 = (values.get(tag) for tag in QUARTILES)
        yield Measurement(
            *case,
            main,
            SECONDS,
            Direction.LOWER,
            values[main],
            n=n,
            q25=q25 if main == GPU_MEDIAN else None,
            q75=q75 if main == GPU_MEDIAN else None,
        )
    for tag, value in values.items():
        if tag in KNOWN:
            unit, direction = KNOWN[tag]
            yield Measurement(*case, tag, unit, direction, value)
        elif not tag.startswith(OWN):
            yield Measurement(*case, tag, None, None, value)


def _params(
    state: dict[str, Any], devices: Mapping[object, str], where: str
) -> tuple[tuple[str, str], ...]:
    """Give the axes' values; a device is one by its name, as ids move with the slots."""
    axes = tuple(
        (require(one, "name", str, where), str(one.get("value", one.get("input_string", ""))))
        for one in objects(state.get("axis_values"), f"{where}: axis_values")
    )
    device = optional(state, "device", int, where)
    if device is None:
        return axes
    if device not in devices:
        raise IngestError(f"{where}: device: expected one of {list(devices)}, got {device}")
    return (*axes, ("device", devices[device]))


def _values(state: dict[str, Any], where: str) -> dict[str, float | None]:
    """Give the numbers of a state by their tags; they are written as texts."""
    found: dict[str, float | None] = {}
    for summary in objects(state.get("summaries"), f"{where}: summaries"):
        tag = name_in(require(summary, "tag", str, where), f"{where}: tag")
        for one in objects(summary.get("data"), f"{where}: {tag}"):
            if one.get("name") == "value" and one.get("type") in NUMERIC:
                found[tag] = _number(one.get("value"), f"{where}: {tag}")
    return found


def _number(value: object, where: str) -> float | None:
    if not isinstance(value, str):
        return number(value, where)
    try:
        return number(float(value), where)
    except ValueError:
        raise IngestError(f"{where}: expected a number, got {value!r:.80}") from None
