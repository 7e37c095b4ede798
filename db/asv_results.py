"""asv's result files as records: one row a benchmark, one cell a case.

Knows asv's formats 1 and 2 and their traps: rows are shorter than their columns, null is failed
and NaN is skipped, a value may stand alone where a list is meant, `started_at` is that of the
last round, results may belong to benchmarks that benchmarks.json no longer has.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from db.benchmark_facts import BenchmarkFacts, orphan_facts
from db.cells import FAILED, OK, SINGLE_SAMPLE, SKIPPED, Cells, digest_of, digests_of
from db.errors import IngestError
from db.json_files import MOST_COUNT, fitting, load_json, name_of, optional, require, require_text
from db.labels import canonical_params

NO_VERSION = ""  # results older than asv's versions of benchmarks
STATS = (
    "stats_q_25",
    "stats_q_75",
    "stats_ci_99_a",
    "stats_ci_99_b",
    "stats_number",
    "stats_repeat",
)
NUMBERS = ("result", *STATS)
COUNTS = frozenset({"stats_number", "stats_repeat"})
# What an existing environment is called by: its version is the machine's, not the commit's.
UNDECLARED_PYTHON = re.compile(r"(same|python\d?(\.exe)?)?")
END_OF_TIME_MS = 253_402_300_800_000  # year 10000, which datetime does not have
LARGEST = sys.float_info.max
FLOATS, INTS = frozenset({float}), frozenset({int})
NUMERIC = frozenset({float, int, type(None)})
# Of a benchmark and of a file; asv's product of parameter lists grows faster than its text.
MOST_CASES, MOST_CASES_OF_FILE = 100_000, 2_000_000
LONGEST_NAME, LONGEST_VERSION, LONGEST_SHA = 500, 200, 64
LONGEST_CASE = 2000  # characters of canonical params; PostgreSQL's index entries end at 2704 bytes
MOST_TEXT = 10_000  # characters of what has no index and no width


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """All cases of one benchmark in one file."""

    name: str
    version: str
    facts: BenchmarkFacts
    started_at_ms: int | None
    duration_s: float | None
    cases: tuple[str, ...]  # canonical params
    cells: Cells


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One commit's results on one machine in one environment."""

    path: Path
    digest: int  # of its bytes
    commit: str
    committed_at_ms: int
    python: str
    requirements: Mapping[str, str]
    env_vars: Mapping[str, str]
    rows: tuple[BenchmarkRow, ...]
    dirty: bool = False  # measured on an edited checkout, as the file itself says


def read_result_file(path: Path, benchmarks: Mapping[str, BenchmarkFacts]) -> ResultFile:
    """Read one result file of format 1 or 2.

    Raises
    ------
    IngestError
        It is no JSON, breaks off early, holds too much, or a value has not the type or number it
        must have.
    """
    found, raw = load_json(path)
    where = str(path)
    results = require(found, "results", dict, where)
    columns = {
        fitting(name, LONGEST_NAME, f"{where}: {name:.80}"): _columns_of(found, name, row, where)
        for name, row in results.items()
    }
    _refuse_too_many(columns.values(), where)
    return ResultFile(
        path=path,
        digest=digest_of(raw),
        commit=require_text(found, "commit_hash", LONGEST_SHA, where),
        committed_at_ms=_milliseconds(require(found, "date", float, where), f"{where}: date"),
        python=_declared_python(optional(found, "python", str, where) or "", where),
        requirements=_declared(found, "requirements", where),
        env_vars=_declared(found, "env_vars", where),
        rows=tuple(
            _row(name, values, benchmarks.get(name) or orphan_facts(name), f"{where}: {name}")
            for name, values in columns.items()
        ),
    )


def _columns_of(found: dict[str, Any], name: str, row: object, where: str) -> dict[str, Any]:
    """Give a benchmark's values by column, whatever the format."""
    version = found.get("version")
    if version == 2:
        names = require(found, "result_columns", list, where)
        if not all(isinstance(one, str) for one in names):
            raise IngestError(f"{where}: result_columns: expected texts, got {names!r:.80}")
        if not isinstance(row, list):
            raise IngestError(f"{where}: {name}: expected a list, got {name_of(row)}")
        if len(row) > len(names):
            raise IngestError(
                f"{where}: {name}: expected at most {len(names)} columns, got {len(row)}"
            )
        # Trailing nulls are not written.
        return dict(zip(names, row, strict=False))
    if version is None or version == 1:
        return _columns_of_format_1(found, name, row, where)
    raise IngestError(f"{where}: version: expected 1 or 2, got {version!r:.80}")


def _columns_of_format_1(
    found: dict[str, Any], name: str, row: object, where: str
) -> dict[str, Any]:
    """Spread what format 1 keeps in one object a benchmark and in tables beside the results."""
    one = dict(row) if isinstance(row, dict) else {"result": row}
    stats = one.get("stats")
    listed = stats if isinstance(stats, list) else [stats]
    columns = {key: one.get(key) for key in ("result", "params", "samples")}
    for column, table in (
        ("version", "benchmark_version"),
        ("started_at", "started_at"),
        ("duration", "duration"),
    ):
        columns[column] = (optional(found, table, dict, where) or {}).get(name)
    for column in STATS:
        columns[column] = [_format_1_stat(entry, column, where) for entry in listed]
    return columns


def _format_1_stat(entry: object, column: str, where: str) -> object:
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise IngestError(f"{where}: stats: expected objects, got {name_of(entry)}")
    key = column.removeprefix("stats_")
    if not key.startswith("ci_99"):
        return entry.get(key)
    low_high = optional(entry, "ci_99", list, where) or [None, None]
    return low_high[0] if key.endswith("a") else low_high[-1]


def _row(name: str, columns: dict[str, Any], facts: BenchmarkFacts, where: str) -> BenchmarkRow:
    params = _param_lists(columns.get("params"), where)
    cases = _cases(facts.param_names, params)
    longest = max(cases, key=len, default="")
    fitting(longest, LONGEST_CASE, f"{where}: params")
    if len(longest.encode()) > LONGEST_CASE:
        raise IngestError(f"{where}: params: expected at most {LONGEST_CASE} bytes a case")
    started_at = optional(columns, "started_at", float, where)
    return BenchmarkRow(
        name=name,
        version=_version(columns.get("version"), where),
        facts=facts,
        started_at_ms=None if started_at is None else _milliseconds(started_at, where),
        duration_s=_finite([optional(columns, "duration", float, where)])[0],
        cases=cases,
        cells=_cells(columns, len(cases), where),
    )


def _version(value: object, where: str) -> str:
    """Give a benchmark's version, which its author may have written as a number."""
    if value is None:
        return NO_VERSION
    if type(value) not in {str, int, float}:
        raise IngestError(f"{where}: version: expected a text, got {name_of(value)}")
    return fitting(str(value or NO_VERSION), LONGEST_VERSION, f"{where}: version")


def _refuse_too_many(columns: Iterable[dict[str, Any]], where: str) -> None:
    """Count cases before any is made: a short file can name billions."""
    total = 0
    for one in columns:
        count = math.prod(len(values) for values in _param_lists(one.get("params"), where))
        total += count
        if count > MOST_CASES or total > MOST_CASES_OF_FILE:
            raise IngestError(
                f"{where}: params: expected at most {MOST_CASES} cases a benchmark and "
                f"{MOST_CASES_OF_FILE} a file, got more"
            )


def _milliseconds(value: float, where: str) -> int:
    """Give a time that a calendar has."""
    if not 0 <= value < END_OF_TIME_MS:
        raise IngestError(f"{where}: expected milliseconds since 1970, got {value}")
    return int(value)


def _param_lists(value: object, where: str) -> tuple[tuple[str, ...], ...]:
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, list) for one in value):
        raise IngestError(f"{where}: params: expected a list of lists, got {value!r:.80}")
    return tuple(tuple(str(text) for text in one) for one in value)


@lru_cache(maxsize=512)
def _cases(names: tuple[str, ...], params: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Name every case in asv's order: the last parameter runs fastest."""
    return tuple(canonical_params(names, values) for values in product(*params))


def _cells(columns: dict[str, Any], count: int, where: str) -> Cells:
    """Read the columns; checks work on whole ones."""
    raw, *statistics = (_numbers(columns.get(name), count, name, where) for name in NUMBERS)
    values, q25, q75, ci_low, ci_high, number, repeats = map(_finite, (raw, *statistics))
    samples = _sample_lists(columns.get("samples"), count, where)
    _refuse_no_counts(number, f"{where}: stats_number")
    _refuse_no_counts(repeats, f"{where}: stats_repeat")
    sizes = map(len, samples)
    counts = [size if n is None else n for n, size in zip(_whole(repeats), sizes, strict=True)]
    statuses = _statuses(raw, values, counts)
    packed = (values, q25, q75, ci_low, ci_high, number)
    return Cells(
        status=statuses,
        value=values,
        q25=q25,
        q75=q75,
        ci_low=ci_low,
        ci_high=ci_high,
        number=_whole(number),
        n=[one or None for one in counts] if 0 in counts else counts,
        digest=digests_of(packed, counts, statuses, samples),
        samples=samples,
    )


def _refuse_no_counts(values: Sequence[float | None], where: str) -> None:
    known = [one for one in values if one is not None]
    if known and not (min(known) >= 0 and max(known) <= MOST_COUNT):
        raise IngestError(f"{where}: expected 0..{MOST_COUNT}, got {min(known)}..{max(known):.6g}")


def _numbers(value: object, count: int, column: str, where: str) -> Sequence[float | None]:
    """Give one number for each case; a null stands for as many, a lone number for one."""
    if value is None:
        return [None] * count
    listed: list[Any] = value if isinstance(value, list) else [value]
    if len(listed) != count:
        raise IngestError(f"{where}: {column}: expected {count} values, got {len(listed)}")
    kinds = set(map(type, listed))
    if not kinds <= NUMERIC:
        wrong = next(one for one in listed if type(one) not in NUMERIC)
        raise IngestError(f"{where}: {column}: expected numbers or null, got {name_of(wrong)}")
    # Counts stay whole: they are most of what is, and are held to their column's width later.
    return [_as_float(one) for one in listed] if int in kinds and column not in COUNTS else listed


def _as_float(value: float | None) -> float | None:
    """Give a whole number as a float; one that is longer than any of them as infinite."""
    if type(value) is not int:
        return value
    return float(value) if -LARGEST <= value <= LARGEST else math.inf


def _finite(values: Sequence[float | None]) -> Sequence[float | None]:
    """Keep what a database can compare: NaN and what is beyond all floats become NULL."""
    if _are_finite(values):
        return values
    return [
        None if value is None or not -LARGEST <= value <= LARGEST else value for value in values
    ]


def _are_finite(values: Sequence[Any]) -> bool:
    """Whether all are surely finite and none is missing; quick, because most columns are so."""
    kinds = set(map(type, values))
    if kinds == FLOATS:
        return math.isfinite(sum(values))  # one that is not finite leaves no sum that is
    return kinds == INTS and min(values) >= -LARGEST and max(values) <= LARGEST


def _whole(values: Sequence[float | None]) -> Sequence[int | None]:
    if INTS.issuperset(map(type, values)):
        return values  # type: ignore[return-value]
    return [None if value is None else int(value) for value in values]


def _statuses(
    raw: Sequence[float | None], values: Sequence[float | None], counts: Sequence[int]
) -> list[str]:
    """Say what each case gave."""
    if None not in values and 1 not in counts:
        return [OK] * len(counts)
    return [_status(*one) for one in zip(raw, values, counts, strict=True)]


def _status(raw: float | None, value: float | None, n: int) -> str:
    """Say what a case gave; an infinite number is no measurement, so it failed."""
    if value is not None:
        return SINGLE_SAMPLE if n == 1 else OK
    return SKIPPED if raw is not None and math.isnan(raw) else FAILED


def _sample_lists(value: object, count: int, where: str) -> Sequence[tuple[float, ...]]:
    """Give the samples of each case; those of a lone case may lack the list around them."""
    if value is None:
        return [()] * count
    listed = value if isinstance(value, list) else [value]
    if count == 1 and NUMERIC.issuperset(map(type, listed)) and listed != [None]:
        listed = [listed]
    if len(listed) != count:
        raise IngestError(f"{where}: samples: expected {count} lists, got {len(listed)}")
    return [_samples(one, where) for one in listed]


def _samples(value: object, where: str) -> tuple[float, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not NUMERIC.issuperset(map(type, value)):
        raise IngestError(f"{where}: samples: expected a list of numbers, got {value!r:.80}")
    return tuple(float(one) for one in _finite(value) if one is not None)


def _declared(found: dict[str, Any], key: str, where: str) -> dict[str, str]:
    """Give what a commit declares, without paths: they are the machine's, not the commit's."""
    declared = optional(found, key, dict, where) or {}
    fitting(repr(declared), MOST_TEXT, f"{where}: {key}")
    return {str(name): _without_path(str(value or "")) for name, value in declared.items()}


def _declared_python(text: str, where: str) -> str:
    """Give the version a file's interpreter has by its name; a plain `python` declares none."""
    name = fitting(_without_path(text), LONGEST_VERSION, f"{where}: python")
    return "" if UNDECLARED_PYTHON.fullmatch(name) else name.removeprefix("python")


def _without_path(text: str) -> str:
    """Keep the last part of a path."""
    return text.replace("\\", "/").rpartition("/")[2]
