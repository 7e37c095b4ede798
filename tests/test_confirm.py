"""`confirm`, `bisect` and `backfill` on real commits: worktrees, turns, provenance, and what is left behind."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dashboard.asv_errors import AsvRunError
from dashboard.asv_pairs import arena
from dashboard.cli import main

ROOT = Path(__file__).parent.parent
CASE = "tree.Accept.time_accept"
WALK = "    largest = max((tree.tree_size for tree in trees), default=0)\n"
SLEEP = "    __import__('time').sleep(0.005)\n"


def git(folder, *words):
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Our engine and suites in a new repository of three commits: as it is, again, and a sleep."""
    root = tmp_path / "project"
    for name in ("engine", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "recorded", "checkpoints")
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("asv.conf.json", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet", ".")
    tree = root / "engine" / "draft_tree.py"
    plain = tree.read_text(encoding="utf-8")
    slow = plain.replace(WALK, WALK + SLEEP, 1)
    assert slow != plain
    for number, text in enumerate((plain, f"{plain}# again\n", slow)):
        tree.write_text(text, encoding="utf-8")
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "-m", f"commit {number}")
    monkeypatch.chdir(root)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("DDTREE_BENCH_DB", f"sqlite:///{tmp_path / 'none.db'}")
    return root


def call(*arguments):
    return CliRunner().invoke(main, [*arguments, "--bench", f"^{CASE}", "--json"])


@pytest.mark.exhaustive
def test_a_sleep_is_confirmed_and_nothing_is_left_behind(project):
    found = call("confirm", "HEAD~1", "HEAD")

    assert found.exit_code == 3, found.output
    (decision,) = json.loads(found.stdout)["cases"].values()
    assert (decision["verdict"], decision["low"] > 0) == ("regression", True)
    assert git(project, "status", "--short") == ""
    assert git(project, "worktree", "list").count("\n") == 0
    assert not list((project / ".asv" / "pairs").iterdir())
    assert not (project / ".asv" / "results").exists()


@pytest.mark.exhaustive
def test_a_comment_is_no_change_of_speed(project):
    found = call("confirm", "HEAD~2", "HEAD~1")

    assert found.exit_code in {0, 5}, found.output
    (decision,) = json.loads(found.stdout)["cases"].values()
    assert decision["verdict"] in {"no change", "inconclusive"}


@pytest.mark.exhaustive
def test_the_commit_that_sleeps_is_named(project):
    found = call("bisect", "HEAD~2", "HEAD")

    assert found.exit_code == 3, found.output
    assert json.loads(found.stdout)["bad"] == git(project, "rev-parse", "HEAD")


@pytest.mark.exhaustive
def test_a_commit_that_runs_another_engine_is_refused(project):
    """A worktree that somebody moved is not the commit it was made for."""
    head, other = git(project, "rev-parse", "HEAD"), git(project, "rev-parse", "HEAD~1")
    with arena(project, profile="quick", machine=None, echo=print) as machine:
        machine.measure(head, [f"^{CASE}"])
        (worktree,) = (project / ".asv" / "worktrees").iterdir()
        git(worktree, "checkout", "--quiet", other)
        with pytest.raises(AsvRunError, match=f"expected the engine of {head[:12]}"):
            machine.measure(head, [f"^{CASE}"])


@pytest.mark.exhaustive
def test_a_backfill_begins_with_the_newest_and_goes_on_where_it_stopped(project, tmp_path):
    url = f"sqlite:///{tmp_path / 'history.db'}"
    words = ("--db", url, "backfill", "HEAD~2..HEAD", "--bench", f"^{CASE}")

    first = CliRunner().invoke(main, [*words, "--most", "1"])
    second = CliRunner().invoke(main, words)
    third = CliRunner().invoke(main, words)

    assert (first.exit_code, second.exit_code, third.exit_code) == (0, 0, 0), second.output
    assert "1 of 2 commits measured" in first.output
    assert "2 of 2 commits measured" in second.output
    assert third.output == "2 of 2 commits measured\n"
    newest = git(project, "rev-parse", "HEAD")
    assert f"{newest[:12]}, 2 commits left" in first.output
