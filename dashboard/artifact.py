"""An archive of results that somebody else measured, unpacked without believing it.

A fork's job fills it, so nothing of it is trusted: not its sizes, its names, its commits, nor which
pull request it says it is of (it is not asked). What does not fit is refused as a whole, before any
of it is read into a database. It holds what `ddtree-bench run` leaves, and nothing else::

    benchmarks.json
    confirmed.json              what `confirm --json` said on the same runner
    <machine>/machine.json
    <machine>/<result>.json
    telemetry/<process>.jsonl
    telemetry/<run>.run         what the doctor found; it lies there, and nothing here asks
"""

from __future__ import annotations

import json
import re
import stat
import struct
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from zlib import error as ZlibError  # noqa: N812 - it is a class

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

MOST_BYTES: Final = 64 * 2**20  # of the archive
MOST_UNPACKED_BYTES: Final = 128 * 2**20
MOST_BYTES_OF_A_FILE: Final = 32 * 2**20  # parsed JSON takes twenty times its text
MOST_FILES: Final = 5_000
CONFIRMED: Final = "confirmed.json"
BENCHMARKS: Final = "benchmarks.json"
UNREAD: Final = ".run"

_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.,=+@\[\]~-]{0,194}"
_RESULT: Final = re.compile(rf"(?P<machine>(?!telemetry/){_NAME})(?<!\.json)/{_NAME}\.json")
_SIDECAR: Final = re.compile(rf"telemetry/{_NAME}\.jsonl")
_RECORD: Final = re.compile(rf"telemetry/{_NAME}\{UNREAD}")
_PLAIN: Final = re.compile(rf"(?:{_NAME}/)?{_NAME}\.[a-z]+")
_BENCHMARK: Final = re.compile(r"[A-Za-z_]\w{0,99}(\.[A-Za-z_]\w{0,99}){0,9}", re.ASCII)
_METHODS: Final = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})  # others need memory unseen
_DAMAGE: Final = (  # what the library raises for archives that are none
    zipfile.BadZipFile,
    ZlibError,
    struct.error,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)


class ArtifactError(Exception):
    """An archive is not what a measuring job may hand over; nothing of it was used."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An archive whose files name nothing but the commits that were asked for."""

    results: Path
    confirmed: object  # parsed JSON of CONFIRMED, unchecked; None where there is none


def unpack(archive: Path, into: Path, commits: Collection[str]) -> Unpacked:
    """Unpack an archive of results of these commits, full hashes, into an empty folder.

    Raises
    ------
    ArtifactError
        It is too large or no archive, a name in it leads elsewhere or is no result's, or a result
        names another commit.
    """
    confirmed = None
    for name, content in _read(archive):
        if name == CONFIRMED:
            confirmed = _parsed(content, name)
            continue
        _check(name, content, commits)
        path = into / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return Unpacked(into, confirmed)


def only_file(archive: Path, name: str) -> bytes:
    """Return the one file that an archive holds, by its name.

    Raises
    ------
    ArtifactError
        It is too large or no archive, or holds something else.
    """
    found = dict(_read(archive))
    if set(found) != {name}:
        raise ArtifactError(f"artifact: expected {name} alone, got {len(found)} files")
    return found[name]


def _read(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Give names and contents, after all of the names and sizes were looked at."""
    size = archive.stat().st_size
    if size > MOST_BYTES:
        raise ArtifactError(f"artifact: expected at most {MOST_BYTES} bytes, got {size}")
    try:
        with zipfile.ZipFile(archive) as opened:
            for entry in _checked(opened.infolist()):
                yield entry.filename, opened.read(entry)
    except _DAMAGE as error:
        said = " ".join(str(error).split())
        raise ArtifactError(f"artifact: expected a readable zip file, got {said:.200}") from None


def _checked(entries: list[zipfile.ZipInfo]) -> Iterator[zipfile.ZipInfo]:
    """Give the files among the entries, after all of them were looked at.

    What an entry unpacks to is not more than it says: reading ends there, with a checksum.
    """
    total = sum(entry.file_size for entry in entries)
    if len(entries) > MOST_FILES or total > MOST_UNPACKED_BYTES:
        raise ArtifactError(
            f"artifact: expected at most {MOST_FILES} files of {MOST_UNPACKED_BYTES} bytes "
            f"together, got {len(entries)} of {total}"
        )
    seen: set[str] = set()
    files = [entry for entry in entries if not entry.is_dir()]
    for entry in files:
        name = f"{entry.filename!r:.200}"
        if not _PLAIN.fullmatch(entry.filename):
            raise ArtifactError(f"artifact: expected names of results, got {name}")
        if stat.S_IFMT(entry.external_attr >> 16) not in {0, stat.S_IFREG}:
            raise ArtifactError(f"artifact: expected JSON in plain files, got {name}")
        if entry.compress_type not in _METHODS or entry.file_size > MOST_BYTES_OF_A_FILE:
            raise ArtifactError(
                f"artifact: expected at most {MOST_BYTES_OF_A_FILE} bytes, stored or deflated, "
                f"got {entry.file_size} of {name}"
            )
        if entry.filename.lower() in seen:
            raise ArtifactError(f"artifact: expected each file once, got {name} again")
        seen.add(entry.filename.lower())
    yield from (entry for entry in files if not _RECORD.fullmatch(entry.filename))


def _check(name: str, content: bytes, commits: Collection[str]) -> None:
    """Refuse what has no place among results, or is of another commit, machine or language."""
    if _SIDECAR.fullmatch(name):
        for line in content.splitlines():
            if line.strip():
                found = _parsed(line, name)
                _check_commit(name, found, "commit", commits)
                _check_benchmarks(name, [found.get("benchmark", "")])
    elif name == BENCHMARKS:
        _check_benchmarks(name, [key for key in _parsed(content, name) if key != "version"])
    elif (place := _RESULT.fullmatch(name)) is None:
        raise ArtifactError(f"artifact: expected JSON in plain files of results, got {name!r:.200}")
    elif name == f"{place['machine']}/machine.json":
        machine = _parsed(content, name).get("machine")
        if machine != place["machine"]:
            raise ArtifactError(
                f"artifact: {name}: expected its folder's name, got {machine!r:.60}"
            )
    else:
        found = _parsed(content, name)
        _check_commit(name, found, "commit_hash", commits)
        results = found.get("results")
        _check_benchmarks(name, results if isinstance(results, dict) else ())


def _check_commit(name: str, found: dict[str, object], key: str, commits: Collection[str]) -> None:
    commit = found.get(key)
    if not isinstance(commit, str) or commit not in commits:
        wanted = " or ".join(sorted(one[:12] for one in commits))
        raise ArtifactError(f"artifact: {name}: expected results of {wanted}, got {commit!r:.60}")


def _check_benchmarks(name: str, found: Collection[object]) -> None:
    """Refuse what no Python program can call a benchmark: it is shown to people."""
    for one in found:
        if not isinstance(one, str) or not _BENCHMARK.fullmatch(one):
            raise ArtifactError(f"artifact: {name}: expected names of benchmarks, got {one!r:.200}")


def _parsed(content: bytes, name: str) -> dict[str, object]:
    try:
        found = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ArtifactError(f"artifact: {name}: expected JSON, got text that is none") from None
    if not isinstance(found, dict):
        raise ArtifactError(f"artifact: {name}: expected an object, got {type(found).__name__}")
    return found
