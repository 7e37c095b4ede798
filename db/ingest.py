"""Result trees into the database: read, judge, store, join, order; one transaction a call.

Everything a call reads is written together or not at all, so a bad file or a killed process
leaves nothing behind, and a second call over the same files adds nothing.
"""

import datetime as dt
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, func, insert, select

from db.asv_results import read_result_file
from db.asv_tree import MACHINE, ORDER, Tree, discover
from db.benchmark_facts import read_benchmarks
from db.commit_order import order_basis, update_order
from db.errors import IngestError
from db.json_files import load_json, optional
from db.models import Benchmark, Revision, Window
from db.provenance import Judge, Refusal
from db.registry import table_of
from db.repository import CommitInfo, Repository, open_repository, read_recorded_order
from db.result_store import MachineFile, ResultStore
from db.session import chunks, writing
from db.sidecar import SidecarLine, read_sidecar
from db.window_joins import join_windows
from db.window_store import store_windows

MACHINE_FACTS = ("arch", "cpu", "num_cpu", "os", "ram")


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What a call read and what became of it. A value is one case's outcome in one file."""

    files: int
    values: int
    new_results: int
    unchanged: int
    failed: int  # of `values`
    skipped: int  # of `values`
    windows_joined: int  # of the windows read
    windows_unjoined: int
    refused: tuple[Refusal, ...]
    order_basis: str  # "repository", "recorded" or "date"


def ingest(
    engine: Engine,
    paths: Sequence[Path],
    *,
    repository: Path | None = None,
    dry_run: bool = False,
) -> IngestReport:
    """Store every asv result and sidecar line below the paths.

    Parameters
    ----------
    paths : results trees, machine folders, telemetry, or folders above several of them
    repository : where the commits' history is; None looks at the current folder's
    dry_run : read and report, write nothing

    Raises
    ------
    IngestError
        A path holds no results or a file is not what it claims to be; nothing was written.
    """
    trees = discover(paths)
    history = _repository(repository)
    lines = [line for tree in trees for line in _lines(tree)]
    recorded = [info for tree in trees for info in _recorded(tree)]
    judge = Judge(lines, history)
    with _cycles_left_alone(), writing(engine) as connection:
        store = ResultStore(connection, dt.datetime.now(dt.UTC))
        for entry in _files(trees, store, judge):
            store.add(entry)
        store.flush()
        changed = store.counts.new_results + store.counts.withdrawn
        changed += store_windows(connection, judge.accepted, store.machines)
        changed += join_windows(connection, history)
        changed += update_order(connection, history, recorded)
        report = _report(connection, store, judge)
        if changed:
            _note(connection, report)
        if dry_run:
            connection.rollback()
    return report


@contextmanager
def _cycles_left_alone() -> Iterator[None]:
    """Pause the cycle collector: it would walk millions of records, none of which is in a cycle.

    Worth a fifth of the time of a large tree.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _repository(path: Path | None) -> Repository | None:
    if path is None:
        return open_repository(Path.cwd())
    found = open_repository(path)
    if found is None:
        raise IngestError(f"repository: expected a git repository at {path}, found none")
    return found


def _lines(tree: Tree) -> Iterator[SidecarLine]:
    sole = tree.sole_machine
    machine = None if sole is None else _machine_row(sole)["name"]
    for path in tree.sidecars:
        yield from read_sidecar(path, machine)


def _recorded(tree: Tree) -> list[CommitInfo]:
    path = tree.root / ORDER
    return read_recorded_order(path) if path.is_file() else []


def _files(trees: Sequence[Tree], store: ResultStore, judge: Judge) -> Iterator[MachineFile]:
    for tree in trees:
        if not tree.machines:
            continue
        benchmarks = read_benchmarks(tree.root / "benchmarks.json")
        for folder in tree.machines:
            machine = _machine_row(folder.path)
            store.machines.id(machine)
            for path in folder.files:
                file = read_result_file(path, benchmarks)
                refused = judge.refused_cases(str(machine["name"]), file)
                yield MachineFile(str(machine["name"]), file, refused)


def _machine_row(folder: Path) -> dict[str, str | None]:
    """Read machine.json; what it does not say of itself its folder's name does."""
    path = folder / MACHINE
    found, _ = load_json(path)
    facts = {key: None if found.get(key) is None else str(found[key]) for key in MACHINE_FACTS}
    return {"name": optional(found, "machine", str, str(path)) or folder.name, **facts}


def _report(connection: Connection, store: ResultStore, judge: Judge) -> IngestReport:
    counts = store.counts
    joined = _num_joined(connection, [line.window_id for line in judge.accepted])
    names = {
        name: tuple(param_names)
        for name, param_names in connection.execute(select(Benchmark.name, Benchmark.param_names))
    }
    return IngestReport(
        files=counts.files,
        values=counts.values,
        new_results=counts.new_results,
        unchanged=counts.unchanged,
        failed=counts.failed,
        skipped=counts.skipped,
        windows_joined=joined,
        windows_unjoined=len({line.window_id for line in judge.accepted}) - joined,
        refused=judge.refusals(names),
        order_basis=str(order_basis(connection, counts.commits)),
    )


def _num_joined(connection: Connection, uids: Sequence[str]) -> int:
    return sum(
        connection.scalar(
            select(func.count(Window.id)).where(Window.uid.in_(some), Window.result_id.is_not(None))
        )
        or 0
        for some in chunks(uids)
    )


def _note(connection: Connection, report: IngestReport) -> None:
    """Record that pages have something new to show."""
    summary = {
        name: getattr(report, name)
        for name in ("files", "values", "new_results", "failed", "skipped", "windows_joined")
    }
    connection.execute(
        insert(table_of(Revision)),
        {"kind": "ingest", "created_at": dt.datetime.now(dt.UTC), "summary": summary},
    )
