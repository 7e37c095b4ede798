"""Windows: as a frame for pages, and merged to the evidence of a diagnosis."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, Final

import pandas as pd
from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from db.counted import counts
from db.counters import DOUBTS, REASONS, supporting
from db.errors import UnknownSeriesError
from db.evidence import Ceilings, Evidence, EvidencePoint, PeakSource
from db.frames import AnyRow, AnySelect
from db.labels import imposed_label
from db.models import (
    Benchmark,
    Ceiling,
    Commit,
    Machine,
    Result,
    Runner,
    RunnerEnvironment,
    Series,
    Variant,
    Window,
    WindowCounter,
    WindowStage,
)
from db.session import chunks

NO_WINDOW: Final = "no_window"  # validity code: another process of the run watched the case
WINDOW_COLUMNS = (
    "uid",
    "result_id",
    "invocation",
    "process_number",
    "pid",
    "started_at_s",
    "ended_at_s",
    "n",
    "median_s",
    "timer",
    "commit_length",
    "bytes",
    "kv_bytes",
    "flops",
    "context_tokens",
    "programs",
    "validity",
    "engine_tree",
    "dirty",
    "external",
    "source",
)

# Few results have windows; without the hint SQLite may look at a million for theirs.
_WITH_WINDOWS = select(Window.result_id).where(Window.result_id.is_not(None))


@dataclass(frozen=True, slots=True)
class _Details:
    """What hangs below windows, by window id."""

    stages: dict[int, dict[str, float]]
    counters: dict[int, dict[str, float]]


def windows(
    session: Session, *, series_id: int | None = None, result_id: int | None = None
) -> pd.DataFrame:
    """Give the windows of a series or of one result, oldest first.

    Counters are columns of their own names and hold the window's median, stages are columns
    `stage_<name>_s`; a window without one has NaN there.
    """
    query = select(Commit.sha, Window).join(Result, Result.id == Window.result_id)
    query = query.join(Commit, Commit.id == Result.commit_id).order_by(Window.started_at_s)
    if series_id is not None:
        query = query.where(Result.series_id == series_id)
    if result_id is not None:
        query = query.where(Result.id == result_id)
    rows = session.execute(query).all()
    details = _details(session, [window.id for _, window in rows])
    lines = [
        {"commit": sha}
        | {name: getattr(window, name) for name in WINDOW_COLUMNS}
        | {f"stage_{name}_s": s for name, s in details.stages.get(window.id, {}).items()}
        | details.counters.get(window.id, {})
        for sha, window in rows
    ]
    return pd.DataFrame(lines) if lines else pd.DataFrame(columns=["commit", *WINDOW_COLUMNS])


def evidence(
    session: Session,
    *,
    series: int | str | None = None,
    machine: str | None = None,
    commit: str | None = None,
) -> list[Evidence]:
    """Give what each run measured of its cases and its machine, the newest run first.

    One record is one invocation's joined windows of one commit under one runner environment.

    Parameters
    ----------
    series : id of a series, or part of a benchmark's name

    Raises
    ------
    UnknownSeriesError
        No series has the id, or no benchmark the name.
    """
    query = _evidence_rows()
    if series is not None:
        query = query.where(_series_condition(session, series))
    if machine is not None:
        query = query.where(Machine.name == machine)
    if commit is not None:
        query = query.where(Commit.sha == commit)
    groups: dict[tuple[Any, ...], list[AnyRow]] = defaultdict(list)
    for row in session.execute(query):
        key = (row.sha, row.machine, row.Window.invocation, row.RunnerEnvironment.id)
        groups[key].append(row)
    newest = sorted(
        groups.values(), key=lambda rows: max(row.Window.started_at_s for row in rows), reverse=True
    )
    details = _details(session, [row.Window.id for rows in newest for row in rows])
    return [_evidence(rows, details) for rows in newest]


def _evidence_rows() -> AnySelect:
    return (
        select(
            Window,
            Ceiling,
            RunnerEnvironment,
            Runner,
            Commit.sha,
            Machine.name.label("machine"),
            Benchmark.name.label("benchmark"),
            Benchmark.version,
            Series.params,
            Result.value,
            Variant.label.label("declared"),
        )
        .join(Result, Result.id == Window.result_id)
        .join(Ceiling, Ceiling.id == Window.ceiling_id)
        .join(RunnerEnvironment, RunnerEnvironment.id == Window.runner_environment_id)
        .join(Runner, Runner.id == RunnerEnvironment.runner_id)
        .join(Commit, Commit.id == Result.commit_id)
        .join(Series, Series.id == Result.series_id)
        .join(Machine, Machine.id == Series.machine_id)
        .join(Variant, Variant.id == Series.variant_id)
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
        .where(counts(include_dirty=True), Result.id.in_(_WITH_WINDOWS))
        .order_by(Benchmark.name, Series.id, Window.started_at_s)
    )


def _series_condition(session: Session, series: int | str) -> ColumnElement[bool]:
    wanted = int(series) if str(series).isdecimal() else series
    condition = (
        Series.id == wanted
        if isinstance(wanted, int)
        else Benchmark.name.icontains(wanted, autoescape=True)
    )
    query = select(Series.id).join(Benchmark, Benchmark.id == Series.benchmark_id)
    if session.scalar(query.where(condition).limit(1)) is None:
        raise UnknownSeriesError(
            f"series: expected a stored series' id or part of a benchmark's name, got {series!r}"
        )
    return condition


def _evidence(rows: Sequence[AnyRow], details: _Details) -> Evidence:
    first = rows[0]
    cases: dict[int, list[AnyRow]] = defaultdict(list)
    for row in rows:
        cases[row.Window.result_id].append(row)
    ceilings, source = _ceilings(row.Ceiling for row in rows)
    return Evidence(
        label=f"{first.sha[:12]} on {first.machine}",
        gpu=first.Runner.name if first.Runner.kind == "cuda" else None,
        ceilings=ceilings,
        peak_source=source,
        points=tuple(_point(case, details) for case in cases.values()),
        power_limit_w=first.RunnerEnvironment.power_limit_w,
        source=first.Window.source,
        runs_with=_joined(first.declared, first.RunnerEnvironment.runtime),
        imposed=imposed_label(first.Runner, first.RunnerEnvironment),
        device=f"{first.Runner.name} {first.Runner.uid}",
    )


def _joined(*parts: str | None) -> str | None:
    return ", ".join(part for part in parts if part) or None


def _ceilings(found: Iterable[Ceiling]) -> tuple[Ceilings, PeakSource | None]:
    """Take the best rates of a run; measured ones, if there are any, alone count."""
    known = [
        one
        for one in found
        if one.read_bytes_per_s is not None or one.matmul_flops_per_s is not None
    ]
    if not known:
        return Ceilings(), None
    source: PeakSource = (
        "measured" if any(one.source == "measured" for one in known) else "datasheet"
    )
    used = [one for one in known if one.source == source]
    matmul = max(used, key=lambda one: one.matmul_flops_per_s or 0.0)
    read = [one.read_bytes_per_s for one in used if one.read_bytes_per_s is not None]
    best = Ceilings(max(read, default=None), matmul.matmul_flops_per_s, matmul.dtype)
    return best, source


def _point(rows: Sequence[AnyRow], details: _Details) -> EvidencePoint:
    """Merge the processes of one case: medians of what was measured, sums of samples.

    Counters are those that their windows support. A doubt about a window is one about the case only
    if no other window of the case has counters without it.
    """
    found: list[Window] = [row.Window for row in rows]
    first, ids = found[0], [window.id for window in found]
    stages = _medians(details.stages[one] for one in ids if one in details.stages)
    lengths = [one.commit_length for one in found if one.commit_length is not None]
    return EvidencePoint(
        benchmark=rows[0].benchmark,
        params=rows[0].params,
        context_tokens=first.context_tokens,
        time_s=statistics.median(window.median_s for window in found),
        n=sum(window.n for window in found),
        bytes=first.bytes,
        kv_bytes=first.kv_bytes,
        flops=first.flops,
        stage_seconds=stages or None,
        commit_length=statistics.fmean(lengths) if lengths else None,
        programs=first.programs,
        num_sms=rows[0].Runner.num_sms,
        counters=_medians(
            supporting(details.counters.get(window.id, {}), window.validity) for window in found
        ),
        validity=_validity(found, details),
        version=rows[0].version,
        process_samples_s=_by_process(found),
    )


def _validity(found: Iterable[Window], details: _Details) -> tuple[str, ...]:
    """Join the codes of all windows, without those that another window makes idle."""
    windows_codes = [(set(window.validity), window.id in details.counters) for window in found]
    codes = {code for one, _ in windows_codes for code in one}
    if any(has for _, has in windows_codes):
        codes.discard(NO_WINDOW)
    has_sound = any(has and not DOUBTS.keys() & one for one, has in windows_codes)
    return tuple(sorted(codes - DOUBTS.keys() if has_sound else codes))


def _by_process(found: Iterable[Window]) -> tuple[tuple[float, ...], ...]:
    """Give the recorded samples of each process, in the order of its windows."""
    samples: dict[int, list[float]] = defaultdict(list)
    for window in found:
        samples[window.pid] += window.samples_s
    return tuple(tuple(one) for one in samples.values() if one)


def _medians(readings: Iterable[dict[str, float]]) -> dict[str, float]:
    """Take the median of each name; bits that were set once are kept."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for reading in readings:
        for name, value in reading.items():
            by_name[name].append(value)
    return {
        name: float(reduce(or_, map(int, values))) if name == REASONS else statistics.median(values)
        for name, values in by_name.items()
    }


def _details(session: Session, window_ids: Sequence[int]) -> _Details:
    """Read stages and medians of counters of many windows at once."""
    details = _Details(defaultdict(dict), defaultdict(dict))
    for chunk in chunks(window_ids):
        stages = select(WindowStage).where(WindowStage.window_id.in_(chunk))
        for stage in session.scalars(stages):
            details.stages[stage.window_id][stage.name] = stage.seconds
        counters = select(WindowCounter).where(WindowCounter.window_id.in_(chunk))
        for counter in session.scalars(counters):
            if counter.median is not None:
                details.counters[counter.window_id][counter.name] = counter.median
    return details
