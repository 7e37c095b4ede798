"""JSON from outside: read once, checked at the border, refused with the file's name."""

import json
from pathlib import Path
from typing import Any, TypeVar

from db.errors import IngestError

T = TypeVar("T")
MOST = 2**63 - 1  # what a database's integers hold


def load_json(path: Path) -> tuple[dict[str, Any], bytes]:
    """Read a file that holds one JSON object; also give its bytes.

    asv writes NaN and Infinity as bare words, which are no JSON; Python's reader knows them.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise IngestError(f"{path}: expected a readable file, got {error.strerror}") from None
    return parse_object(raw, str(path)), raw


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object; `where` names its file and line in the error."""
    try:
        found = json.loads(raw)
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


def name_of(value: object) -> str:
    """Say what kind of JSON value it is."""
    return "null" if value is None else type(value).__name__
