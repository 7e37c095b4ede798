"""The rules of CONTRIBUTING.md that a machine can check: layers, sizes, lint, types."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "benchmarks", "db", "dashboard")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 6
SOURCES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "versions" not in path.parts
)
# A kernel takes every pointer, size and stride, and may be as long as it needs.
KERNELS = ROOT / "engine" / "kernels"


def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def num_arguments(function):
    spec = function.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return len([name for name in names if name not in {"self", "cls"}])


def run(*command):
    outcome = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    in_kernels = KERNELS in path.parents
    too_long = [
        f"{function.name}: {size} lines"
        for function in functions(path)
        if (size := function.end_lineno - function.lineno + 1) > MAX_FUNCTION_LINES
        and not in_kernels
    ]
    too_wide = [
        f"{function.name}: {count} arguments"
        for function in functions(path)
        if (count := num_arguments(function)) > MAX_ARGUMENTS and not in_kernels
    ]

    assert too_long + too_wide == []
    assert in_kernels or path.read_text(encoding="utf-8").count("\n") <= MAX_FILE_LINES


def test_engine_files_carry_no_exec_bit_and_no_link():
    """Every blob of engine/ is mode 100644, which the tree hash of an installed copy assumes."""
    listing = subprocess.run(
        ["git", "ls-files", "--stage", "engine"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    assert {line.split()[0] for line in listing} == {"100644"}


def test_layers_hold():
    outcome = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout


def test_every_face_but_commands_and_data_is_kept_from_sql():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    kept = next(one for one in contracts if one["name"] == "pages and charts leave SQL to db")
    names = {path.stem for path in (ROOT / "dashboard").glob("[a-z]*.py")}

    faces = {name for name in names if not name.startswith("cli") and name != "data"}
    assert set(kept["source_modules"]) == {f"dashboard.{name}" for name in faces}


def test_ruff_finds_nothing():
    run("ruff", "check", "--no-cache", ".")


def test_the_formatter_would_change_nothing():
    run("ruff", "format", "--check", "--no-cache", ".")


@pytest.mark.slow
def test_mypy_strict_finds_nothing():
    run("mypy")


def test_nothing_is_misspelt():
    run("codespell_lib", *PACKAGES, "tests", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
