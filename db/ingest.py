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

from db.asv_tree import sources
from db.commit_order import order_basis, update_order
from db.errors import IngestError
from db.foreign import Given
from db.ingest_reading import Reader
from db.ingest_settings import Settings
from db.models import Benchmark, Revision, Window
from db.provenance import Refusal
from db.registry import table_of
from db.renames import rename_stored
from db.repository import Repository, open_repository
from db.result_store import ResultStore
from db.session import chunks, writing
from db.window_joins import join_windows
from db.window_store import store_windows

AS_IT_IS = Settings()
NOTHING = Given()


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
    unexplained: tuple[str, ...] = ()  # metrics without a direction, of which nothing was stored


def ingest(
    engine: Engine,
    paths: Sequence[Path],
    *,
    repository: Path | None = None,
    settings: Settings = AS_IT_IS,
    given: Given = NOTHING,
    dry_run: bool = False,
) -> IngestReport:
    """Store every result and sidecar line below the paths.

    Parameters
    ----------
    paths : results trees, machine folders, telemetry, folders above several of them, or JSON files
        of pytest-benchmark, google-benchmark and nvbench
    repository : where the commits' history is; None looks at the current folder's
    settings : meaning of metrics, and what was renamed; also applied to what is stored
    given : commit and machine of files that name none
    dry_run : read and report, write nothing

    Raises
    ------
    IngestError
        A path holds no results or a file is not what it claims to be; nothing was written.
    BusyError
        Others wrote all the time; nothing was written.
    """
    reader = Reader(sources(paths), _repository(repository), settings, given)
    with _cycles_left_alone():
        files = reader.files()
        with writing(engine) as connection:
            changed = rename_stored(connection, settings)
            store = ResultStore(connection, dt.datetime.now(dt.UTC))
            for entry in files:
                store.add(entry)
            store.finish()
            changed += store.counts.new_results + store.counts.withdrawn
            changed += store_windows(connection, reader.judge.accepted, store.machines)
            changed += join_windows(connection, reader.history)
            changed += update_order(connection, reader.history, reader.recorded)
            report = _report(connection, store, reader)
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


def _report(connection: Connection, store: ResultStore, reader: Reader) -> IngestReport:
    counts, judge = store.counts, reader.judge
    uids = {line.window_id for line in judge.accepted}
    joined = _num_joined(connection, sorted(uids))
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
        windows_unjoined=len(uids) - joined,
        refused=judge.refusals(names),
        order_basis=str(order_basis(connection, counts.commits)),
        unexplained=reader.unexplained,
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
