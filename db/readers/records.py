"""What every reader of another tool's file gives: one invocation and its measurements."""

import datetime as dt
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from db.columns import Direction
from db.errors import IngestError
from db.json_files import MOST_COUNT, fitting, name_of

SECONDS = "seconds"
LONGEST_NAME, LONGEST_UNIT = 500, 200
MOST_MEASUREMENTS = 200_000  # of a file
MOST_SAMPLES = 1_000_000  # of a measurement


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number of one case. Without a direction it needs one from the configuration."""

    benchmark: str
    params: tuple[tuple[str, str], ...]  # name and value, in the tool's order
    metric: str
    unit: str | None
    direction: Direction | None
    value: float | None  # None: failed, or skipped
    skipped: bool = False
    n: int | None = None  # samples behind the value, where the tool says
    number: int | None = None  # calls timed together
    q25: float | None = None
    q75: float | None = None
    samples: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignRun:
    """What one file says of an invocation; None where the tool does not say."""

    tool: str
    measurements: tuple[Measurement, ...]
    machine: str | None = None
    machine_facts: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    committed_at_s: float | None = None
    started_at_s: float | None = None
    python: str = ""
    dirty: bool = False


def number(value: object, where: str) -> float | None:
    """Give a finite float; None for null, NaN and infinities, which are no measurement."""
    if value is None:
        return None
    if type(value) not in {int, float}:
        raise IngestError(f"{where}: expected a number or null, got {name_of(value)}")
    try:
        found = float(value)  # type: ignore[arg-type]
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def count(value: object, where: str) -> int | None:
    """Give a whole number from 0 that a column holds."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MOST_COUNT:
        raise IngestError(f"{where}: expected 0..{MOST_COUNT}, got {value!r:.80}")
    return value


def objects(value: object, where: str) -> list[dict[str, Any]]:
    """Give a list of JSON objects; null is an empty one."""
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise IngestError(f"{where}: expected a list of objects, got {value!r:.80}")
    if len(listed) > MOST_MEASUREMENTS:
        raise IngestError(f"{where}: expected at most {MOST_MEASUREMENTS}, got {len(listed)}")
    return listed


def samples(value: object, where: str) -> tuple[float, ...]:
    """Give a list of samples; null is an empty one."""
    listed = [] if value is None else value
    if not isinstance(listed, list) or len(listed) > MOST_SAMPLES:
        raise IngestError(f"{where}: expected a list of numbers, got {value!r:.80}")
    found = (number(one, where) for one in listed)
    return tuple(one for one in found if one is not None)


def instant(value: object, where: str) -> float | None:
    """Read an instant as Python writes it; one without a zone is UTC, as the tool means it."""
    if value is None:
        return None
    try:
        when = dt.datetime.fromisoformat(str(value))
        return (when if when.tzinfo else when.replace(tzinfo=dt.UTC)).timestamp()
    except (ValueError, OverflowError):
        raise IngestError(f"{where}: expected an ISO date, got {value!r:.80}") from None


def name_in(text: str, where: str) -> str:
    """Give the name of a benchmark or metric, which is not empty and fits its column."""
    if not text:
        raise IngestError(f"{where}: expected a name, got an empty text")
    return fitting(text, LONGEST_NAME, where)


def quartiles(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Give the lower and the upper quartile of samples; None of fewer than two."""
    if len(values) < 2:
        return None, None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
