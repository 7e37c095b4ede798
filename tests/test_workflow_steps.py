"""The workflows from end to end: their shell steps, from their YAML, against a stub GitHub."""

import io
import shutil
import time
import zipfile

import pytest

from tests.asv_trees import GitRepository
from tests.command_on_tree import add_run, empty_tree
from tests.engine_repository import git, make_repository, plain
from tests.workflow_steps import OUR_CODE, ROOT, Forge, Runner, load

CASES = r"^tree\.(Accept\.time_accept|Build\.time_build)\(64"
ONE_CASE = r"^tree\.Accept\.time_accept\(64"
PLANT = '''

def accept_batch(*arguments, **options):
    """The same, a fifth slower."""
    import time
    began = time.perf_counter()
    found = _accept_batch(*arguments, **options)
    until = began + 1.2 * (time.perf_counter() - began)
    while time.perf_counter() < until:
        pass
    return found
'''
PULL_REQUEST = {
    "github.event.pull_request.head.sha || github.sha": "HEAD",
    "github.event_name == 'push' && secrets.DDTREE_BENCH_DB || ''": "",
    "github.event_name == 'pull_request'": True,
    "github.event_name == 'push'": False,
    "github.event_name == 'workflow_dispatch'": False,
    "github.event.repository.default_branch": "main",
    "github.token": "ghs_token",
    "github.repository": "o/r",
    "github.event.workflow_run.id": "77",
    "vars.DDTREE_BENCH_DASHBOARD": "https://bench.example.org",
}


def slower():
    text = plain()
    assert text.count("def accept_batch(") == 1
    return text.replace("def accept_batch(", "def _accept_batch(") + PLANT


def origin_of(folder, texts):
    """Our own code as the forge holds it: main, and a branch of one commit more."""
    root = folder / "origin"
    for name in OUR_CODE:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root / "pyproject.toml")
    commits = make_repository(root, texts)
    git(root, "branch", "--move", "main")
    git(root, "branch", "change")
    git(root, "reset", "--hard", "--quiet", commits[0])
    return root, *commits


def measured_and_commented(folder, httpserver, texts, cases):
    """Run bench.yml on a pull request, then comment.yml on what it left; tell what came of it."""
    root, base, head = origin_of(folder, texts)
    forge = Forge(httpserver, base, head)
    values = PULL_REQUEST | {
        "github.event.pull_request.head.sha || github.sha": head,
        "github.event.pull_request.base.sha": base,
        "github.event.workflow_run.head_sha": head,
    }
    first = Runner(folder / "bench", root, forge.api_url, values, cases, forge.artifacts)
    began = time.monotonic()
    status = first.run(load("bench.yml")["jobs"]["measure"])
    measured_s = time.monotonic() - began
    assert status == 0, first.said()
    second = Runner(folder / "comment", root, forge.api_url, values, cases, forge.artifacts)
    began = time.monotonic()
    status = second.run(load("comment.yml")["jobs"]["comment"])
    assert status == 0, second.said()
    return {
        "forge": forge,
        "first": first,
        "second": second,
        "measured_s": measured_s,
        "commented_s": time.monotonic() - began,
    }


def archive_of(folder, commits, values):
    """What a measuring job leaves: results of each commit, and nothing confirmed."""
    tree = empty_tree(folder / "tree")
    for day, (commit, value) in enumerate(zip(commits, values, strict=True)):
        add_run(tree, commit, [0.010, value], day=day)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        for path in (one for one in tree.root.rglob("*") if one.is_file()):
            made.write(path, path.relative_to(tree.root))
    return content.getvalue()


def test_commenting_job_writes_comment_check_and_summary_of_what_was_measured(tmp_path, httpserver):
    repository = GitRepository(tmp_path / "origin")
    for name in OUR_CODE:
        shutil.copytree(
            ROOT / name,
            repository.root / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", repository.root / "pyproject.toml")
    base = repository.commit("base")
    repository.git("checkout", "--quiet", "-b", "change")
    head = repository.commit("head")
    repository.git("checkout", "--quiet", "main")
    forge = Forge(httpserver, base, head)
    forge.artifacts["asv-results"] = archive_of(tmp_path, (base, head), (0.020, 0.024))
    values = PULL_REQUEST | {"github.event.workflow_run.head_sha": head}
    runner = Runner(
        tmp_path / "comment", repository.root, forge.api_url, values, "", forge.artifacts
    )

    status = runner.run(load("comment.yml")["jobs"]["comment"])

    assert status == 0, runner.said()
    (comment,), (check,) = forge.comments, forge.checks
    assert comment["body"].startswith("**Suspected: 1 regression, 1 unchanged of 2 cases**")
    assert "https://bench.example.org/history?" in comment["body"]
    assert (check["head_sha"], check["conclusion"]) == (head, "neutral")
    assert runner.summary == f"{comment['body']}\n"
    assert len(forge.calls()) == 8  # the archive's number and the archive; six of the command


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_a_fifth_planted_in_one_suite_is_told_confirmed_with_commit_and_diagnosis(
    tmp_path, httpserver, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    done = measured_and_commented(tmp_path, httpserver, (plain(), slower()), CASES)

    forge = done["forge"]
    (comment,), (check,) = forge.comments, forge.checks
    body = comment["body"]
    print(body, done["first"].said(), done["measured_s"], done["commented_s"], forge.calls())  # noqa: T201 - the figures of a proof
    findings = body.split("**What to do**")[0]
    assert body.startswith("**Regressed: ")
    assert f"\N{RIGHTWARDS ARROW} `{git(tmp_path / 'origin', 'rev-parse', 'change')[:10]}`" in body
    assert "Confirmed: both commits were measured again" in body
    assert "tree.Accept.time_accept" in findings
    assert "tree.Build" not in findings
    assert "Not it&#58; " in findings
    assert check["conclusion"] == "failure"
    assert done["second"].summary.strip() == body.strip()


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("attempt", range(10))
def test_a_branch_that_changes_nothing_is_told_no_regression(
    tmp_path, httpserver, monkeypatch, attempt
):
    """Ten live pull requests, each at its first attempt."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    texts = (plain(), f"{plain()}# attempt {attempt}\n")

    done = measured_and_commented(tmp_path, httpserver, texts, ONE_CASE)

    (comment,), (check,) = done["forge"].comments, done["forge"].checks
    print(comment["body"].splitlines()[0], check["conclusion"], done["measured_s"])  # noqa: T201 - the figures of a proof
    assert not comment["body"].startswith("**Regressed")
    assert check["conclusion"] != "failure"


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_a_night_measures_main_and_opens_an_issue_for_what_stands_and_for_nothing_else(
    tmp_path, httpserver, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    root, base, head = origin_of(tmp_path, (plain(), f"{plain()}# again\n"))
    forge = Forge(httpserver, base, head)
    values = PULL_REQUEST | {
        "secrets.DDTREE_BENCH_DB": f"sqlite:///{tmp_path / 'main.db'}",
        "github.sha": base,
        "runner.temp": str(tmp_path / "measure" / "temp"),
    }
    jobs = load("nightly.yml")["jobs"]
    first = Runner(tmp_path / "measure", root, forge.api_url, values, ONE_CASE, forge.artifacts)
    second = Runner(tmp_path / "issues", root, forge.api_url, values, ONE_CASE, forge.artifacts)

    statuses = [first.run(jobs["measure"]), second.run(jobs["issues"])]

    assert statuses == [0, 0], first.said() + second.said()
    print(first.said(), second.said())  # noqa: T201 - the figures of a proof
    assert "issues: nothing to tell" in second.said()
    assert forge.issues == []
