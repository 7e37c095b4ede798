"""Other tools' result files as the records that asv's become.

The tool is known by the keys of its file. What a file does not say (commit, machine) the caller
has to; what a metric means, the tool or the configuration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from db.asv_results import (
    END_OF_TIME_MS,
    LONGEST_CASE,
    NO_VERSION,
    BenchmarkRow,
    ResultFile,
)
from db.benchmark_facts import BenchmarkFacts
from db.cells import FAILED, OK, SINGLE_SAMPLE, SKIPPED, Cells, digest_of, digests_of
from db.errors import IngestError
from db.ingest_settings import Settings
from db.json_files import fitting, load_json
from db.labels import canonical_params
from db.metrics import MetricSpec
from db.readers import google_benchmark, nvbench, pytest_benchmark
from db.readers.records import SECONDS, ForeignRun, Measurement
from db.repository import HASH, Repository

READERS = (pytest_benchmark, nvbench, google_benchmark)
TOOLS = ", ".join(reader.TOOL for reader in READERS)


@dataclass(frozen=True, slots=True)
class Given:
    """What the caller says of files that name no commit or machine."""

    commit: str | None = None
    machine: str | None = None


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file's results, the machine they are of, and the metrics nobody explained."""

    machine: Mapping[str, str | None]
    file: ResultFile
    unexplained: tuple[str, ...]  # names of metrics


def read_foreign(
    path: Path, given: Given, settings: Settings, repository: Repository | None
) -> ForeignFile:
    """Read a file of one of the known tools.

    Raises
    ------
    IngestError
        It is none of theirs, a value has not the type it must have, or nobody says which commit
        or machine it is of.
    """
    found, raw = load_json(path)
    where = str(path)
    reader = next((one for one in READERS if found.keys() >= one.KEYS), None)
    if reader is None:
        raise IngestError(
            f"{where}: expected a file of {TOOLS}, got none of them "
            "(results of asv are named by their folder)"
        )
    run = reader.read(found, where)
    explained, unexplained = _explained(run, settings)
    commit = _commit(run, given, repository, where)
    rows = tuple(
        _row(list(group), run)
        for _, group in groupby(sorted(explained, key=_row_key), key=_row_key)
    )
    file = ResultFile(
        path=path,
        digest=digest_of(raw),
        commit=commit,
        committed_at_ms=_committed_at_ms(run, commit, repository, where),
        python=run.python,
        requirements={},
        env_vars={},
        rows=rows,
        dirty=run.dirty,
    )
    return ForeignFile(_machine(run, given, where), file, unexplained)


def _explained(run: ForeignRun, settings: Settings) -> tuple[list[Measurement], tuple[str, ...]]:
    """Give the measurements whose meaning is known, and the metrics of the others."""
    explained, unexplained = [], dict[str, None]()
    for one in run.measurements:
        meaning = settings.meaning(one.benchmark, one.metric)
        if meaning is not None:
            one = replace(one, unit=meaning.unit, direction=meaning.direction)  # noqa: PLW2901
        if one.direction is None:
            unexplained[one.metric] = None
        else:
            explained.append(one)
    return explained, tuple(unexplained)


def _row_key(one: Measurement) -> tuple[Any, ...]:
    names = tuple(name for name, _ in one.params)
    return one.benchmark, one.metric, str(one.unit), str(one.direction), names


def _row(cases: Sequence[Measurement], run: ForeignRun) -> BenchmarkRow:
    """Give one benchmark's cases of one metric."""
    first = cases[0]
    if first.unit is None or first.direction is None:
        raise IngestError(f"{first.metric}: expected a metric with unit and direction")
    metric = MetricSpec(fitting(first.metric, 200, first.benchmark), first.unit, first.direction)
    names = tuple(name for name, _ in first.params)
    kind = "time" if first.unit == SECONDS else "track"
    start = run.started_at_s
    return BenchmarkRow(
        name=first.benchmark,
        version=NO_VERSION,
        facts=BenchmarkFacts(kind, metric, names),
        started_at_ms=None if start is None else _milliseconds(start, first.benchmark),
        duration_s=None,
        cases=tuple(_params(one) for one in cases),
        cells=_cells(cases),
    )


def _params(one: Measurement) -> str:
    text = canonical_params([name for name, _ in one.params], [value for _, value in one.params])
    if len(text.encode()) > LONGEST_CASE:
        raise IngestError(
            f"{one.benchmark}: parameters: expected at most {LONGEST_CASE} bytes a case"
        )
    return text


def _cells(cases: Sequence[Measurement]) -> Cells:
    values, samples = [one.value for one in cases], [one.samples for one in cases]
    q25, q75 = [one.q25 for one in cases], [one.q75 for one in cases]
    number = [one.number for one in cases]
    counts = [len(one.samples) if one.n is None else one.n for one in cases]
    statuses = [_status(one, n) for one, n in zip(cases, counts, strict=True)]
    unbounded = [None] * len(cases)
    packed = (values, q25, q75, unbounded, unbounded, number)
    return Cells(
        status=statuses,
        value=values,
        q25=q25,
        q75=q75,
        ci_low=unbounded,
        ci_high=unbounded,
        number=number,
        n=[one or None for one in counts],
        digest=digests_of(packed, counts, statuses, samples),
        samples=samples,
    )


def _status(one: Measurement, n: int) -> str:
    if one.value is None:
        return SKIPPED if one.skipped else FAILED
    return SINGLE_SAMPLE if n == 1 else OK


def _commit(run: ForeignRun, given: Given, repository: Repository | None, where: str) -> str:
    told = given.commit
    if told is not None and not HASH.fullmatch(told):
        told = None if repository is None else repository.resolve(told)
        if told is None:
            raise IngestError(
                f"commit: expected a full hash or one the repository has, got {given.commit!r}"
            )
    if run.commit is None and told is None:
        raise IngestError(f"{where}: expected --commit, got none ({run.tool} names none in it)")
    if run.commit is not None and told not in {None, run.commit}:
        raise IngestError(
            f"{where}: expected results of commit {told}, got some of {run.commit} "
            "(the file says whose they are)"
        )
    return run.commit or str(told)


def _machine(run: ForeignRun, given: Given, where: str) -> dict[str, str | None]:
    name = given.machine or run.machine
    if not name:
        raise IngestError(f"{where}: expected --machine, got none ({run.tool} names none in it)")
    facts = {key: run.machine_facts.get(key) for key in ("arch", "cpu", "num_cpu", "os", "ram")}
    return {"name": fitting(name, 200, "machine"), **facts}


def _committed_at_ms(
    run: ForeignRun, commit: str, repository: Repository | None, where: str
) -> int:
    """Give a commit's date: the repository's, else the file's, else that of the run."""
    known = None if repository is None else repository.committed_at_s(commit)
    found = known if known is not None else run.committed_at_s
    if found is None:
        found = run.started_at_s
    if found is None:
        raise IngestError(
            f"{where}: expected --repository with commit {commit[:12]}, got no date for it"
        )
    return _milliseconds(found, where)


def _milliseconds(seconds: float, where: str) -> int:
    if not 0 <= seconds * 1000 < END_OF_TIME_MS:
        raise IngestError(f"{where}: expected a date from 1970 on, got {seconds} s")
    return int(seconds * 1000)
