"""The workflows from end to end: their shell steps, from their YAML, against a stub GitHub."""

import io
import json
import shutil
import time
import zipfile

import pytest

from tests.asv_trees import GitRepository
from tests.command_on_tree import add_run, command_on, empty_tree
from tests.engine_repository import git, make_repository, plain
from tests.workflow_steps import OUR_CODE, ROOT, Forge, Runner, load

CASES = r"^tree\.(Accept\.time_accept|Build\.time_build)\(64"
CALLS = 8  # the archive's number and the archive; six of the command
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
    status = first.run(load("bench.yml")["jobs"]["measure"])
    ended_s = time.monotonic()
    assert status == 0, first.said()
    second = Runner(folder / "comment", root, forge.api_url, values, cases, forge.artifacts)
    status = second.run(load("comment.yml")["jobs"]["comment"])
    assert status == 0, second.said()
    (comment,), (check,) = forge.comments, forge.checks
    took_s = forge.posted_s - ended_s
    print(  # noqa: T201 - the figures of a proof
        f"\n{comment['body'].splitlines()[0]} check: {check['conclusion']}; comment {took_s:.1f} s "
        f"after the measurement, {len(forge.calls())} calls ({first.times()}; {second.times()})"
    )
    assert took_s < 60.0
    assert len(forge.calls()) == CALLS
    return forge, first, second


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
    assert len(forge.calls()) == CALLS


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_a_fifth_planted_in_one_suite_is_told_confirmed_with_commit_and_diagnosis(
    tmp_path, httpserver, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    forge, first, second = measured_and_commented(tmp_path, httpserver, (plain(), slower()), CASES)

    (comment,), (check,) = forge.comments, forge.checks
    body = comment["body"]
    print(body, first.said(), forge.calls())  # noqa: T201 - the figures of a proof
    findings = body.split("**What to do**")[0]
    assert body.startswith("**Regressed: ")
    assert f"\N{RIGHTWARDS ARROW} `{git(tmp_path / 'origin', 'rev-parse', 'change')[:10]}`" in body
    assert "Confirmed: both commits were measured again" in body
    assert "tree.Accept.time_accept" in findings
    assert "tree.Build" not in findings
    assert "Not it&#58; " in findings
    assert check["conclusion"] == "failure"
    assert second.summary.strip() == body.strip()


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("attempt", range(10))
def test_a_branch_that_changes_nothing_is_told_no_regression(
    tmp_path, httpserver, monkeypatch, attempt
):
    """Ten live pull requests, each at its first attempt."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    texts = (plain(), f"{plain()}# attempt {attempt}\n")

    forge, _, _ = measured_and_commented(tmp_path, httpserver, texts, ONE_CASE)

    (comment,), (check,) = forge.comments, forge.checks
    assert not comment["body"].startswith("**Regressed")
    assert check["conclusion"] != "failure"


NIGHTS, SLOW_FROM, ODD_FROM = (
    21,
    10,
    14,
)  # commits; the first that is slower; one that only looks so


def recorded_nights(folder, results, commits):
    """Nights after the first one, at its levels: quiet but for what each commit is said to change.

    Walks are a fifth slower from `SLOW_FROM` on, as the code there is; builds are said to take a
    third more from `ODD_FROM` on, where the code is as before.
    """
    shutil.copytree(results, folder, ignore=shutil.ignore_patterns("telemetry", "*-existing-*"))
    (path,) = results.glob("*/*-existing-*.json")
    night = json.loads(path.read_text())
    levels = {name: row[0][0] for name, row in night["results"].items()}
    for number, commit in list(enumerate(commits))[1:]:
        rows = {}
        for name, row in night["results"].items():
            is_slow = number >= (SLOW_FROM if "Accept" in name else ODD_FROM)
            factor = (1.2 if "Accept" in name else 1.33) if is_slow else 1.0
            value = levels[name] * factor * (1.0 + number % 3 / 1000)
            named = dict(zip(night["result_columns"], row, strict=False))
            told = {
                "result": [value],
                "started_at": named["started_at"] - (len(commits) - number) * 1000,
                "stats_ci_99_a": [0.998 * value],
                "stats_ci_99_b": [1.002 * value],
                "stats_q_25": [0.999 * value],
                "stats_q_75": [1.001 * value],
                "samples": [[value * (1.0 + one / 1000) for one in (-2, -1, 0, 1, 2)] * 2],
                "stats_repeat": [10],
            }
            rows[name] = [(named | told).get(column) for column in night["result_columns"]]
        text = json.dumps(night | {"commit_hash": commit, "results": rows})
        name = path.name.replace(night["commit_hash"][:8], commit[:8])
        (folder / path.parent.name / name).write_text(text)
    return folder


def night(folder, root, forge, head, database):
    """Run both jobs of nightly.yml on a commit of main; tell what they said and how long it took."""
    values = PULL_REQUEST | {
        "secrets.DDTREE_BENCH_DB": database,
        "github.sha": head,
        "runner.temp": str(folder / "measure" / "temp"),
    }
    folder.mkdir()
    jobs, names = load("nightly.yml")["jobs"], ("measure", "issues")
    done = [
        Runner(folder / name, root, forge.api_url, values, CASES, forge.artifacts) for name in names
    ]
    statuses = [one.run(jobs[name]) for one, name in zip(done, names, strict=True)]
    said = "".join(one.said() for one in done)
    assert statuses == [0, 0], said
    return said


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_a_night_measures_main_and_opens_an_issue_for_what_stands_and_for_nothing_else(
    tmp_path, httpserver, monkeypatch
):
    """A first night, whose levels twenty recorded ones go on from, and one that is live again."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    texts = [
        f"{plain() if number < SLOW_FROM else slower()}# {number}\n" for number in range(NIGHTS)
    ]
    root, *commits = origin_of(tmp_path, texts)
    git(root, "reset", "--hard", "--quiet", commits[-1])
    forge = Forge(httpserver, commits[0], commits[-1])
    database = f"sqlite:///{tmp_path / 'main.db'}"
    call = command_on(database)

    first = night(tmp_path / "first", root, forge, commits[0], database)
    assert "0 findings measured again" in first
    assert "issues: nothing to tell" in first
    assert forge.issues == []
    results = tmp_path / "first" / "measure" / "work" / ".asv" / "results"
    recorded = recorded_nights(tmp_path / "recorded", results, commits[:-1])
    stored = call("ingest", str(recorded), "--repository", str(root))
    assert stored.exit_code == 0, stored.output
    began = time.monotonic()
    said = night(tmp_path / "last", root, forge, commits[-1], database)

    alerts = json.loads(call("alerts", "list", "--all", "--json").stdout)
    states = {one["benchmark"]: (one["commit"], one["state"]) for one in alerts}
    print(said, states, forge.issues, f"{time.monotonic() - began:.0f} s")  # noqa: T201 - the figures of a proof
    (issue,) = forge.issues
    assert "tree.Accept.time_accept" in issue["title"]
    assert commits[SLOW_FROM][:10] in issue["title"]
    assert "re-run in turns&#58; regression" in issue["body"]
    assert "tree.Build" not in issue["title"] + issue["body"]
    assert states["tree.Accept.time_accept"] == (commits[SLOW_FROM], "confirmed")
    assert states["tree.Build.time_build"] == (commits[ODD_FROM], "false positive")
