"""`confirm`, `bisect` and `backfill` on real commits: worktrees, turns, provenance, and what is left behind."""

import json

import pytest
from click.testing import CliRunner

from dashboard.asv_errors import AsvRunError
from dashboard.asv_pairs import arena
from dashboard.cli import main
from tests.engine_repository import git, make_repository, plain, sleeping

CASE = "tree.Accept.time_accept"
COMMITS, CULPRIT = 17, 9  # sixteen after the first, slow from the ninth of them on
LONG_S = 0.1  # more than what a busy machine adds


def opened(root, texts, tmp_path, monkeypatch):
    commits = make_repository(root, texts)
    monkeypatch.chdir(root)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("DDTREE_BENCH_DB", f"sqlite:///{tmp_path / 'none.db'}")
    return commits


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository of three commits: as it is, again, and a sleep."""
    root = tmp_path / "project"
    opened(root, (plain(), f"{plain()}# again\n", sleeping()), tmp_path, monkeypatch)
    return root


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A repository of many commits that sleeps from one of them on."""
    texts = [
        f"{plain() if number < CULPRIT else sleeping(LONG_S)}# {number}\n"
        for number in range(COMMITS)
    ]
    return opened(tmp_path / "project", texts, tmp_path, monkeypatch)


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
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("attempt", range(10))
def test_a_commit_does_not_differ_from_itself(project, attempt):
    """Ten live comparisons of one commit with itself, each at its first attempt."""
    found = call("confirm", "HEAD~2", "HEAD~2", "--profile", "history")

    print(attempt, found.stdout)  # noqa: T201 - the figures of a proof
    assert found.exit_code == 0, found.output
    (decision,) = json.loads(found.stdout)["cases"].values()
    assert decision["verdict"] == "no change"


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_sleep_among_sixteen_commits_is_found_by_bisection(many):
    found = call("bisect", many[0], many[-1])

    assert found.exit_code == 3, found.output
    told = json.loads(found.stdout)
    assert (told["good"], told["bad"]) == (many[CULPRIT - 1], many[CULPRIT])
    assert told["between"] == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_sleep_in_a_measured_history_is_found_at_its_commit(many, tmp_path):
    url = f"sqlite:///{tmp_path / 'history.db'}"
    runner = CliRunner()
    words = ("backfill", f"{many[0]}..{many[-1]}", "--bench", f"^{CASE}")
    measured = runner.invoke(main, ["--db", url, *words])
    assert measured.exit_code == 0, measured.output

    runner.invoke(main, ["--db", url, "detect"], catch_exceptions=False)
    listed = runner.invoke(main, ["--db", url, "alerts", "list", "--json"])

    print(listed.stdout)  # noqa: T201 - the figures of a proof
    (alert,) = json.loads(listed.stdout)
    assert (alert["commit"], alert["cause"]) == (many[CULPRIT], "code")
    assert alert["relative_change"] > 0.5


@pytest.mark.exhaustive
def test_the_commit_that_sleeps_is_named(project):
    found = call("bisect", "HEAD~2", "HEAD")

    assert found.exit_code == 3, found.output
    assert json.loads(found.stdout)["bad"] == git(project, "rev-parse", "HEAD")


@pytest.mark.exhaustive
def test_a_commit_that_runs_another_engine_is_refused(project):
    """A worktree that somebody moved is not the commit it was made for."""
    first, head = git(project, "rev-parse", "HEAD~2"), git(project, "rev-parse", "HEAD")
    with arena(project, profile="quick", machine=None, echo=print) as machine:
        machine.ratios((first, head), [f"^{CASE}"], is_swapped=False)
        (worktree,) = (project / ".asv" / "worktrees").glob(f"{head[:12]}-*")
        git(worktree, "checkout", "--quiet", first)
        with pytest.raises(AsvRunError, match=f"expected the engine of {head[:12]}"):
            machine.ratios((first, head), [f"^{CASE}"], is_swapped=True)


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
