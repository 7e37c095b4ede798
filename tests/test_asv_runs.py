"""asv runs what it is told to run, each commit with its own engine, and leaves no traces."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from dashboard.asv_errors import AsvFailedError, NotACheckoutError, RequestError, UnknownRangeError
from dashboard.asv_results import failed_cases
from dashboard.asv_runs import (
    RunRequest,
    run_asv,
)

ROOT = Path(__file__).parent.parent
CASE = "tree.Compact.time_commit"


def git(folder, *words):
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    outcome = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True
    )
    return outcome.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository of two commits with nothing to run in it."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "asv.conf.json").write_text("{}", encoding="utf-8")
    git(root, "init", "--quiet", ".")
    for number in range(2):
        (root / "file").write_text(str(number), encoding="utf-8")
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "-m", f"commit {number}")
    return root


@pytest.mark.parametrize("commits", ["0123abcd", "no-such..HEAD", "--all", "", "HEAD:file"])
def test_commits_that_do_not_exist_are_refused_in_one_line(checkout, commits):
    with pytest.raises(
        UnknownRangeError, match=r"^commits: expected a revision or a range"
    ) as found:
        run_asv(RunRequest(checkout, commits=commits))

    assert "\n" not in str(found.value)


def test_an_empty_range_is_refused(checkout):
    with pytest.raises(UnknownRangeError, match=r"got none in 'HEAD\.\.HEAD'"):
        run_asv(RunRequest(checkout, commits="HEAD..HEAD"))


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(NotACheckoutError, match=r"expected a git checkout with an asv\.conf\.json"):
        run_asv(RunRequest(tmp_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"profile": "fast"}, "profile: expected one of quick, history, full, got 'fast'"),
        ({"bench": "step("}, "bench: expected a regular expression"),
        ({"machine": "../elsewhere"}, "machine: expected letters, digits"),
    ],
)
def test_a_request_is_refused_before_anything_runs(words, message):
    with pytest.raises(RequestError, match=message):
        RunRequest(ROOT, **words)


def test_an_asv_that_gives_up_is_quoted_in_one_line(checkout):
    with pytest.raises(AsvFailedError, match=r"got 1 \(asv: No version specified") as found:
        run_asv(RunRequest(checkout))

    assert "\n" not in str(found.value)


def test_a_worktree_is_removed_even_if_asv_gives_up(checkout):
    with pytest.raises(AsvFailedError):
        run_asv(RunRequest(checkout, commits="HEAD"))

    assert git(checkout, "worktree", "list").count("\n") == 0
    assert list((checkout / ".asv" / "worktrees").iterdir()) == []


def test_failed_cases_are_told_from_skipped_and_from_older_ones(tmp_path):
    commit = "ab" * 20
    columns = ["result", "params", "version", "started_at"]
    content = {
        "commit_hash": commit,
        "result_columns": columns,
        "results": {
            "a.B.time_c": [[1.0, None, float("nan")], [["1", "2", "3"]], "1", 2000],
            "a.B.time_old": [[None], [["1"]], "1", 500],
            "a.B.time_all": [None, [["1"], ["'x'", "'y'"]], "1", 2000],
            "a.B.time_plain": [[None], [], "1", 2000],
        },
    }
    folder = tmp_path / "machine"
    folder.mkdir()
    (folder / "abababab-existing.json").write_text(json.dumps(content), encoding="utf-8")
    content["commit_hash"] = "abababab" + "0" * 32
    (folder / "abababab-other.json").write_text(json.dumps(content), encoding="utf-8")

    assert failed_cases(tmp_path, commit, 1000) == [
        "a.B.time_c(2)",
        "a.B.time_all(1, 'x')",
        "a.B.time_all(1, 'y')",
        "a.B.time_plain",
    ]


@pytest.fixture
def project(tmp_path):
    """Our own engine and suites in a new repository, whose second commit cannot compact."""
    root = tmp_path / "project"
    for name in ("engine", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "recorded", "checkpoints")
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("asv.conf.json", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet", ".")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "works")
    cache = root / "engine" / "kv_cache.py"
    broken = cache.read_text(encoding="utf-8").replace("def commit(self", "def no_commit(self")
    cache.write_text(broken, encoding="utf-8")
    git(root, "commit", "--quiet", "--all", "-m", "breaks")
    (root / "engine" / "later.py").write_text("", encoding="utf-8")  # dirty, but not what runs
    return root


def test_a_name_that_no_benchmark_has_is_bad_input(project):
    with pytest.raises(RequestError, match="bench: expected a regular expression that matches"):
        run_asv(RunRequest(project, bench="nothing_is_called_this"))


@pytest.mark.slow
def test_each_commit_runs_with_its_own_engine_and_a_failure_is_reported(
    project, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "home").mkdir()
    git(project, "checkout", "--quiet", "--detach")
    works, breaks = git(project, "rev-list", "--reverse", "HEAD").split()
    printed = []

    run = run_asv(
        RunRequest(project, commits=f"{works}^!", bench=CASE, machine="bench-1"),
        echo=printed.append,
    )
    broken = run_asv(RunRequest(project, commits="HEAD", bench=CASE))

    assert (run.commits, run.failed) == ((works,), ())
    assert broken.commits == (breaks,)
    assert broken.failed == (f"{breaks[:8]} {CASE}(64, 16)",)
    lines = [
        json.loads(line)
        for line in (run.sidecar_dir / f"{run.run_id}.jsonl").read_text().splitlines()
    ]
    assert [line["process_number"] for line in lines] == [0, 1]
    for line in lines:
        assert (line["benchmark"], line["commit"], line["run_id"]) == (CASE, works, run.run_id)
        assert line["provenance"]["engine_tree"] == git(project, "rev-parse", f"{works}:engine")
        assert (line["provenance"]["dirty"], line["machine"]) == (False, "bench-1")
    assert not (run.sidecar_dir / f"{broken.run_id}.jsonl").exists()
    (result,) = (run.results_dir / "bench-1").glob(f"{works[:8]}-*.json")
    assert len(list((run.results_dir / "bench-1").glob("*-existing-*.json"))) == 2
    content = json.loads(result.read_text())
    cell = dict(zip(content["result_columns"], content["results"][CASE], strict=False))
    assert cell["samples"] == [pytest.approx(lines[0]["samples_s"] + lines[1]["samples_s"])]
    assert any(CASE in line for line in printed)
    assert list((tmp_path / "home").iterdir()) == []
    assert git(project, "worktree", "list").count("\n") == 0
