"""The dependencies that a commit pins, put beside this interpreter where it has others.

A range of commits is measured in the interpreter that runs us. One that pins a version (`name==1.2`
in its pyproject.toml) which is not installed gets it in a folder of its own below `.asv/`, from the
wheels that `DDTREE_BENCH_WHEELS` names, and the folder stands before the interpreter's on the path
of its processes. Without such a wheel the commit is not measured: its numbers would be another
environment's. Looser requirements are the interpreter's business.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dashboard.asv_errors import AsvFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping

WHEELS_VARIABLE: Final = "DDTREE_BENCH_WHEELS"
FOLDER: Final = Path(".asv") / "pins"
DECLARATION: Final = "pyproject.toml"
PIN: Final = re.compile(r"([A-Za-z0-9][\w.-]*)\s*==\s*([0-9][0-9A-Za-z.+!]*)")


def pins_of(source: Path) -> dict[str, str]:
    """Return the versions that the project in a folder pins, by name."""
    path = source / DECLARATION
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise AsvFailedError(f"{DECLARATION}: expected TOML, got another text ({error})") from error
    needs = content.get("project", {}).get("dependencies", [])
    found = (PIN.fullmatch(need.strip()) for need in needs)
    return {one[1]: one[2] for one in found if one is not None}


def missing_of(pins: Mapping[str, str]) -> dict[str, str]:
    """Return the pins of which this interpreter has another version or none."""
    return {name: pin for name, pin in pins.items() if _installed(name) != pin}


def path_of(root: Path, source: Path) -> str:
    """Return where processes of the code in `source` look first: there, then what it pins."""
    missing = missing_of(pins_of(source))
    if not missing:
        return str(source)
    return os.pathsep.join([str(source), str(folder_of(root, missing))])


def folder_of(root: Path, missing: Mapping[str, str]) -> Path:
    """Return a folder that holds these versions, made if it is not there yet.

    Raises
    ------
    AsvFailedError
        There are no wheels, or not these.
    """
    needs = sorted(f"{name}=={pin}" for name, pin in missing.items())
    wheels = os.environ.get(WHEELS_VARIABLE)
    if not wheels:
        raise AsvFailedError(
            f"pins: expected {', '.join(needs)}, got other versions (the commit pins them; "
            f"{WHEELS_VARIABLE} may name a folder of wheels)"
        )
    folder = root / FOLDER / hashlib.sha256("\n".join(needs).encode()).hexdigest()[:16]
    if not folder.is_dir():
        _install(needs, Path(wheels), folder)
    return folder


def _install(needs: list[str], wheels: Path, folder: Path) -> None:
    """Have pip unpack the wheels; a folder that exists is whole."""
    draft = folder.with_name(f"{folder.name}.{os.getpid()}")
    options = ["--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--find-links", str(wheels)]
    outcome = subprocess.run(  # noqa: S603 - no shell; requirements were parsed
        [*command, "--target", str(draft), *needs], capture_output=True, text=True, check=False
    )
    if outcome.returncode:
        shutil.rmtree(draft, ignore_errors=True)
        last = (outcome.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise AsvFailedError(f"pins: expected wheels of {', '.join(needs)} in {wheels}, got {last}")
    draft.rename(folder)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
