"""The telemetry sidecar: one JSON line for each case and process, beside asv's results.

Lines are `.jsonl`, because asv reads every `.json` under its results. All keys are always
present; null means not known. Who reads them stands on the other side of this file format.

asv tells a process in an existing environment nothing at all, and in a managed one its commit
(`ASV_COMMIT`); machine, run and, where needed, the commit come in the environment variables below
from whoever started asv.

Importing this module imports no torch: a process that only hands on a line must be cheap.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks._ceilings import Ceilings
    from benchmarks._meters import Telemetry

SCHEMA: Final = 1
ROOT: Final = Path(__file__).resolve().parent.parent  # of the checkout these benchmarks are in
ASV_RUNNER: Final = "asv_runner.run"  # loaded in every process that asv starts
RUN_VARIABLE: Final = "DDTREE_BENCH_RUN_ID"
COMMIT_VARIABLE: Final = "DDTREE_BENCH_COMMIT"
MACHINE_VARIABLE: Final = "DDTREE_BENCH_MACHINE"
DIR_VARIABLE: Final = "DDTREE_BENCH_SIDECAR_DIR"


@dataclass(frozen=True, slots=True)
class CaseFacts:
    """What a case is made of; None = not known, or without meaning for this case."""

    context_tokens: int | None = None
    bytes: int | None = None  # least it must read and write
    kv_bytes: int | None = None  # the part of `bytes` that is cached rows: of a step, both models'
    flops: int | None = None
    programs: int | None = None  # launched programs of the dominant kernel
    stage_seconds: Mapping[str, float] | None = None
    commit_length: float | None = None
    new_tokens: int | None = None  # that one run says


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """Everything one process found about one case."""

    benchmark: str
    params: tuple[str, ...]  # as asv writes them: their repr
    version: str
    timer: str
    samples_s: tuple[float, ...]
    started_at: float
    ended_at: float
    facts: CaseFacts
    telemetry: Telemetry
    ceilings: Ceilings


def append_record(record: CaseRecord, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Append the record to this run's sidecar; None where no run asked for one."""
    if sidecar_dir(environ) is None:
        return None
    return append_line(sidecar_line(record, environ), environ)


def append_line(line: dict[str, Any], environ: Mapping[str, str] = os.environ) -> Path | None:
    """Append a line to this run's sidecar, numbered; None where no run asked for one.

    The line is written by one call in append mode, so lines of several processes never mix.
    """
    directory = sidecar_dir(environ)
    if directory is None:
        return None
    path = _file(directory, environ)
    line = line | {"process_number": len(_lines_of(path, line))}
    directory.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
    return path


def sidecar_dir(environ: Mapping[str, str]) -> Path | None:
    """Return where sidecars go: as told, else beside asv's results; None outside asv."""
    told = environ.get(DIR_VARIABLE)
    if told:
        return Path(told)
    if ASV_RUNNER not in sys.modules:
        return None  # nobody is keeping results: a test, or somebody trying a suite by hand
    config = json.loads((ROOT / "asv.conf.json").read_text(encoding="utf-8"))
    return ROOT / str(config["results_dir"]) / "telemetry"


def sidecar_line(record: CaseRecord, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the line as a dict, keys in the order of the schema."""
    from benchmarks._provenance import engine_provenance  # noqa: PLC0415 - imports torch

    facts, telemetry = record.facts, record.telemetry
    return {
        "schema": SCHEMA,
        "benchmark": record.benchmark,
        "params": list(record.params),
        "version": record.version,
        "window_id": uuid.uuid4().hex,
        "run_id": environ.get(RUN_VARIABLE),
        "commit": _commit(environ),
        "machine": environ.get(MACHINE_VARIABLE),
        "process_number": None,
        "pid": os.getpid(),
        **_samples(record.samples_s),
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "timer": record.timer,
        "stage_seconds": None if facts.stage_seconds is None else dict(facts.stage_seconds),
        "commit_length": facts.commit_length,
        "new_tokens": facts.new_tokens,
        "bytes": facts.bytes,
        "kv_bytes": facts.kv_bytes,
        "flops": facts.flops,
        "context_tokens": facts.context_tokens,
        "programs": facts.programs,
        "ceilings": asdict(record.ceilings),
        "device": asdict(telemetry.device),
        "counters": {name: asdict(counter) for name, counter in telemetry.counters.items()},
        "validity": [*telemetry.validity, *_single(record.samples_s)],
        "provenance": asdict(engine_provenance()),
    }


def handed_over(
    line: Mapping[str, Any], samples_s: Sequence[float], started_at: float, ended_at: float
) -> dict[str, Any]:
    """Return the line of another process with the samples this one gave asv, and when it did."""
    own = {"window_id": uuid.uuid4().hex, "pid": os.getpid()}
    times = {"started_at": started_at, "ended_at": ended_at}
    validity = list(dict.fromkeys([*line["validity"], *_single(samples_s)]))
    return {**line, **own, **_samples(samples_s), **times, "validity": validity}


def _samples(samples_s: Sequence[float]) -> dict[str, Any]:
    return {
        "n": len(samples_s),
        "median_s": statistics.median(samples_s),
        "samples_s": list(samples_s),
    }


def _single(samples_s: Sequence[float]) -> list[str]:
    return ["single_sample"] if len(samples_s) == 1 else []


def earlier_lines(
    benchmark: str,
    params: Sequence[str],
    version: str,
    environ: Mapping[str, str] = os.environ,
) -> list[dict[str, Any]]:
    """Return what processes of this run and commit told of a case before this one."""
    directory = sidecar_dir(environ)
    if directory is None:
        return []
    case = {
        "benchmark": benchmark,
        "params": list(params),
        "version": version,
        "commit": _commit(environ),
    }
    return _lines_of(_file(directory, environ), case)


def _file(directory: Path, environ: Mapping[str, str]) -> Path:
    run_id = environ.get(RUN_VARIABLE)
    return directory / f"{run_id or f'asv-{os.getppid()}'}.jsonl"


def _commit(environ: Mapping[str, str]) -> str | None:
    return environ.get(COMMIT_VARIABLE) or environ.get("ASV_COMMIT")


def _lines_of(path: Path, case: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    keys = ("benchmark", "params", "version", "commit")
    earlier = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [other for other in earlier if all(other[key] == case[key] for key in keys)]
