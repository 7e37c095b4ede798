"""Whose code ran: the engine that was imported, as a git tree hash of its files on disk.

The hash is git's own (SHA-1 over blobs and trees), computed here so that it also works for an
installed copy that has no repository. It equals `git rev-parse <commit>:engine` exactly when the
files are that commit's. `__pycache__` and compiled files are not code and are left out; every
file counts as mode 100644, which is what engine/ holds.

`dirty` says that the files differ from the HEAD of the checkout they lie in. It does not ask
which commit the run claims: whether the tree is that commit's is for the reader to judge, so a
clean checkout of another commit is `dirty: false` with a foreign tree, and must be refused.
"""

import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import engine

IGNORED_DIRS: Final = frozenset({"__pycache__"})
IGNORED_SUFFIXES: Final = frozenset({".pyc"})
FILE_MODE: Final = b"100644"
DIR_MODE: Final = b"40000"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the engine came from; None = not known."""

    engine_file: str | None  # relative to its checkout, or "site-packages"
    engine_tree: str | None  # 40 hex digits
    dirty: bool | None  # None outside a checkout
    external: bool = False
    source: str | None = None


def engine_provenance() -> Provenance:
    """Return the provenance of the engine this process imported."""
    return provenance_of(Path(str(engine.__file__)).parent)


def provenance_of(package: Path) -> Provenance:
    """Return the provenance of the package in this folder."""
    tree = git_tree_hash(package)
    checkout = package.parent
    head = _head_tree(checkout, package.name)
    if head is None:
        inside = "site-packages" if checkout.name == "site-packages" else None
        return Provenance(engine_file=inside, engine_tree=tree, dirty=None)
    return Provenance(
        engine_file=f"{package.name}/__init__.py", engine_tree=tree, dirty=tree != head
    )


def git_tree_hash(folder: Path) -> str:
    """Return git's hash of the folder as a tree, from the files on disk, in 40 hex digits."""
    return _tree_digest(folder).hex()


def _tree_digest(folder: Path) -> bytes:
    entries: list[tuple[bytes, bytes, bytes]] = []
    for path in folder.iterdir():
        name = path.name.encode()
        if path.is_dir():
            if path.name not in IGNORED_DIRS and _holds_files(path):
                # git sorts a folder as if its name ended in a slash
                entries.append((name + b"/", DIR_MODE + b" " + name, _tree_digest(path)))
        elif path.suffix not in IGNORED_SUFFIXES:
            entries.append((name, FILE_MODE + b" " + name, _digest(b"blob", path.read_bytes())))
    body = b"".join(head + b"\0" + digest for _, head, digest in sorted(entries))
    return _digest(b"tree", body)


def _holds_files(folder: Path) -> bool:
    """Return whether git would know the folder: it keeps no empty ones."""
    for path in folder.iterdir():
        if path.is_dir():
            if path.name not in IGNORED_DIRS and _holds_files(path):
                return True
        elif path.suffix not in IGNORED_SUFFIXES:
            return True
    return False


def _digest(kind: bytes, body: bytes) -> bytes:
    header = kind + b" " + str(len(body)).encode() + b"\0"
    return hashlib.sha1(header + body, usedforsecurity=False).digest()


def _head_tree(checkout: Path, folder: str) -> str | None:
    """Return the tree of `folder` in the checkout's HEAD; None where there is no such checkout."""
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return None
    outcome = subprocess.run(  # noqa: S603 - no shell, every word is ours
        [git, "-C", str(checkout), "rev-parse", "--verify", "--quiet", f"HEAD:{folder}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return outcome.stdout.strip() if outcome.returncode == 0 else None
