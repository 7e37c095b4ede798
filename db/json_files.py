"""JSON from outside: read once, checked at the border, refused with the file's name.

What passes fits both databases: texts without NUL and lone surrogates, no longer than their column,
and numbers that a column of the given width holds.
"""

import json
import re
import stat
from pathlib import Path
from typing import Any, TypeVar

from db.errors import IngestError

T = TypeVar("T")
MOST = 2**63 - 1  # what a database's integers hold
MOST_COUNT = 2**31 - 1  # what its columns of counts hold
MOST_BYTES = 256 * 2**20  # of a file; a million results of asv are about 100 MB
SUSPECT = re.compile(r"\\u(0000|[dD][89a-fA-F])")  # escapes of what no database stores
UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def read_bytes(path: Path) -> bytes:
    """Read a plain file of bearable size.

    Raises
    ------
    IngestError
        It cannot be read, is longer than `MOST_BYTES`, or is a pipe or device, which may not end.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise IngestError(f"{path}: expected a plain file, got another kind")
        if found.st_size > MOST_BYTES:
            raise IngestError(f"{path}: expected at most {MOST_BYTES} bytes, got {found.st_size}")
        return path.read_bytes()
    except OSError as error:
        raise IngestError(f"{path}: expected a readable file, got {error.strerror}") from None


def load_json(path: Path) -> tuple[dict[str, Any], bytes]:
    """Read a file that holds one JSON object; also give its bytes.

    asv writes NaN and Infinity as bare words, which are no JSON; Python's reader knows them.
    """
    raw = read_bytes(path)
    return parse_object(raw, str(path)), raw


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object; `where` names its file and line in the error."""
    try:
        text = raw.decode("utf-8")
        found = json.loads(text)
        if SUSPECT.search(text):
            _refuse_unstorable(found, where)
    except (ValueError, RecursionError) as error:
        raise IngestError(f"{where}: expected JSON, got text that is none ({error})") from None
    if not isinstance(found, dict):
        raise IngestError(f"{where}: expected a JSON object, got {name_of(found)}")
    return found


def require(found: dict[str, Any], key: str, kind: type[T], where: str) -> T:
    """Give the value of a key that must be there and of that type."""
    value = optional(found, key, kind, where)
    if value is None:
        state = "null" if key in found else "nothing"
        raise IngestError(f"{where}: {key}: expected {kind.__name__}, got {state}")
    return value


def optional(found: dict[str, Any], key: str, kind: type[T], where: str) -> T | None:
    """Give the value of a key that may be absent or null, else must be of that type.

    A float may be written without its point; a truth value is never a number.
    """
    value = found.get(key)
    if type(value) is int and not -MOST - 1 <= value <= MOST:
        raise IngestError(f"{where}: {key}: expected a number of 64 bits, got a longer one")
    if value is None or type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return kind(value)  # type: ignore[call-arg]
    raise IngestError(f"{where}: {key}: expected {kind.__name__}, got {name_of(value)}")


def require_text(found: dict[str, Any], key: str, most: int, where: str) -> str:
    """Give a text that must be there, not be empty, and fit a column of `most` characters."""
    text = fitting(require(found, key, str, where), most, f"{where}: {key}")
    if not text:
        raise IngestError(f"{where}: {key}: expected a text, got an empty one")
    return text


def optional_text(found: dict[str, Any], key: str, most: int, where: str) -> str | None:
    """Give a text that may be absent, and fits a column of `most` characters."""
    text = optional(found, key, str, where)
    return None if text is None else fitting(text, most, f"{where}: {key}")


def optional_count(found: dict[str, Any], key: str, where: str) -> int | None:
    """Give a whole number from 0 that may be absent."""
    value = optional(found, key, int, where)
    if value is not None and not 0 <= value <= MOST_COUNT:
        raise IngestError(f"{where}: {key}: expected 0..{MOST_COUNT}, got {value}")
    return value


def fitting(text: str, most: int, where: str) -> str:
    """Give the text back if a column of `most` characters holds it."""
    if len(text) > most:
        raise IngestError(f"{where}: expected at most {most} characters, got {len(text)}")
    return text


def name_of(value: object) -> str:
    """Say what kind of JSON value it is."""
    return "null" if value is None else type(value).__name__


def _refuse_unstorable(value: object, where: str) -> None:
    """Look through all texts, keys too, for what a database cannot hold."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str) and UNSTORABLE.search(one):
            raise IngestError(f"{where}: expected texts, got one with NUL or half a character")
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
