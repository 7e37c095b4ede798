"""Windows find the results they belong to, once both are stored.

By what the run was told (commit, machine, case, time); a window that was told nothing is joined
by the hash of its engine, unless that was edited, and its samples; what fits nowhere stays
unjoined and is tried again with the next ingestion.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, select, true, update

from db.frames import AnyRow, AnySelect
from db.joining import Span, assign, contains, span_of
from db.labels import canonical_params
from db.models import Benchmark, Commit, Machine, Result, Run, Sample, Series, Window
from db.registry import table_of
from db.repository import Repository
from db.session import chunks


def join_windows(connection: Connection, repository: Repository | None) -> int:
    """Join every unjoined window that fits a result and tell the result; give their number."""
    windows = connection.execute(
        select(*table_of(Window).columns).where(Window.result_id.is_(None))
    ).all()
    if not windows:
        return 0
    told = [window for window in windows if window.claimed_commit is not None]
    untold = [window for window in windows if window.claimed_commit is None]
    joined = _by_claim(told, _candidates(connection, told))
    if repository is not None:
        joined |= _by_samples(connection, untold, _candidates(connection, untold), repository)
    if joined:
        _apply(connection, [window for window in windows if window.id in joined], joined)
    return len(joined)


def _candidates(connection: Connection, windows: Sequence[AnyRow]) -> dict[str, list[AnyRow]]:
    """Give the results that these windows may belong to, by benchmark.

    Of windows that were told their commit, only those of these commits: a window that fits nothing
    is tried with every ingestion, and a history may have millions of results by then.
    """
    benchmarks = sorted({window.benchmark for window in windows})
    commits = {window.claimed_commit for window in windows}
    by_commit = [] if None in commits else chunks(sorted(commits))
    conditions: list[ColumnElement[bool]] = [Commit.sha.in_(some) for some in by_commit]
    found: dict[str, list[AnyRow]] = defaultdict(list)
    for condition in (conditions or [true()]) if benchmarks else []:
        query = _results_of(benchmarks).where(condition)
        for row in connection.execute(query):
            found[row.benchmark].append(row)
    return found


def _results_of(benchmarks: Sequence[str]) -> AnySelect:
    return (
        select(
            Result.id,
            Result.started_at_ms,
            Result.duration_s,
            Commit.sha,
            Machine.name.label("machine"),
            Benchmark.name.label("benchmark"),
            Benchmark.version,
            Benchmark.param_names,
            Series.params,
        )
        .join(Series, Series.id == Result.series_id)
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
        .join(Machine, Machine.id == Series.machine_id)
        .join(Commit, Commit.id == Result.commit_id)
        .where(Benchmark.name.in_(benchmarks))
    )


def _by_claim(windows: Iterable[AnyRow], candidates: dict[str, list[AnyRow]]) -> dict[int, int]:
    """Join by commit, machine, case and time; gives results' ids by windows' ids."""
    by_commit: dict[tuple[str, str], list[AnyRow]] = defaultdict(list)
    for benchmark, rows in candidates.items():
        for row in rows:
            by_commit[row.sha, benchmark].append(row)
    groups: dict[tuple[Any, ...], list[AnyRow]] = defaultdict(list)
    for window in windows:
        key = (
            window.claimed_commit,
            window.claimed_machine,
            window.benchmark,
            window.version,
            tuple(window.param_values),
            window.invocation,
        )
        groups[key].append(window)
    joined: dict[int, int] = {}
    for (commit, machine, benchmark, *_), found in groups.items():
        rows = _of_case(by_commit[commit, benchmark], found[0])
        named = {row.machine for row in rows}
        if machine is not None:
            rows = [row for row in rows if row.machine == machine]
        elif len(named) > 1:
            continue
        starts = [window.started_at_s for window in found]
        for window, result_id in zip(found, assign(starts, _spans(rows, found[0])), strict=True):
            if result_id is not None:
                joined[window.id] = result_id
    return joined


def _of_case(rows: Iterable[AnyRow], window: AnyRow) -> list[AnyRow]:
    return [
        row
        for row in rows
        if window.version in {None, row.version}
        and row.params == canonical_params(row.param_names, window.param_values)
    ]


def _spans(rows: Sequence[AnyRow], window: AnyRow) -> list[Span]:
    """Give the times to join by; what was transcribed from elsewhere has none to compare."""
    if window.external and len(rows) == 1:
        return [Span(rows[0].id, -math.inf, math.inf)]
    return [span_of(row.id, row.started_at_ms, row.duration_s) for row in rows]


def _by_samples(
    connection: Connection,
    windows: Iterable[AnyRow],
    candidates: dict[str, list[AnyRow]],
    repository: Repository,
) -> dict[int, int]:
    """Join windows that were told no commit: the same engine, and every sample recorded."""
    windows = [window for window in windows if window.engine_tree is not None]
    if not windows:
        return {}
    rows = [row for window in windows for row in _of_case(candidates[window.benchmark], window)]
    trees = repository.engine_trees({row.sha for row in rows})
    joined = {}
    for window in windows:
        fitting = [
            row.id
            for row in _of_case(candidates[window.benchmark], window)
            if (window.dirty or trees.get(row.sha) == window.engine_tree)
            and contains(_samples(connection, row.id), window.samples_s)
        ]
        if len(fitting) == 1:
            joined[window.id] = fitting[0]
    return joined


def _samples(connection: Connection, result_id: int) -> list[float]:
    return list(connection.scalars(select(Sample.value).where(Sample.result_id == result_id)))


def _apply(connection: Connection, windows: Sequence[AnyRow], joined: dict[int, int]) -> None:
    """Write the joins; a result takes its environment from its windows and is dirty if any is."""
    table = table_of(Window)
    connection.execute(
        update(table)
        .where(table.c.id == bindparam("window"))
        .values(result_id=bindparam("joined")),
        [{"window": window, "joined": result} for window, result in joined.items()],
    )
    results = table_of(Result)
    connection.execute(
        update(results)
        .where(results.c.id == bindparam("result"))
        .values(runner_environment_id=bindparam("environment")),
        [
            {"result": joined[window.id], "environment": window.runner_environment_id}
            for window in windows
        ],
    )
    dirty = [{"result": joined[window.id]} for window in windows if window.dirty]
    if dirty:
        connection.execute(
            update(results).where(results.c.id == bindparam("result")).values(dirty=True), dirty
        )
    runs = table_of(Run)
    connection.execute(
        update(runs)
        .where(
            runs.c.invocation.is_(None),
            runs.c.id
            == select(results.c.run_id)
            .where(results.c.id == bindparam("result"))
            .scalar_subquery(),
        )
        .values(invocation=bindparam("told")),
        [{"result": joined[window.id], "told": window.invocation} for window in windows],
    )
