"""How the store bears a million results: `python -m db.capacity --db URL`.

Writes a results tree of 2000 series over 500 commits (or as told), stores it in an empty database,
and measures what a runner and a reader wait for: ingestion, reading it again, detection, and every
query that a page or a command makes. Prints a table, and JSON with `--json`.
"""

import argparse
import datetime as dt
import json
import math
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.orm import Session

from db import alert_queries, queries
from db.baselines import baseline
from db.columns import AlertState, OrderBasis
from db.detection import DetectionReport, detect_all
from db.errors import DbError
from db.exclusions import exclusions
from db.ingest import ingest
from db.models import Commit, Result, Sample, Series
from db.session import open_database

CASES = 100  # of a benchmark
START_MS = 1_700_000_000_000
STEP = 0.08  # of every tenth series, half-way
NOISE = 0.005
REPEATS = 5
COLUMNS = (
    *("result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"),
    *("stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples"),
)


class CapacityError(DbError):
    """What was asked for cannot be measured there."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is stored."""

    series: int
    commits: int
    samples: int  # of a result

    @property
    def results(self) -> int:
        """One result a series and commit."""
        return self.series * self.commits


@dataclass(frozen=True, slots=True)
class Measured:
    """What was waited for."""

    results: int
    samples: int
    ingest_s: float
    results_per_s: float
    ingest_cpu_s: float  # of this process, which tells what a busy machine adds
    again_s: float  # reading a tree of which all is there
    one_run_s: float  # storing one more commit
    bytes_stored: int
    bytes_per_result: float
    detect_s: float | None  # of everything
    detect_cpu_s: float | None
    detect_again_s: float | None  # with one benchmark's results of one more commit
    change_points: int | None
    queries_s: dict[str, float]  # medians
    peak_memory_bytes: int


def write_tree(root: Path, shape: Shape, *, first: int = 0, seed: int = 1) -> None:
    """Write an asv tree whose every tenth series changes its level half-way."""
    rng = random.Random(seed + first)  # noqa: S311 - noise, no secret
    machine = root / "bench"
    machine.mkdir(parents=True)
    (machine / "machine.json").write_text(json.dumps({"machine": "bench", "version": 1}))
    names = [f"suite.Suite{index}.time_case" for index in range(shape.series // CASES)]
    params = [[str(case) for case in range(CASES)]]
    facts = {"type": "time", "unit": "seconds", "param_names": ["n"], "params": params}
    known: dict[str, Any] = {name: facts | {"name": name, "version": "1"} for name in names}
    (root / "benchmarks.json").write_text(json.dumps(known | {"version": 2}))
    for number in range(first, first + shape.commits):
        sha = f"{number + 1:08x}" * 5
        start = START_MS + 3_600_000 * number
        late = number >= (first + shape.commits) // 2
        rows = {name: _row(params, start, late, shape.samples, rng) for name in names}
        content = {
            "commit_hash": sha,
            "date": start,
            "params": {"machine": "bench"},
            "python": "3.11",
            "requirements": {},
            "env_vars": {},
            "result_columns": COLUMNS,
            "results": rows,
            "version": 2,
        }
        (machine / f"{sha[:8]}-py3.11.json").write_text(json.dumps(content))


def _row(
    params: list[list[str]], start: int, late: bool, samples: int, rng: random.Random
) -> list[Any]:
    """Give one benchmark's row; the levels of its cases lie apart."""
    values = [
        1e-4 * (1 + case) * (1 + STEP * (late and case % 10 == 0)) * math.exp(rng.gauss(0.0, NOISE))
        for case in range(len(params[0]))
    ]
    recorded = [
        [value * (1 + 0.001 * (k - samples // 2)) for k in range(samples)] for value in values
    ]
    around = [[value * factor for value in values] for factor in (0.98, 1.02, 0.99, 1.01)]
    counts = [[1] * len(values), [max(samples, 4)] * len(values)]
    return [values, params, "1", start, 1.0, *around, *counts, recorded if samples else None]


def measure(url: str, shape: Shape, folder: Path, *, detecting: bool) -> Measured:
    """Store a tree of this shape in an empty database and time what follows."""
    write_tree(folder / "all", shape)
    write_tree(folder / "one", Shape(shape.series, 1, shape.samples), first=shape.commits)
    write_tree(folder / "few", Shape(CASES, 1, shape.samples), first=shape.commits + 1)
    engine = open_database(url, must_exist=False)
    with engine.connect() as connection:
        if connection.scalar(select(func.count(Commit.id))):
            raise CapacityError("database: expected an empty one, got results in it")
    ingest_s, ingest_cpu_s = _seconds(lambda: ingest(engine, [folder / "all"]))
    again_s, _ = _seconds(lambda: ingest(engine, [folder / "all"]))
    one_run_s, _ = _seconds(lambda: ingest(engine, [folder / "one"]))
    _rank(engine)
    _settle(engine)
    size = _size(engine)
    with Session(engine) as session:
        results = session.scalar(select(func.count(Result.id))) or 0
        samples = session.scalar(select(func.count()).select_from(Sample)) or 0
    detected = _detection(engine, folder / "few") if detecting else _Detected()
    with Session(engine) as session:
        timed = dict(_timed_queries(session))
    engine.dispose()
    return Measured(
        results=results,
        samples=samples,
        ingest_s=ingest_s,
        results_per_s=shape.results / ingest_s,
        ingest_cpu_s=ingest_cpu_s,
        again_s=again_s,
        one_run_s=one_run_s,
        bytes_stored=size,
        bytes_per_result=size / results,
        detect_s=detected.all_s,
        detect_cpu_s=detected.all_cpu_s,
        detect_again_s=detected.again_s,
        change_points=detected.change_points,
        queries_s=timed,
        peak_memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )


@dataclass(frozen=True, slots=True)
class _Detected:
    """What detection took, if it was asked for."""

    all_s: float | None = None
    all_cpu_s: float | None = None
    again_s: float | None = None
    change_points: int | None = None


def _detection(engine: Engine, few: Path) -> _Detected:
    """Time a pass over everything, and one after a few new results."""
    all_s, all_cpu_s = _seconds(lambda: detect_all(engine))
    ingest(engine, [few])
    _rank(engine)
    reports: list[DetectionReport] = []
    again_s, _ = _seconds(lambda: reports.append(detect_all(engine)))
    return _Detected(all_s, all_cpu_s, again_s, reports[0].change_points)


def _timed_queries(session: Session) -> Iterator[tuple[str, float]]:
    """Time every query of a page or command; the first call of each warms the caches."""
    newest = session.scalars(select(Commit.sha).order_by(Commit.id.desc())).first() or ""
    one = session.scalars(select(Series.id).order_by(Series.id.desc())).first() or 0
    head = (
        session.scalars(
            select(Commit.sha)
            .join(Result, Result.commit_id == Commit.id)
            .where(Result.series_id == one)
            .order_by(Commit.id.desc())
        ).first()
        or newest
    )
    every, now = list(AlertState), dt.datetime.now(dt.UTC)
    asked: dict[str, Callable[[], object]] = {
        "data_version": lambda: queries.data_version(session),
        "overview": lambda: queries.overview(session),
        "machines": lambda: queries.machines(session),
        "commits": lambda: queries.commits(session),
        "commits of a machine": lambda: queries.commits(session, "bench"),
        "series": lambda: queries.series(session),
        "series of a benchmark": lambda: queries.series(
            session, benchmark="suite.Suite0.time_case"
        ),
        "history of a series": lambda: queries.history(session, one),
        "change points of a series": lambda: queries.change_points(session, one),
        "results of a commit": lambda: queries.case_results(session, head),
        "resolve a commit": lambda: queries.resolve_commit(session, newest[:8]),
        "baseline of a commit": lambda: baseline(session, newest),
        "windows of a series": lambda: queries.windows(session, series_id=one),
        "evidence of a commit": lambda: queries.evidence(session, commit=newest),
        "evidence of a series": lambda: queries.evidence(session, series=one),
        "all evidence": lambda: queries.evidence(session),
        "alerts": lambda: alert_queries.alerts(session, every),
        "alerts to tell": lambda: alert_queries.untold(session, "nobody"),
        "precision of alerts": lambda: alert_queries.precision(session),
        "stale runners": lambda: alert_queries.stale(session, hours=1.0, now=now),
        "exclusions": lambda: exclusions(session),
    }
    for name, ask in asked.items():
        ask()
        yield name, median(_seconds(ask)[0] for _ in range(REPEATS))


def _seconds(act: Callable[[], object]) -> tuple[float, float]:
    """Time an act by the clock and by this process's own CPU, which a busy machine adds less to."""
    started, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - started, time.process_time() - cpu


def _rank(engine: Engine) -> None:
    """Order the commits as a repository would, so that none falls back to dates."""
    with engine.begin() as connection:
        connection.execute(
            update(Commit).values(
                order_basis=OrderBasis.REPOSITORY,
                branch="main",
                position=Commit.id,
                merge_base_position=Commit.id - 1,
            )
        )


def _settle(engine: Engine) -> None:
    """Let the database know what it holds, as its own housekeeping does in time."""
    with engine.connect() as connection:
        connection.execute(text("ANALYZE"))
        connection.commit()
        if engine.dialect.name == "sqlite":
            connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))


def _size(engine: Engine) -> int:
    if engine.dialect.name == "sqlite":
        return Path(engine.url.database or "").stat().st_size
    with engine.connect() as connection:
        return connection.scalar(text("SELECT pg_database_size(current_database())")) or 0


@contextmanager
def _folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="capacity-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _text(url: str, found: Measured) -> str:
    slowest = max(found.queries_s, key=found.queries_s.__getitem__)
    stored, peak = found.bytes_stored / 2**20, found.peak_memory_bytes / 2**20
    per_cpu = found.results_per_s * found.ingest_s / found.ingest_cpu_s
    lines = [
        f"{url.partition(':')[0]}: {found.results} results, {found.samples} samples",
        f"ingest        {found.ingest_s:8.1f} s  {found.results_per_s:,.0f} results/s",
        f"its own CPU   {found.ingest_cpu_s:8.1f} s  {per_cpu:,.0f} results/s",
        f"the same again{found.again_s:8.1f} s",
        f"one more run  {found.one_run_s:8.2f} s",
        f"on disk       {stored:8.0f} MiB  {found.bytes_per_result:.0f} B/result",
        f"peak memory   {peak:8.0f} MiB",
    ]
    if found.detect_s is not None:
        lines += [
            f"detection     {found.detect_s:8.1f} s  {found.change_points} change points",
            f"its own CPU   {found.detect_cpu_s:8.1f} s",
            f"after few more{found.detect_again_s:8.1f} s",
        ]
    lines += [f"{name:28}{1000 * value:8.1f} ms" for name, value in found.queries_s.items()]
    return "\n".join([*lines, f"slowest query: {slowest}"])


def main(arguments: list[str] | None = None) -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--db", required=True, help="URL of an empty database")
    parser.add_argument("--series", type=int, default=2000, help=f"a multiple of {CASES}")
    parser.add_argument("--commits", type=int, default=500)
    parser.add_argument("--samples", type=int, default=0, help="of a result")
    parser.add_argument("--no-detection", action="store_true")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args(arguments)
    shape = Shape(told.series, told.commits, told.samples)
    with _folder() as folder:
        found = measure(told.db, shape, folder, detecting=not told.no_detection)
    sys.stdout.write((json.dumps(asdict(found)) if told.json else _text(told.db, found)) + "\n")


if __name__ == "__main__":
    main()
