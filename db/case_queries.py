"""The results of one commit as the records a comparison takes."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from db.cases import CaseKey, CaseResult
from db.columns import Status
from db.counted import counts
from db.errors import UnknownCommitError
from db.frames import AnySelect
from db.labels import environment_labels
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
    Window,
)
from db.partition import Logs
from db.session import chunks

# A series' noise is learned from the results nearest before a commit, at most this many commits.
NOISE_COMMITS = 31
NOISE_LEAST_RESULTS = 6
MAD_TO_SIGMA = 1.4826  # median absolute deviation of a normal distribution to its deviation


def case_results(
    session: Session, commit: str, machine: str | None = None, *, include_dirty: bool = False
) -> list[CaseResult]:
    """Give the newest result of every case of a commit.

    Where windows are joined and the case is a time in seconds, `samples` are the medians of its
    processes; else they are the recorded samples.

    Parameters
    ----------
    commit : full hash, as `resolve_commit` gives it

    Raises
    ------
    UnknownCommitError
        No commit with that hash is stored.
    """
    (found,) = _results(session, [commit], machine, include_dirty=include_dirty)
    return found


def both_results(
    session: Session, base: str, head: str, machine: str | None = None
) -> tuple[list[CaseResult], list[CaseResult]]:
    """Give the results of the two sides of a comparison, as `case_results` gives either.

    Raises
    ------
    UnknownCommitError
        No commit with one of the hashes is stored.
    """
    before, after = _results(session, [base, head], machine, include_dirty=False)
    return before, after


def _results(
    session: Session, commits: Sequence[str], machine: str | None, *, include_dirty: bool
) -> list[list[CaseResult]]:
    """Read the results of commits whose neighbours, by which noise is told, are read once.

    The noise of a series that only one of two sides has would judge nothing and is not read.
    """
    stored = [_stored(session, commit) for commit in commits]
    near = [_near(session, commit) for commit in stored]
    newest = [
        {row.series_id: row for row in session.execute(query)}
        for query in (_case_rows(commit, machine, include_dirty=include_dirty) for commit in stored)
    ]
    shared = sorted(set.intersection(*map(set, newest)))
    values = _values(session, sorted({one for ids in near for one in ids}), shared)
    sides = []
    for by_series, ids in zip(newest, near, strict=True):
        rows = list(by_series.values())
        results = [row.id for row in rows]
        told = _Told(
            samples=_samples(session, results),
            processes=_process_medians(session, results),
            noise=_noise(values, ids),
            environments=environment_labels(session, {row.environment for row in rows}),
        )
        sides.append([_case(row, told) for row in rows])
    return sides


def _stored(session: Session, commit: str) -> Commit:
    stored = session.scalar(select(Commit).where(Commit.sha == commit))
    if stored is None:
        raise UnknownCommitError(f"commit: expected a stored hash, got {commit!r}")
    return stored


def _case_rows(commit: Commit, machine: str | None, *, include_dirty: bool) -> AnySelect:
    """Select a commit's results with their series' names, the newest of a series last."""
    query = (
        select(
            # Columns, not entities: a commit has thousands of results.
            Result.id,
            Result.series_id,
            Result.status,
            Result.value,
            Result.n,
            Result.ci_low,
            Result.ci_high,
            Result.runner_environment_id.label("environment"),
            Series.params,
            Benchmark.name.label("benchmark"),
            Benchmark.version,
            Metric.name.label("metric"),
            Metric.unit,
            Metric.direction,
            Machine.name.label("machine"),
            Variant.label.label("variant"),
        )
        .join(Series, Series.id == Result.series_id)
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
        .join(Metric, Metric.id == Series.metric_id)
        .join(Machine, Machine.id == Series.machine_id)
        .join(Variant, Variant.id == Series.variant_id)
        .where(Result.commit_id == commit.id, counts(include_dirty=include_dirty))
        .order_by(Benchmark.name, Result.series_id, Result.started_at_ms, Result.id)
    )
    return query if machine is None else query.where(Machine.name == machine)


@dataclass(frozen=True, slots=True)
class _Told:
    """What is known of a side's results beside their rows."""

    samples: Mapping[int, Sequence[float]]
    processes: Mapping[int, Sequence[float]]
    noise: Mapping[int, float]  # by series
    environments: Mapping[int | None, str]


def _case(row: Any, told: _Told) -> CaseResult:  # noqa: ANN401 - a row of _case_rows
    recorded = tuple(told.samples.get(row.id, ()))
    medians = tuple(told.processes.get(row.id, ())) if row.unit == "seconds" else ()
    known = len(recorded) or (0 if row.value is None else 1)
    return CaseResult(
        key=CaseKey(row.benchmark, row.version, row.params, row.metric, row.machine, row.variant),
        unit=row.unit,
        direction=row.direction.value,
        status=row.status.value,
        value=row.value,
        samples=medians or recorded,
        n=known if row.n is None else row.n,
        ci_low=row.ci_low,
        ci_high=row.ci_high,
        environment=told.environments.get(row.environment),
        noise_rel=told.noise.get(row.series_id),
        num_processes=len(medians) or None,
    )


def _samples(session: Session, result_ids: Sequence[int]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for chunk in chunks(result_ids):
        query = (
            select(Sample.result_id, Sample.value)
            .where(Sample.result_id.in_(chunk))
            .order_by(Sample.result_id, Sample.position)
        )
        for result_id, value in session.execute(query):
            found[result_id].append(value)
    return found


def _process_medians(session: Session, result_ids: Sequence[int]) -> dict[int, list[float]]:
    """Give one median for every process that has windows of a result, in order of their start."""
    found: dict[int, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for chunk in chunks(result_ids):
        query = (
            select(Window.result_id, Window.invocation, Window.pid, Window.median_s)
            .where(Window.result_id.in_(chunk))
            .order_by(Window.started_at_s)
        )
        for result_id, invocation, pid, median_s in session.execute(query):
            if result_id is not None:
                found[result_id][invocation, pid].append(median_s)
    return {
        result_id: [statistics.median(medians) for medians in processes.values()]
        for result_id, processes in found.items()
    }


def _near(session: Session, commit: Commit) -> list[int]:
    """Give the ids of the newest commits with results up to this one, the newest first."""
    near = select(Commit.id).join(Run, Run.commit_id == Commit.id).distinct()
    if commit.position is None:
        near = near.where(Commit.committed_at <= commit.committed_at)
    else:
        near = near.where(
            Commit.order_basis == commit.order_basis, Commit.position <= commit.position
        )
    rank = Commit.committed_at if commit.position is None else Commit.position
    newest = near.add_columns(rank).order_by(rank.desc()).limit(NOISE_COMMITS)
    return [commit_id for commit_id, _ in session.execute(newest)]


def _values(session: Session, commit_ids: Sequence[int], series_ids: Sequence[int]) -> Logs:
    """Read what counts of these commits: series, commit, start, result and value in columns."""
    rows: list[Sequence[Any]] = []
    for chunk in chunks(series_ids):
        query = select(
            Result.series_id, Result.commit_id, Result.started_at_ms, Result.id, Result.value
        ).where(
            Result.commit_id.in_(commit_ids),
            Result.series_id.in_(chunk),
            counts(),
            Result.status == Status.OK,
        )
        with closing(session.connection().execute(query)) as found:
            # The driver's own rows: tens of thousands of SQLAlchemy's take longer than reading.
            rows += found.cursor.fetchall()
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    return np.nan_to_num(table)


def _noise(values: Logs, commit_ids: Sequence[int]) -> dict[int, float]:
    """Learn from neighbouring commits how far a series strays without cause.

    Successive relative differences do not see levels, and their median does not see steps.
    """
    is_near = np.isin(values[:, 1], commit_ids)
    table = values[is_near & (values[:, -1] != 0)]
    if not len(table):
        return {}
    # Sorted here: a database would join and sort tens of thousands of rows for it.
    places = np.zeros(1 + max(commit_ids))
    places[list(commit_ids)] = range(len(commit_ids), 0, -1)
    table[:, 1] = places[table[:, 1].astype(np.int64)]
    table = table[np.lexsort(table.T[3::-1])]
    series, found = table[:, 0].astype(np.int64), table[:, -1]
    is_next = np.diff(series) == 0
    differences = (np.abs(np.diff(found)) / np.abs(found[:-1]))[is_next]
    return _sigmas(series[1:][is_next], differences)


def _sigmas(series: NDArray[np.int64], differences: Logs) -> dict[int, float]:
    """Give the deviation of a result by the differences of neighbours, where there are enough.

    `series` are sorted; the medians of all of them are found in one pass.
    """
    known, sizes = np.unique(series, return_counts=True)
    ordered = differences[np.lexsort((differences, series))]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    middles = (ordered[starts + (sizes - 1) // 2] + ordered[starts + sizes // 2]) / 2
    sigmas = MAD_TO_SIGMA * middles / np.sqrt(2)
    enough = sizes >= NOISE_LEAST_RESULTS - 1
    return dict(zip(known[enough].tolist(), sigmas[enough].tolist(), strict=True))
