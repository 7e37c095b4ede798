"""The engine that ran is named by git's own hash, wherever it was imported from."""

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks._provenance import engine_provenance, git_tree_hash, provenance_of

ROOT = Path(__file__).parent.parent


def git(folder, *words):
    outcome = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
    )
    return outcome.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository whose package has what confuses tree hashes: odd order, depth, no content."""
    package = tmp_path / "engine"
    for name in ("__init__.py", "a.py", "a/b.py", "a-b.py", "a0.py", "kernels/csrc/x.cu", "z.bin"):
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 3 + b"\0")
    (package / "empty.py").touch()
    git(tmp_path, "init", "--quiet", ".")
    git(tmp_path, "add", "engine")
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    git(tmp_path, *identity, "commit", "--quiet", "-m", "m")
    return tmp_path


def test_the_hash_is_what_git_says(checkout):
    assert git_tree_hash(checkout / "engine") == git(checkout, "rev-parse", "HEAD:engine")


def test_caches_compiled_files_and_empty_folders_are_no_code(checkout):
    cache = checkout / "engine" / "kernels" / "__pycache__"
    cache.mkdir()
    (cache / "x.cpython-311.pyc").write_bytes(b"compiled")
    (checkout / "engine" / "old.pyc").write_bytes(b"compiled")
    (checkout / "engine" / "nothing" / "deeper").mkdir(parents=True)

    assert git_tree_hash(checkout / "engine") == git(checkout, "rev-parse", "HEAD:engine")


def test_a_clean_checkout_is_not_dirty(checkout):
    found = provenance_of(checkout / "engine")

    assert (found.engine_file, found.dirty) == ("engine/__init__.py", False)


@pytest.mark.parametrize("name", ["a.py", "untracked.py"])
def test_a_changed_or_added_file_makes_the_tree_dirty(checkout, name):
    (checkout / "engine" / name).write_text("changed", encoding="utf-8")
    found = provenance_of(checkout / "engine")

    assert found.dirty is True
    assert found.engine_tree != git(checkout, "rev-parse", "HEAD:engine")


def test_a_worktree_of_another_commit_shows_that_commit_and_is_clean(checkout):
    first = git(checkout, "rev-parse", "HEAD:engine")
    git(checkout, "worktree", "add", "--quiet", "--detach", str(checkout / "other"), "HEAD")
    (checkout / "engine" / "a.py").write_text("changed", encoding="utf-8")
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    git(checkout, *identity, "commit", "--quiet", "-am", "m")

    found = provenance_of(checkout / "other" / "engine")

    assert (found.engine_tree, found.dirty) == (first, False)
    assert found.engine_tree != git(checkout, "rev-parse", "HEAD:engine")


def test_an_installed_copy_has_the_hash_of_its_commit_but_no_checkout(checkout, tmp_path):
    installed = tmp_path / "lib" / "site-packages"
    shutil.copytree(checkout / "engine", installed / "engine")

    found = provenance_of(installed / "engine")

    assert (found.engine_file, found.dirty) == ("site-packages", None)
    assert found.engine_tree == git(checkout, "rev-parse", "HEAD:engine")


def test_this_process_imported_the_engine_of_this_checkout():
    found = engine_provenance()

    assert found.engine_file == "engine/__init__.py"
    assert found.engine_tree == git_tree_hash(ROOT / "engine")
