"""Result files as rows: identities first, then only what is not there yet, in bulk.

A result is there if its series, commit, start and digest are. asv gives a benchmark one start, so
a file rewritten for some cases repeats the others under the new start; a repeated case that has
statistics carries the same digest and is the measurement that is there already.
"""

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, delete, select

from db.asv_results import BenchmarkRow, ResultFile
from db.cells import COLUMNS, FAILED, SKIPPED, Cells, digest_of
from db.columns import OrderBasis
from db.first_load import ForeignKey, put_keys_back, take_keys_off
from db.labels import variant_label
from db.models import (
    Benchmark,
    Commit,
    Machine,
    Metric,
    Result,
    Run,
    Sample,
    Series,
    Variant,
)
from db.registry import Registry, insert_many, reserve_ids
from db.session import chunks

CELLS_AT_ONCE = 20_000
SERIES_PLACE = ("benchmark_id", "metric_id", "machine_id", "variant_id")
# In the order in which _New puts the values together.
RESULT_COLUMNS = (
    *("series_id", "commit_id", "run_id", "started_at_ms", "duration_s", "dirty"),
    *COLUMNS,
)
_Identity = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class MachineFile:
    """A result file, the machine it is of, and the cases of it that must not be stored."""

    machine: Mapping[str, str | None]  # a row of the table, its label under "name"
    file: ResultFile
    refused: frozenset[tuple[str, str]] = frozenset()  # benchmark and canonical params


@dataclass(frozen=True, slots=True)
class _New:
    """Some cases of a benchmark's row, with their series."""

    row: BenchmarkRow
    series_ids: Sequence[int]
    cells: Cells

    def at(self, places: Sequence[int]) -> "_New":
        """Give those at some places, in order."""
        if len(places) == len(self.cells):
            return self
        series_ids = [self.series_ids[place] for place in places]
        return _New(self.row, series_ids, self.cells.at(places))

    def identities(self, commit_id: int) -> list[_Identity]:
        """Say when two results are one measurement: with statistics, whatever their starts."""
        cells, start = self.cells, self.row.started_at_ms
        if None not in cells.n:
            return list(zip(self.series_ids, repeat(commit_id), cells.digest, strict=False))
        every = zip(self.series_ids, cells.digest, cells.n, strict=True)
        return [_identity(series_id, commit_id, one, start, n) for series_id, one, n in every]

    def rows(self, commit_id: int, run_id: int, *, dirty: bool) -> Iterator[tuple[Any, ...]]:
        """Give them as rows of `RESULT_COLUMNS`."""
        same = (commit_id, run_id, self.row.started_at_ms, self.row.duration_s, dirty)
        return zip(self.series_ids, *map(repeat, same), *self.cells.columns, strict=False)


@dataclass(slots=True)
class StoreCounts:
    """What became of the values so far."""

    files: int = 0
    values: int = 0
    new_results: int = 0
    unchanged: int = 0
    failed: int = 0
    skipped: int = 0
    withdrawn: int = 0
    commits: set[int] = field(default_factory=set)


class ResultStore:
    """Stores result files within one write transaction."""

    def __init__(self, connection: Connection, now: dt.datetime) -> None:
        self.counts = StoreCounts()
        self.commits = Registry(connection, Commit, ["sha"])
        self.machines = Registry(connection, Machine, ["name"])
        self.benchmarks = Registry(connection, Benchmark, ["name", "version"])
        self._connection = connection
        self._now = now
        self._metrics = Registry(connection, Metric, ["name", "unit", "direction"])
        self._variants = Registry(connection, Variant, ["digest"])
        self._series = Registry(
            connection,
            Series,
            ["benchmark_id", "params", "metric_id", "machine_id", "variant_id"],
        )
        self._runs = Registry(
            connection, Run, ["commit_id", "machine_id", "variant_id", "source_digest"]
        )
        self._series_of_cases: dict[tuple[Any, ...], Sequence[int]] = {}
        self._pending: list[MachineFile] = []
        self._pending_cells = 0
        self._keys_off: Sequence[ForeignKey] | None = None  # None: not asked yet

    def add(self, entry: MachineFile) -> None:
        """Take a file in; rows are written once enough of them have come together."""
        self._pending.append(entry)
        self._pending_cells += sum(len(row.cells) for row in entry.file.rows)
        if self._pending_cells >= CELLS_AT_ONCE:
            if self._keys_off is None:
                self._keys_off = take_keys_off(self._connection, most_stored=CELLS_AT_ONCE)
            self._flush()

    def finish(self) -> None:
        """Write what is left."""
        self._flush()
        put_keys_back(self._connection, self._keys_off or ())

    def _flush(self) -> None:
        """Write what was taken in."""
        pending, self._pending, self._pending_cells = self._pending, [], 0
        if not pending:
            return
        had = set(self.commits.created)
        runs = self._run_rows(pending)
        stored = self._stored({run["commit_id"] for run in runs} - (self.commits.created - had))
        fresh: list[dict[str, Any]] = []
        for entry, run in zip(pending, runs, strict=True):
            new = list(self._new_results(entry, run, stored))
            self.counts.files += 1
            self.counts.commits.add(run["commit_id"])
            if new:
                fresh.append(run | {"results": new, "dirty": entry.file.dirty})
        self._write(fresh)

    def _run_rows(self, entries: Sequence[MachineFile]) -> list[dict[str, Any]]:
        commits = self.commits.ids([_commit_row(entry.file) for entry in entries])
        variants = self._variants.ids([_variant_row(entry.file) for entry in entries])
        return [
            {
                "commit_id": commit_id,
                "machine_id": self.machines.id(dict(entry.machine)),
                "variant_id": variant_id,
                "invocation": None,
                "source_digest": entry.file.digest,
                "ingested_at": self._now,
                "findings": None,
            }
            for entry, commit_id, variant_id in zip(entries, commits, variants, strict=True)
        ]

    def _stored(self, commit_ids: set[int]) -> set[_Identity]:
        """Give the identities of what these commits have."""
        found: set[_Identity] = set()
        columns = (
            Result.series_id,
            Result.commit_id,
            Result.digest,
            Result.started_at_ms,
            Result.n,
        )
        for some in chunks(sorted(commit_ids)):
            query = select(*columns).where(Result.commit_id.in_(some))
            found.update(_identity(*row) for row in self._connection.execute(query))
        return found

    def _new_results(
        self, entry: MachineFile, run: dict[str, Any], stored: set[_Identity]
    ) -> Iterator[_New]:
        """Give what is not stored yet, a benchmark's cases at once."""
        counts, commit_id = self.counts, run["commit_id"]
        rows = entry.file.rows
        for row, series_ids in zip(rows, self._series_ids(rows, run), strict=True):
            counts.values += len(row.cells)
            counts.failed += row.cells.status.count(FAILED)
            counts.skipped += row.cells.status.count(SKIPPED)
            kept = _New(row, series_ids, row.cells)
            if entry.refused:
                kept = self._without_refused(entry.refused, kept, commit_id)
            new = kept.at(_unseen(kept.identities(commit_id), stored))
            counts.new_results += len(new.cells)
            counts.unchanged += len(kept.cells) - len(new.cells)
            if len(new.cells):
                yield new

    def _without_refused(
        self, refused: frozenset[tuple[str, str]], found: _New, commit_id: int
    ) -> _New:
        """Leave out what must not be stored, and delete what was."""
        name, digests = found.row.name, found.cells.digest
        kept = []
        for place, params in enumerate(found.row.cases):
            if (name, params) in refused:
                self._withdraw(found.series_ids[place], commit_id, digests[place])
            else:
                kept.append(place)
        return found.at(kept)

    def _withdraw(self, series_id: int, commit_id: int, digest: int) -> None:
        """Delete what was stored before its provenance was known to be false."""
        deleted = self._connection.execute(
            delete(Result).where(
                Result.series_id == series_id,
                Result.commit_id == commit_id,
                Result.digest == digest,
            )
        )
        self.counts.withdrawn += deleted.rowcount

    def _series_ids(
        self, rows: Sequence[BenchmarkRow], run: dict[str, Any]
    ) -> Iterator[Sequence[int]]:
        """Give the series of every case of every row."""
        for row in rows:
            benchmark_id = self.benchmarks.id(
                {
                    "name": row.name,
                    "version": row.version,
                    "kind": row.facts.kind,
                    "param_names": list(row.facts.param_names),
                }
            )
            metric = row.facts.metric
            metric_id = self._metrics.id(
                {"name": metric.name, "unit": metric.unit, "direction": metric.direction}
            )
            place = (benchmark_id, metric_id, run["machine_id"], run["variant_id"])
            key = (*place, row.cases)
            if key not in self._series_of_cases:
                self._series_of_cases[key] = self._series.ids(
                    [dict(zip(SERIES_PLACE, place, strict=True), params=p) for p in row.cases]
                )
            yield self._series_of_cases[key]

    def _write(self, runs: Sequence[dict[str, Any]]) -> None:
        """Write runs, their results and the samples of these."""
        results: list[list[_New]] = [run.pop("results") for run in runs]
        dirty: list[bool] = [run.pop("dirty") for run in runs]
        run_ids = self._runs.ids(runs)
        plain: list[tuple[Any, ...]] = []
        sampled: list[tuple[Any, ...]] = []
        samples: list[tuple[float, ...]] = []
        for run, run_id, found, is_dirty in zip(runs, run_ids, results, dirty, strict=True):
            for new in found:
                rows = new.rows(run["commit_id"], run_id, dirty=is_dirty)
                if any(new.cells.samples):
                    sampled.extend(rows)
                    samples.extend(new.cells.samples)
                else:
                    plain.extend(rows)
        # An index over series is filled page by page that way, and so are its readers' results.
        plain.sort(key=itemgetter(0))
        insert_many(self._connection, Result, RESULT_COLUMNS, plain)
        if sampled:
            self._write_sampled(sampled, samples)

    def _write_sampled(
        self, rows: Sequence[tuple[Any, ...]], samples: Sequence[tuple[float, ...]]
    ) -> None:
        ids = reserve_ids(self._connection, Result, len(rows))
        numbered = [(result_id, *row) for result_id, row in zip(ids, rows, strict=True)]
        insert_many(self._connection, Result, ("id", *RESULT_COLUMNS), numbered)
        insert_many(
            self._connection,
            Sample,
            ("result_id", "position", "value"),
            [
                (result_id, position, value)
                for result_id, values in zip(ids, samples, strict=True)
                for position, value in enumerate(values)
            ],
        )


def _unseen(identities: Sequence[_Identity], stored: set[_Identity]) -> Sequence[int]:
    """Give the places of those that are not stored, of equal ones the first, and note them."""
    own = set(identities)
    if len(own) == len(identities) and own.isdisjoint(stored):
        stored |= own
        return range(len(identities))
    places = []
    for place, one in enumerate(identities):
        if one not in stored:
            stored.add(one)
            places.append(place)
    return places


def _identity(
    series_id: int, commit_id: int, digest: int, started_at_ms: int | None, n: int | None
) -> _Identity:
    """Say when two results are one measurement: with statistics, whatever their starts."""
    if n is not None:
        return series_id, commit_id, digest
    return series_id, commit_id, digest, started_at_ms


def _commit_row(file: ResultFile) -> dict[str, Any]:
    return {
        "sha": file.commit,
        "committed_at": dt.datetime.fromtimestamp(file.committed_at_ms / 1000, dt.UTC),
        "order_basis": OrderBasis.DATE,
        "external": False,
    }


def _variant_row(file: ResultFile) -> dict[str, Any]:
    identity = (file.python, sorted(file.requirements.items()), sorted(file.env_vars.items()))
    return {
        "label": variant_label(file.python, file.requirements, file.env_vars),
        "python": file.python,
        "requirements": dict(file.requirements),
        "env_vars": dict(file.env_vars),
        "digest": digest_of(repr(identity).encode()),
    }
