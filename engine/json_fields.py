"""The fields of a JSON object as they stand, refused where they are not of the kind they must be.

Knows how a file is read and what was wrong with it, and nothing about what a field means.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import MAX_LAYERS
from engine.errors import ConfigError, WeightsError

Fields = Mapping[str, Any]


def read_fields(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; a `WeightsError` says what else it is."""
    if not path.is_file():
        raise WeightsError(f"model directory: expected a {path.name} in {path.parent}, got none")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # broken JSON or UTF-8, or nested without end
        raise WeightsError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def require_fixed(config: Fields, fixed: Fields, where: str = "") -> None:
    """Refuse fields that are there with another value than the only one with a `ConfigError`."""
    for name, wanted in fixed.items():
        if config.get(name, wanted) != wanted:
            raise ConfigError(
                f"{where}{name}: expected {wanted!r}, got {config[name]!r} (nothing else is "
                "implemented)"
            )


def require_layers(config: Fields, name: str) -> int:
    """Return a number of layers; a `ConfigError` says what else the field is."""
    value = config.get(name)
    if type(value) is not int or not 0 <= value <= MAX_LAYERS:
        raise ConfigError(
            f"{name}: expected an integer in 0..{MAX_LAYERS}, got {value!r} (a number of layers)"
        )
    return value


def section(config: Fields, name: str) -> dict[str, Any]:
    """Return an object inside `config`, empty if null or absent; `ConfigError` as above."""
    value = config.get(name)
    if not isinstance(value, dict | None):
        raise ConfigError(f"{name}: expected an object, got {value!r} (a part of config.json)")
    return value or {}


def require_list(config: Fields, name: str) -> tuple[Any, ...]:
    """Return the entries of a list; `ConfigError` as above."""
    value = config[name]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name}: expected a list, got {value!r} (of layers)")
    return tuple(value)
