"""What a run has finished, so that the same command goes on where a killed one stopped.

One file a command in `.asv/runs/`, gone when the command is done. A unit is finished if it is
written here or, where the run died between asv's end and that, if asv's result file has its
benchmarks since it began: asv writes only at its end. asv does not replace its files in one step,
so they are copied before each call, and a torn one is put back.

`.asv/runs/durations.json` remembers what a case of each benchmark took, for estimates.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from dashboard.asv_results import failed_cases, has_results_since

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dashboard.asv_units import Unit

FOLDER: Final = "runs"  # below .asv
DURATIONS: Final = "durations.json"
KEPT: Final = "kept"
WHOLE_COMMIT: Final = "*"  # key of the entry that says so


@dataclass(frozen=True, slots=True)
class Entry:
    """One unit of a commit: under way, or finished where `seconds` is known."""

    commit: str
    unit: str  # its key
    run_id: str
    started_ms: float
    benchmarks: tuple[str, ...]
    seconds: float | None = None
    failed: tuple[str, ...] = ()  # cases

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Entry:
        """Make one of what a file holds."""
        lists = {name: tuple(content[name]) for name in ("benchmarks", "failed")}
        return cls(**{**content, **lists})


@dataclass(slots=True)
class Journal:
    """The finished units of one command."""

    path: Path
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, command: Mapping[str, Any], results_dir: Path) -> Journal:
        """Read what an unfinished run of this command left; mend what it tore.

        Parameters
        ----------
        folder : `.asv`
        command : what makes two commands the same one
        """
        key = hashlib.sha256(json.dumps(command, sort_keys=True).encode()).hexdigest()[:16]
        journal = cls(folder / FOLDER / f"{key}.json")
        put_back_torn(folder / FOLDER / KEPT, results_dir)
        if journal.path.is_file():
            content = json.loads(journal.path.read_text(encoding="utf-8"))
            found = [_judged(Entry.read(one), results_dir) for one in content]
            journal.entries = {(e.commit, e.unit): e for e in found if e.seconds is not None}
        return journal

    def has(self, commit: str, unit: Unit) -> bool:
        """Say whether the unit is finished."""
        return (commit, unit.key) in self.entries

    def begin(self, commit: str, unit: Unit, run_id: str) -> Entry:
        """Write that a unit is under way."""
        entry = Entry(commit, unit.key, run_id, time.time() * 1e3, unit.benchmarks)
        self._write([*self.entries.values(), entry])
        return entry

    def end(self, entry: Entry, seconds: float, failed: Sequence[str]) -> None:
        """Write that a unit is finished."""
        done = replace(entry, seconds=seconds, failed=tuple(failed))
        self.entries[entry.commit, entry.unit] = done
        self._write(list(self.entries.values()))

    def complete(self, commit: str, run_id: str) -> None:
        """Write that a commit has nothing left to measure."""
        self.end(Entry(commit, WHOLE_COMMIT, run_id, time.time() * 1e3, ()), 0.0, ())

    def is_complete(self, commit: str) -> bool:
        """Say whether a commit has nothing left to measure."""
        return (commit, WHOLE_COMMIT) in self.entries

    def of_commit(self, commit: str) -> list[Entry]:
        """Return the finished units of a commit."""
        return [
            e for (of, unit), e in self.entries.items() if of == commit and unit != WHOLE_COMMIT
        ]

    def forget(self) -> None:
        """Begin anew, or be done: nothing is left to go on with."""
        self.entries.clear()
        self.path.unlink(missing_ok=True)

    def _write(self, entries: list[Entry]) -> None:
        replace_json(self.path, [asdict(entry) for entry in entries])


def _judged(entry: Entry, results_dir: Path) -> Entry:
    """Return an entry as finished if asv wrote its results before the run could say so."""
    if entry.seconds is not None or not has_results_since(
        results_dir, entry.commit, entry.benchmarks, entry.started_ms
    ):
        return entry
    failed = failed_cases(results_dir, entry.commit, entry.started_ms)
    of_unit = [case for case in failed if case.partition("(")[0] in entry.benchmarks]
    return replace(entry, seconds=0.0, failed=tuple(of_unit))


@dataclass(slots=True)
class Durations:
    """Seconds that a case of a unit took when it was measured last."""

    path: Path
    profile: str
    known: dict[str, float]

    @classmethod
    def open(cls, folder: Path, profile: str) -> Durations:
        """Read what earlier runs of a profile took."""
        path = folder / FOLDER / DURATIONS
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return cls(path, profile, content.get(profile, {}))

    def add(self, unit: Unit, seconds: float) -> None:
        """Remember what a unit took."""
        self.known[_name(unit)] = seconds / len(unit.cases)
        content = json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else {}
        replace_json(self.path, content | {self.profile: self.known})

    def estimate_s(self, unit: Unit) -> float | None:
        """Return what a unit takes; the mean of the others where it was never measured."""
        a_case = self.known.get(_name(unit))
        if a_case is None and self.known:
            a_case = sum(self.known.values()) / len(self.known)
        return None if a_case is None else a_case * len(unit.cases)


def _name(unit: Unit) -> str:
    return unit.benchmarks[0] if unit.benchmarks else unit.label


def keep_results(folder: Path, results_dir: Path, commit: str) -> None:
    """Copy the result files of a commit, which asv is about to write over."""
    kept = folder / FOLDER / KEPT / commit
    shutil.rmtree(kept.parent, ignore_errors=True)
    kept.mkdir(parents=True)
    for path in results_dir.glob(f"*/{commit[:8]}-*.json"):
        (kept / path.parent.name).mkdir(exist_ok=True)
        shutil.copy2(path, kept / path.parent.name / path.name)


def put_back_torn(kept: Path, results_dir: Path) -> None:
    """Replace result files that a killed asv left half written by their copies, if there are."""
    for copies in kept.glob("*"):
        for path in results_dir.glob(f"*/{copies.name[:8]}-*.json"):
            if _is_whole(path):
                continue
            copy = copies / path.parent.name / path.name
            if copy.is_file():
                shutil.copy2(copy, path)
            else:
                path.unlink()
    shutil.rmtree(kept, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def replace_json(path: Path, content: object) -> None:
    """Write a file of ours so that a reader finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, allow_nan=False, indent=1), encoding="utf-8")
    draft.replace(path)
