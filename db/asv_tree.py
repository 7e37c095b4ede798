"""Where results lie below a path: trees of machine folders, telemetry and recorded order.

    results/
    ├── benchmarks.json         units and parameter names
    ├── commits.tsv             order, where whoever recorded the tree kept it (optional)
    ├── <machine>/machine.json
    │   └── <commit>-<environment>.json
    └── telemetry/*.jsonl       what the meters saw (optional)

A path may be such a tree, one machine's folder in it, its telemetry, or any folder above several.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from db.errors import IngestError

BENCHMARKS = "benchmarks.json"
MACHINE = "machine.json"
ORDER = "commits.tsv"
TELEMETRY = "telemetry"
# Never results: build folders of asv and tools, and what `asv publish` wrote.
PRUNED = frozenset({".git", ".venv", "env", "html", "node_modules", "__pycache__"})


@dataclass(frozen=True, slots=True)
class MachineFolder:
    """One machine's result files."""

    path: Path
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """One results folder; without machines it is telemetry alone."""

    root: Path
    machines: tuple[MachineFolder, ...]
    sidecars: tuple[Path, ...]

    @property
    def sole_machine(self) -> MachineFolder | None:
        """The only machine there is, told by the tree itself; its files may not be asked for."""
        found = [path.parent for path in self.root.glob(f"*/{MACHINE}")]
        return MachineFolder(found[0], ()) if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything below the paths: asv's trees, and single files of other tools."""

    trees: tuple[Tree, ...]
    files: tuple[Path, ...]


def sources(paths: Sequence[Path]) -> Sources:
    """Part the paths: a JSON file, or a folder with nothing but such files, is another tool's.

    Raises
    ------
    IngestError
        As `discover`.
    """
    folders: list[Path] = []
    files: dict[Path, None] = {}
    for path in paths:
        if found := _foreign_files(path.absolute()):
            files.update(dict.fromkeys(found))
        else:
            folders.append(path)
    return Sources(tuple(discover(folders)), tuple(files))


def _foreign_files(path: Path) -> list[Path]:
    """Give the JSON files of a path that is no part of an asv tree."""
    if path.suffix == ".json" and path.is_file():
        return [path]
    if any(tree.machines or tree.sidecars for tree in _trees_below(path)):
        return []  # an asv tree; `discover` names what such a folder lacks
    return sorted(one for one in path.rglob("*.json") if not PRUNED & set(one.parts))


def discover(paths: Sequence[Path]) -> list[Tree]:
    """Find every tree below the paths, each once, in the order of their names.

    Raises
    ------
    IngestError
        A path does not exist or holds no results, or a folder of results lacks a file that
        gives them their meaning.
    """
    found: dict[Path, Tree] = {}
    for path in paths:
        trees = list(_trees_below(path.absolute()))
        if not any(tree.machines or tree.sidecars for tree in trees):
            raise IngestError(
                f"{path}: expected asv results ({BENCHMARKS} beside folders with {MACHINE}), "
                f"{'found none' if path.exists() else 'found no such path'}"
            )
        for tree in trees:
            found[tree.root] = _merge(found.get(tree.root), tree)
    return list(found.values())


def _merge(known: Tree | None, other: Tree) -> Tree:
    """Join what two paths gave of one tree, each file once."""
    if known is None:
        return other
    machines = {folder.path: folder for folder in (*known.machines, *other.machines)}
    sidecars = dict.fromkeys((*known.sidecars, *other.sidecars))
    return Tree(known.root, tuple(machines.values()), tuple(sidecars))


def _trees_below(path: Path) -> Iterator[Tree]:
    if path.suffix == ".jsonl" and path.is_file():
        yield Tree(path.parent.parent, (), (path,))
        return
    if (path / MACHINE).is_file():
        yield _tree(path.parent, [path])
        return
    if path.name == TELEMETRY and path.is_dir():
        yield Tree(path.parent, (), tuple(sorted(path.glob("*.jsonl"))))
        return
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name not in PRUNED)
        if BENCHMARKS in files:
            yield _tree(Path(folder), _machine_folders(Path(folder), names))
            names.clear()
        elif MACHINE in files:
            yield _tree(Path(folder).parent, [Path(folder)])


def _machine_folders(root: Path, names: Sequence[str]) -> list[Path]:
    return [root / name for name in names if any((root / name).glob("*.json"))]


def _tree(root: Path, folders: Sequence[Path]) -> Tree:
    for needed in (root / BENCHMARKS, *(folder / MACHINE for folder in folders)):
        if not needed.is_file():
            raise IngestError(
                f"{needed}: expected this file beside the results, found none "
                "(it says what the numbers mean)"
            )
    machines = (
        MachineFolder(
            folder, tuple(sorted(file for file in folder.glob("*.json") if file.name != MACHINE))
        )
        for folder in folders
    )
    sidecars = tuple(sorted((root / TELEMETRY).glob("*.jsonl")))
    return Tree(root, tuple(folder for folder in machines if folder.files), sidecars)
