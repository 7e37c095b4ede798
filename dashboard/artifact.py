"""An archive of results that somebody else measured, unpacked without believing it.

A fork's job fills it, so nothing of it is trusted: not its sizes, its names, its commits, nor which
pull request it says it is of (it is not asked). What does not fit is refused as a whole, before any
of it is read into a database.
"""

from __future__ import annotations

import json
import re
import stat
import zipfile
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final
from zlib import error as ZlibError  # noqa: N812 - it is a class

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

MOST_BYTES: Final = 64 * 2**20  # of the archive
MOST_UNPACKED_BYTES: Final = 512 * 2**20
MOST_FILES: Final = 5_000
DEEPEST: Final = 2  # machine/result.json, telemetry/process.jsonl
CONFIRMED: Final = "confirmed.json"  # what `confirm --json` said on the same runner
SUFFIXES: Final = frozenset({".json", ".jsonl"})  # no recorded order: history is not theirs to tell
UNREAD: Final = ".run"  # what the doctor found beside a run; it lies there, and nothing here asks

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+@\[\]~-]{0,199}")


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
        _check_commits(name, content, commits)
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
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
    except (zipfile.BadZipFile, ZlibError, NotImplementedError, EOFError, RuntimeError) as error:
        raise ArtifactError(f"artifact: expected a readable zip file, got {error}") from None


def _checked(entries: list[zipfile.ZipInfo]) -> Iterator[zipfile.ZipInfo]:
    """Give the files among the entries, after all of them were looked at.

    What an entry unpacks to is not more than it says: reading ends there, with a checksum.
    """
    files = [entry for entry in entries if not entry.is_dir()]
    total = sum(entry.file_size for entry in files)
    if len(files) > MOST_FILES or total > MOST_UNPACKED_BYTES:
        raise ArtifactError(
            f"artifact: expected at most {MOST_FILES} files of {MOST_UNPACKED_BYTES} bytes "
            f"together, got {len(files)} of {total}"
        )
    seen: set[str] = set()
    files = [entry for entry in files if not entry.filename.endswith(UNREAD)]
    for entry in files:
        parts = entry.filename.split("/")
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if len(parts) > DEEPEST or not all(_NAME.fullmatch(part) for part in parts):
            raise ArtifactError(f"artifact: expected names of results, got {entry.filename!r:.200}")
        if PurePosixPath(entry.filename).suffix not in SUFFIXES or kind not in {0, stat.S_IFREG}:
            raise ArtifactError(f"artifact: expected JSON in plain files, got {entry.filename!r}")
        if entry.filename.lower() in seen:
            raise ArtifactError(f"artifact: expected each file once, got {entry.filename!r} again")
        seen.add(entry.filename.lower())
    yield from files


def _check_commits(name: str, content: bytes, commits: Collection[str]) -> None:
    """Refuse a result file or a line of telemetry that is not of one of the commits."""
    if name.endswith(".jsonl"):
        for line in content.splitlines():
            if line.strip():
                _check(name, _parsed(line, name), "commit", commits)
    elif "/" in name and not name.endswith("/machine.json"):
        _check(name, _parsed(content, name), "commit_hash", commits)


def _check(name: str, found: object, key: str, commits: Collection[str]) -> None:
    commit = found.get(key) if isinstance(found, dict) else None
    if commit not in commits:
        wanted = " or ".join(sorted(one[:12] for one in commits))
        raise ArtifactError(f"artifact: {name}: expected results of {wanted}, got {commit!r:.60}")


def _parsed(content: bytes, name: str) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ArtifactError(f"artifact: {name}: expected JSON, got text that is none") from None
