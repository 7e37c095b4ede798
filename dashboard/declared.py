"""Which benchmarks a commit's suites declare, read from git without running any of them.

A pull request is measured by its own suites, at the base too: a benchmark that it deletes is then
measured nowhere. Here the files of both commits are parsed, nothing of them is executed.
"""

from __future__ import annotations

import ast
import re
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Final

from dashboard.asv_commits import git_lines
from dashboard.asv_errors import RequestError
from db.cases import CaseComparison, CaseKey, Verdict
from db.confirmed import arranged

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from db.cases import Comparison

SUITES: Final = "benchmarks"
_BENCHMARK: Final = re.compile(r"(time|timeraw|mem|peakmem|track)_")


def deleted(root: Path, base: str, head: str) -> frozenset[str]:
    """Name the benchmarks that the suites at the base declare and those at the head do not.

    Both are full hashes.

    Raises
    ------
    RequestError
        The repository lacks a commit, or a suite in it is no Python.
    """
    try:
        if not git_lines(root, "diff", "--name-only", "--end-of-options", base, head, "--", SUITES):
            return frozenset()
    except CalledProcessError:
        raise RequestError(
            f"suites: expected the commits {base[:12]} and {head[:12]} in {root}, got none "
            "(tells which benchmarks were deleted)"
        ) from None
    return declared(root, base) - declared(root, head)


def with_deleted(comparison: Comparison, names: Collection[str]) -> Comparison:
    """Add benchmarks that nobody could measure as removed cases, those that have cases apart."""
    known = {case.key.benchmark for case in comparison.cases}
    machine = comparison.cases[0].key.machine if comparison.cases else ""
    gone = [_removed(name, machine) for name in sorted(set(names) - known)]
    return arranged(comparison, [*comparison.cases, *gone]) if gone else comparison


def _removed(name: str, machine: str) -> CaseComparison:
    return CaseComparison(
        key=CaseKey(name, "", "", "", machine, ""),
        unit="",
        direction="lower",
        verdict=Verdict.REMOVED,
        base_value=None,
        head_value=None,
        relative_change=None,
        interval_low=None,
        interval_high=None,
        noise_rel=None,
        n_base=0,
        n_head=0,
        p_value=None,
        q_value=None,
        needed_processes=None,
        environment_differs=False,
        reason="the suites at the base have it, those at the head do not",
        is_deleted=True,
    )


def declared(root: Path, commit: str) -> frozenset[str]:
    """Name the benchmarks of a commit, full hash, as asv does; those of its private classes too.

    Inherited ones count; what a program adds to a class while it runs does not.
    """
    try:
        modules = {name: ast.parse("\n".join(lines)) for name, lines in _files(root, commit)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RequestError(
            f"suites: expected Python at {commit[:12]}, got {type(error).__name__}"
        ) from None
    classes = {
        node.name: node
        for tree in modules.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    return frozenset(
        f"{module}.{name}"
        for module, tree in modules.items()
        if not module.startswith("_")
        for node in tree.body
        for name in _names(node, classes)
    )


def _files(root: Path, commit: str) -> Iterator[tuple[str, list[str]]]:
    paths = git_lines(root, "ls-tree", "--name-only", "--end-of-options", commit, f"{SUITES}/")
    for path in paths:
        if path.endswith(".py"):
            name = path.removeprefix(f"{SUITES}/").removesuffix(".py")
            yield name, git_lines(root, "cat-file", "blob", f"{commit}:{path}")


def _names(node: ast.stmt, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Give the benchmarks of one statement of a module."""
    if isinstance(node, ast.FunctionDef) and _BENCHMARK.match(node.name):
        yield node.name
    elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        yield from (f"{node.name}.{name}" for name in _methods(node, classes, frozenset()))


def _methods(
    node: ast.ClassDef, classes: Mapping[str, ast.ClassDef], above: frozenset[str]
) -> Iterator[str]:
    """Give the benchmarks of a class and of what it inherits from, if the suites hold that."""
    for one in node.body:
        targets = one.targets if isinstance(one, ast.Assign) else ()
        names = [one.name] if isinstance(one, ast.FunctionDef) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if _BENCHMARK.match(name))
    for base in node.bases:
        name = ast.unparse(base).split("[")[0].split(".")[-1]
        if name in classes and name not in above:
            yield from _methods(classes[name], classes, above | {node.name})
