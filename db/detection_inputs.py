"""What a detector is told of each stored case: its values in order, and what moved beside them.

A case whose declared dependencies changed goes on in another series, because a variant is part of a
series' identity. Series that follow each other without overlap are one line here, so that what a
commit's new dependencies cost is a change like any other.

Hundreds of thousands of series are read in batches, by columns and never one by one; in which order
the commits came is read once for all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from sqlalchemy import select

from db.change_points import Observed
from db.counted import counts
from db.models import Benchmark, Result, Runner, RunnerEnvironment, Series, Variant, Window
from db.models import WindowCounter as Counter
from db.peers import is_peer
from db.session import chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from sqlalchemy.orm import Session

    from db.commit_places import CommitPlaces

T = TypeVar("T")
CLOCKS: Final = ("sm_clock_mhz", "memory_clock_mhz")  # counters that explain a like change
SERIES_AT_ONCE: Final = 500
ROWS_AT_ONCE: Final = 50_000
COLUMNS: Final = (
    *(Result.series_id, Result.id, Result.commit_id, Result.started_at_ms),
    *(Result.value, Result.q25, Result.q75, Result.runner_environment_id),
)
_WITH_WINDOWS: Final = (
    select(Result.series_id).join(Window, Window.result_id == Result.id).distinct()
)
SERIES, RESULT, COMMIT, STARTED, VALUE, LOW, HIGH, ENVIRONMENT = range(len(COLUMNS))


@dataclass(frozen=True, slots=True)
class Member:
    """A series, and what it declares to depend on."""

    series_id: int
    declared: str
    judged: int | None  # mark of the detector


@dataclass(frozen=True, slots=True)
class Case:
    """The series that differ in what they depend on alone."""

    key: tuple[Any, ...]
    machine_id: int
    benchmark: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """One case on one machine over the commits of the main branch, whatever it depended on."""

    case: Case
    series_ids: NDArray[np.int64]  # of each result
    commit_ids: NDArray[np.int64]  # of each result
    observed: Observed


def cases(session: Session) -> list[Case]:
    """Give every case that is ours to watch; peers are other people's code."""
    query = (
        select(
            Series.id,
            Series.machine_id,
            Series.params,
            Series.metric_id,
            Series.judged,
            Benchmark.name,
            Benchmark.version,
            Variant.python,
            Variant.requirements,
            Variant.env_vars,
        )
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
        .join(Variant, Variant.id == Series.variant_id)
        .order_by(Series.id)
    )
    groups: dict[tuple[Any, ...], list[Member]] = defaultdict(list)
    for row in session.execute(query):
        if is_peer(row.name, row.params):
            continue
        key = (row.name, row.version, row.params, row.metric_id, row.machine_id)
        needs = json.dumps(row.requirements, sort_keys=True)
        variables = json.dumps(row.env_vars, sort_keys=True)
        member = Member(row.id, f"python {row.python} {needs}", row.judged)
        groups[(*key, variables)].append(member)
    return [Case(key, key[4], key[0], tuple(members)) for key, members in groups.items()]


def lines(session: Session, found: Sequence[Case], places: CommitPlaces) -> Iterator[list[Line]]:
    """Give the lines of some cases, in batches."""
    known = {one.id: one for one in session.scalars(select(RunnerEnvironment))}
    with_windows = frozenset(session.scalars(_WITH_WINDOWS))
    for batch in _batches(found):
        ids = [member.series_id for case in batch for member in case.members]
        results = _results(session, ids, places)
        readings = _readings(session, [one for one in ids if one in with_windows])
        yield [
            _line(case, chain, known, readings)
            for case in batch
            for chain in chains(_members(case, results), places)
        ]


def _batches(found: Sequence[Case]) -> Iterator[list[Case]]:
    """Cut the cases so that each batch has few enough series."""
    batch: list[Case] = []
    size = 0
    for case in found:
        if batch and size + len(case.members) > SERIES_AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(case)
        size += len(case.members)
    if batch:
        yield batch


def _results(
    session: Session, series_ids: Sequence[int], places: CommitPlaces
) -> dict[int, NDArray[np.float64]]:
    """Give each series' results that count on the main branch, in order, as rows of `COLUMNS`."""
    query = select(*COLUMNS).where(Result.series_id.in_(series_ids), counts())
    streamed = session.connection().execute(query.execution_options(yield_per=ROWS_AT_ONCE))
    parts = [np.asarray([tuple(row) for row in some], float) for some in streamed.partitions()]
    if not parts:
        return {}
    table = np.concatenate(parts)
    table = table[places.is_main(table[:, COMMIT].astype(np.int64))]
    table = table[np.argsort(table[:, SERIES], kind="stable")]
    edges = np.flatnonzero(np.diff(table[:, SERIES])) + 1
    return {
        int(rows[0, SERIES]): rows[places.order(rows[:, COMMIT], rows[:, STARTED], rows[:, RESULT])]
        for rows in np.split(table, edges)
        if len(rows)
    }


def _members(
    case: Case, results: Mapping[int, NDArray[np.float64]]
) -> list[tuple[tuple[Member, NDArray[np.float64]], NDArray[np.int64]]]:
    """Give the series of a case that have results, with the commits of these."""
    return [
        ((one, rows), rows[:, COMMIT].astype(np.int64))
        for one in case.members
        if (rows := results.get(one.series_id)) is not None
    ]


def chains(found: Sequence[tuple[T, NDArray[np.int64]]], places: CommitPlaces) -> list[list[T]]:
    """Join series that follow each other; those measured side by side stay apart.

    `found` are series with the commits of their results, of which each has some.
    """
    spans = [(places.date_us[commits], one) for one, commits in found]
    spans.sort(key=lambda span: span[0].min())
    ordered = [one for _, one in spans]
    if all(before.max() < after.min() for (before, _), (after, _) in pairwise(spans)):
        return [ordered] if ordered else []
    return [[one] for one in ordered]


def _line(
    case: Case,
    chain: Sequence[tuple[Member, NDArray[np.float64]]],
    known: Mapping[int, RunnerEnvironment],
    readings: Mapping[int, _Reading],
) -> Line:
    rows = np.concatenate([rows for _, rows in chain])
    declared = [member.declared for member, rows in chain for _ in range(len(rows))]
    if np.isnan(rows[:, ENVIRONMENT]).all():
        environments: list[RunnerEnvironment | None] = [None] * len(rows)
    else:
        environments = [
            None if np.isnan(one) else known[int(one)] for one in rows[:, ENVIRONMENT].tolist()
        ]
    seen = [readings.get(int(one)) for one in rows[:, RESULT].tolist()] if readings else []
    observed = Observed(
        rows[:, VALUE],
        spread=rows[:, HIGH] - rows[:, LOW],
        covariates=_clocks(seen),
        epochs=[None if one is None else _imposed(one) for one in environments],
        runners=[None if one is None else one.runner for one in seen] if any(seen) else None,
        dependencies=[
            f"{needs} {'' if one is None else one.runtime or ''}"
            for needs, one in zip(declared, _last_known(environments), strict=True)
        ],
    )
    ids = rows[:, (SERIES, COMMIT)].astype(np.int64)
    return Line(case, ids[:, 0], ids[:, 1], observed)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the windows of a result read: clocks, the median over the windows, and where it ran."""

    clocks: dict[str, float]
    runner: str


def _clocks(seen: Sequence[_Reading | None]) -> dict[str, list[float]] | None:
    """Give the clocks as columns; None where no result has a window."""
    if not any(seen):
        return None
    return {
        name: [np.nan if one is None else one.clocks.get(name, np.nan) for one in seen]
        for name in CLOCKS
    }


def _imposed(environment: RunnerEnvironment) -> tuple[Any, ...]:
    """Give what the machine and no commit decides."""
    return (
        environment.runner_id,
        environment.driver,
        environment.power_limit_w,
        environment.clock_policy,
    )


def _last_known(found: Iterable[RunnerEnvironment | None]) -> list[RunnerEnvironment | None]:
    """Let a result of an unknown environment have the one before it, the first ones the next."""
    told = list(found)
    last = next((one for one in told if one is not None), None)
    filled = []
    for one in told:
        last = last if one is None else one
        filled.append(last)
    return filled


def _readings(session: Session, series_ids: Sequence[int]) -> dict[int, _Reading]:
    """Give what was read beside each result that has windows."""
    runners: dict[int, str] = {}
    clocks: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for some in chunks(series_ids):
        of_series = (
            select(Window.result_id, Runner.uid)
            .join(Result, Result.id == Window.result_id)
            .join(RunnerEnvironment, RunnerEnvironment.id == Window.runner_environment_id)
            .join(Runner, Runner.id == RunnerEnvironment.runner_id)
            .where(Result.series_id.in_(some))
            .order_by(Window.id)
        )
        runners.update((one, uid) for one, uid in session.execute(of_series) if one is not None)
        read = (
            select(Window.result_id, Counter.name, Counter.median)
            .join(Result, Result.id == Window.result_id)
            .join(Counter, Counter.window_id == Window.id)
            .where(
                Result.series_id.in_(some), Counter.name.in_(CLOCKS), Counter.median.is_not(None)
            )
        )
        for result_id, name, median in session.execute(read):
            if result_id is not None and median is not None:
                clocks[result_id][name].append(median)
    return {
        one: _Reading({name: float(np.median(read)) for name, read in clocks[one].items()}, runner)
        for one, runner in runners.items()
    }
