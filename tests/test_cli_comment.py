"""`ddtree-bench comment` against GitHub's interface, served over HTTP."""

import json
import shutil
import sqlite3
import stat
import time
import zipfile
from contextlib import closing

import pytest
from werkzeug import Response

from dashboard import artifact
from dashboard.cli_exit import ExitCode
from dashboard.pr_comment import MARKER
from tests.asv_trees import GitRepository
from tests.command_on_tree import (
    BASE,
    SLOWER,
    add_run,
    add_window,
    command_on,
    empty_tree,
    one_line,
    small_tree,
    strict,
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comment")
    call = command_on(f"sqlite:///{folder / 'bench.db'}")
    assert call("ingest", str(small_tree(folder / "results").root)).exit_code == ExitCode.OK
    return call


def serve_github(httpserver):
    """Serve the comments of pull request 7, which remember what is posted."""
    rows = []
    path = "/repos/o/r/issues/7/comments"

    def create(request):
        row = {"id": 1, "user": {"login": "bot"}, "html_url": "https://x/1", **request.get_json()}
        rows.append(row)
        return Response(json.dumps(row), status=201, content_type="application/json")

    def page(request):
        return Response(json.dumps(rows), content_type="application/json")

    httpserver.expect_request(path, method="GET").respond_with_handler(page)
    httpserver.expect_request(path, method="POST").respond_with_handler(create)
    httpserver.expect_request("/user").respond_with_json({"login": "bot"})
    pull = {"number": 7, "base": {"sha": "f" * 40}, "head": {"sha": SLOWER}}
    httpserver.expect_request("/repos/o/r/pulls/7").respond_with_json(pull)
    httpserver.expect_request("/repos/o/r/pulls").respond_with_json([pull])
    httpserver.expect_request(f"/repos/o/r/compare/{'f' * 40}...{SLOWER}").respond_with_json(
        {"merge_base_commit": {"sha": BASE}}
    )
    return rows


def test_comment_is_created_once_and_then_left_alone(filled, httpserver):
    rows = serve_github(httpserver)
    arguments = (
        *("comment", "--repo", "o/r", "--pr", "7", "--base", BASE, "--head", SLOWER),
        *("--api-url", httpserver.url_for("").rstrip("/")),
    )

    first = filled(*arguments, GITHUB_TOKEN="ghp_secret")
    second = filled(*arguments, GITHUB_TOKEN="ghp_secret")

    assert (first.exit_code, second.exit_code) == (ExitCode.OK, ExitCode.OK)
    assert first.stdout == "comment: created https://x/1\n"
    assert second.stdout == "comment: unchanged https://x/1\n"
    assert [row["body"].startswith("**Suspected: 1 regression") for row in rows] == [True]


def test_comment_finds_pull_request_and_base_by_the_head(filled, httpserver):
    rows = serve_github(httpserver)

    result = filled(
        *("comment", "--repo", "o/r", "--head", SLOWER, "--author", "bot"),
        GITHUB_TOKEN="ghp_secret",
        GITHUB_API_URL=httpserver.url_for("").rstrip("/"),
    )

    assert result.exit_code == ExitCode.OK, result.output
    assert f"ddtree-bench confirm {BASE[:12]} {SLOWER[:12]} " in rows[0]["body"]


def test_comment_without_a_token_is_refused(filled):
    arguments = ("comment", "--repo", "o/r", "--pr", "7", "--base", BASE, "--head", SLOWER)

    said = one_line(filled(*arguments))
    assert "GITHUB_TOKEN: expected a token in the environment, got none" in said


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, ExitCode.BAD_INPUT), (404, ExitCode.BAD_INPUT), (429, ExitCode.INTERNAL)],
)
def test_refusal_of_github_is_one_line_without_the_token(filled, httpserver, status, code):
    httpserver.expect_request("/repos/o/r/pulls/7").respond_with_json(
        {"message": "ghp_secret no"}, status
    )

    result = filled(
        *("comment", "--repo", "o/r", "--pr", "7", "--base", BASE, "--head", SLOWER),
        *("--api-url", httpserver.url_for("").rstrip("/")),
        GITHUB_TOKEN="ghp_secret",
    )

    line = one_line(result, code)
    assert f"GitHub answered {status}" in line
    assert "ghp_secret" not in line


def test_stale_run_says_so(filled, httpserver):
    serve_github(httpserver)
    pull = {"number": 8, "base": {"sha": "f" * 40}, "head": {"sha": "9" * 40}}
    httpserver.expect_request("/repos/o/r/pulls/8").respond_with_json(pull)

    result = filled(
        *("comment", "--repo", "o/r", "--pr", "8", "--base", BASE, "--head", SLOWER),
        *("--api-url", httpserver.url_for("").rstrip("/"), "--dry-run", "--author", "bot"),
        GITHUB_TOKEN="ghp_secret",
    )
    result = filled(
        *("comment", "--repo", "o/r", "--pr", "8", "--head", SLOWER, "--author", "bot"),
        *("--api-url", httpserver.url_for("").rstrip("/"), "--dry-run"),
        GITHUB_TOKEN="ghp_secret",
    )

    assert "Stale: the newest commit is `9999999999`" in result.output


def test_run_of_a_commit_that_was_pushed_over_is_told_as_stale(filled, httpserver):
    """What a workflow meets where somebody pushed while it measured."""
    rows = serve_github(httpserver)
    pull = {"number": 7, "state": "open", "base": {"sha": "f" * 40}, "head": {"sha": "9" * 40}}
    newer = httpserver.expect_oneshot_request("/repos/o/r/pulls")
    newer.respond_with_json([pull])
    holding = httpserver.expect_request(f"/repos/o/r/commits/{SLOWER}/pulls")
    holding.respond_with_json([pull])

    result = filled(
        *("comment", "--repo", "o/r", "--head", SLOWER, "--author", "bot"),
        *("--api-url", httpserver.url_for("").rstrip("/")),
        GITHUB_TOKEN="ghp_secret",
    )

    assert result.exit_code == ExitCode.OK, result.output
    assert "Stale: the newest commit is `9999999999`" in rows[0]["body"]
    assert "First label the pull request again" in rows[0]["body"]


def test_what_is_said_of_a_newer_commit_is_left_alone_by_an_older_run(filled, httpserver):
    rows = serve_github(httpserver)
    pull = {"number": 7, "state": "open", "base": {"sha": "f" * 40}, "head": {"sha": "9" * 40}}
    httpserver.expect_oneshot_request("/repos/o/r/pulls").respond_with_json([pull])
    holding = httpserver.expect_request(f"/repos/o/r/commits/{SLOWER}/pulls")
    holding.respond_with_json([pull])
    said = f"**No change** (`x` \N{RIGHTWARDS ARROW} `9999999999`)\n{MARKER}"
    rows.append({"id": 1, "user": {"login": "bot"}, "html_url": "https://x/1", "body": said})

    result = filled(
        *("comment", "--repo", "o/r", "--head", SLOWER, "--author", "bot"),
        *("--api-url", httpserver.url_for("").rstrip("/")),
        GITHUB_TOKEN="ghp_secret",
    )

    assert result.stdout == "comment: unchanged https://x/1\n"
    assert [row["body"] for row in rows] == [said]


def test_merge_request_of_gitlab_gets_a_note(filled, httpserver):
    note = {"id": 5, "author": {"username": "bot"}, "body": ""}
    path = "/api/v4/projects/o/r/merge_requests/7/notes"
    httpserver.expect_request(path, method="GET").respond_with_json([])
    httpserver.expect_request(path, method="POST").respond_with_json(note, 201)
    arguments = (
        *("comment", "--repo", "o/r", "--pr", "7", "--base", BASE, "--head", SLOWER),
        *("--gitlab", httpserver.url_for("/api/v4"), "--author", "bot"),
    )

    done = filled(*arguments, GITLAB_TOKEN="glpat")
    refused = filled(*arguments, "--check", GITLAB_TOKEN="glpat")

    assert done.stdout == "comment: created o/r!7#note_5\n"
    assert "neither --check" in one_line(refused)


class Arrived:
    """A trusted job's call on an archive that a fork's job left."""

    def __init__(self, folder, httpserver):
        self.folder, self.server = folder, httpserver
        self.comments = serve_github(httpserver)
        self.call = command_on(f"sqlite:///{folder / 'pull-request.db'}")
        self.checks = []
        self.base, self.head = BASE, SLOWER
        path = "/repos/o/r/check-runs"
        httpserver.expect_request(path, method="POST").respond_with_handler(self.check)

    def check(self, request):
        self.checks.append(request.get_json())
        return Response('{"id": 3, "html_url": "https://x/c"}', content_type="application/json")

    def archive(self, **more):
        """Zip a base and a slower head, and more files."""
        tree = empty_tree(self.folder / "tree")
        add_run(tree, self.base, [0.010, 0.020], day=0)
        add_run(tree, self.head, [0.010, 0.024], day=1)
        files = {
            str(path.relative_to(tree.root)): path.read_bytes()
            for path in sorted(tree.root.rglob("*.json"))
        }
        path = self.folder / "artifact.zip"
        with zipfile.ZipFile(path, "w") as made:
            for name, content in (files | more).items():
                made.writestr(name, content)
        return path

    def target(self, tip):
        """Have the pull request target a branch that ends at `tip`."""
        pull = {"number": 7, "base": {"sha": tip}, "head": {"sha": self.head}}
        self.server.expect_oneshot_request("/repos/o/r/pulls").respond_with_json([pull])
        compared = self.server.expect_request(f"/repos/o/r/compare/{tip}...{self.head}")
        compared.respond_with_json({"merge_base_commit": {"sha": self.base}})

    def comment(self, archive, *more, fail_on="regression", base=None):
        return self.call(
            *("comment", "--repo", "o/r", "--head", self.head, "--author", "bot"),
            *(() if base is None else ("--base", base)),
            *("--artifact", str(archive), "--check", "--fail-on", fail_on, *more),
            *("--api-url", self.server.url_for("").rstrip("/")),
            GITHUB_TOKEN="ghp_secret",
        )


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A database without results, made once: a schema takes longer than the rest of a test."""
    path = tmp_path_factory.mktemp("empty") / "bench.db"
    assert command_on(f"sqlite:///{path}")("db", "upgrade").exit_code == ExitCode.OK
    return path


@pytest.fixture
def arrived(tmp_path, httpserver, empty):
    shutil.copy(empty, tmp_path / "pull-request.db")
    return Arrived(tmp_path, httpserver)


CASE = "step.Step.time_step(2048)"
CHANGE = {"pairs": 8, "relative_change": 0.2, "low": 0.18, "high": 0.22}


def confirmation(verdict="regression", base=BASE, head=SLOWER, **changes):
    found = {
        "base": base,
        "head": head,
        "cases": {CASE: {"verdict": verdict, **CHANGE} | changes},
    }
    return json.dumps(found).encode()


def test_artifact_becomes_a_confirmed_comment_a_failed_check_and_a_summary(arrived, tmp_path):
    archive = arrived.archive(
        **{"confirmed.json": confirmation(), "telemetry/20261130T115603Z-6d7445f3.run": b"{}"}
    )
    began = time.perf_counter()

    files = ("--summary", str(tmp_path / "summary.md"), "--json", str(tmp_path / "told.json"))
    result = arrived.comment(archive, *files)

    took_s = time.perf_counter() - began
    assert result.exit_code == ExitCode.OK, result.output
    (row,) = arrived.comments
    assert "Confirmed: both commits were measured again" in row["body"]
    assert "| 8 / 8 |" in row["body"]
    (check,) = arrived.checks
    assert (check["head_sha"], check["conclusion"]) == (SLOWER, "failure")
    (note,) = check["output"]["annotations"]
    assert (note["path"], note["annotation_level"]) == ("benchmarks/step.py", "failure")
    assert (tmp_path / "summary.md").read_text() == f"{row['body']}\n"
    told = strict((tmp_path / "told.json").read_text())
    assert (told["base"], told["head"], told["gate"]["passes"]) == (BASE, SLOWER, False)
    assert [one["confirmed"] for one in told["cases"] if one["verdict"] == "regression"] == [True]
    calls = [f"{asked.method} {asked.path}" for asked, _ in arrived.server.log]
    assert len(calls) == 6, calls  # who, from where, the check; read, write, read again
    assert took_s < 30.0


def test_re_run_that_does_not_repeat_a_change_takes_it_back(arrived):
    refuted = confirmation("no change", relative_change=0.0, low=-0.01, high=0.01)

    result = arrived.comment(arrived.archive(**{"confirmed.json": refuted}))

    assert result.exit_code == ExitCode.OK, result.output
    assert arrived.comments[0]["body"].startswith("**No change")
    assert [one["conclusion"] for one in arrived.checks] == ["success"]


def test_what_nobody_confirmed_is_told_and_fails_no_check(arrived):
    result = arrived.comment(arrived.archive(), fail_on="confirmed")

    assert result.exit_code == ExitCode.OK, result.output
    (check,) = arrived.checks
    assert check["conclusion"] == "neutral"
    assert [one["annotation_level"] for one in check["output"]["annotations"]] == ["warning"]
    assert arrived.comments[0]["body"].startswith("**Suspected: 1 regression")
    assert "The check passes: 1 told only." in arrived.comments[0]["body"]


ANSWER = """\
[[acknowledged]]
benchmark = "step.*"
up_to_rel = 0.3
until = 2999-12-31
by = "ana@example.org"
reason = "exact masks"
"""


@pytest.mark.parametrize(
    ("at_base", "at_head", "conclusion", "word"),
    [
        ("", ANSWER, "failure", "Regressed"),
        (ANSWER, "", "success", "Acknowledged"),
        (None, ANSWER, "failure", "Regressed"),
    ],
)
def test_policies_are_those_of_the_target_branch_and_never_the_pull_requests(
    arrived, tmp_path, at_base, at_head, conclusion, word
):
    repository = GitRepository(tmp_path / "code")
    policy = repository.root / ".github" / "gate.toml"
    policy.parent.mkdir()
    tips = []
    for text in (at_base, at_head):
        policy.unlink(missing_ok=True)
        if text is not None:
            policy.write_text(text)
        tips.append(repository.commit("gate", code="same"))
    arrived.base, arrived.head = tips
    arrived.target(tips[0])

    result = arrived.comment(
        arrived.archive(**{"confirmed.json": confirmation(base=tips[0], head=tips[1])}),
        *("--repository", str(repository.root), "--base-policy", ".github/gate.toml"),
        fail_on="confirmed",
    )

    assert result.exit_code == ExitCode.OK, result.output
    assert [one["conclusion"] for one in arrived.checks] == [conclusion]
    assert arrived.comments[0]["body"].startswith(f"**{word}: 1 regression")


SUITE = "class Step:\n    def time_step(self, context): ...\n"
GONE = "class Slow:\n    def time_slow(self): ...\n"
MAY_GO = """\
[[acknowledged]]
benchmark = "step.Slow.*"
is_gone = true
until = 2999-12-31
by = "ana@example.org"
reason = "measured elsewhere"
"""


@pytest.mark.parametrize(("policy", "conclusion"), [("", "failure"), (MAY_GO, "success")])
def test_benchmark_that_the_pull_request_deletes_is_missed_though_nobody_measured_it(
    arrived, tmp_path, policy, conclusion
):
    """Its own suites measure the base too, so that no result tells."""
    repository = GitRepository(tmp_path / "code")
    for folder, name, text in (
        (".github", "gate.toml", policy),
        ("benchmarks", "step.py", f"{SUITE}\n\n{GONE}"),
    ):
        (repository.root / folder).mkdir()
        (repository.root / folder / name).write_text(text)
    arrived.base = repository.commit("both")
    (repository.root / "benchmarks" / "step.py").write_text(SUITE)
    arrived.head = repository.commit("one")
    arrived.target(arrived.base)

    result = arrived.comment(
        arrived.archive(
            **{"confirmed.json": confirmation("no change", arrived.base, arrived.head)}
        ),
        *("--repository", str(repository.root), "--base-policy", ".github/gate.toml"),
        fail_on="confirmed",
    )

    assert result.exit_code == ExitCode.OK, result.output
    assert [one["conclusion"] for one in arrived.checks] == [conclusion]
    body = arrived.comments[0]["body"]
    assert "| `step.Slow.time_slow` | the suites at the base have it" in body
    assert ("is_gone = true" in body) == (conclusion == "failure")


@pytest.mark.parametrize("tip", ["f" * 40, "main; rm -rf /"])
def test_a_target_that_the_repository_does_not_have_is_refused(arrived, tmp_path, tip):
    repository = GitRepository(tmp_path / "code")
    repository.commit("one")
    arrived.target(tip)

    result = arrived.comment(
        arrived.archive(),
        *("--repository", str(repository.root), "--base-policy", ".github/gate.toml"),
        base=BASE,
    )

    assert "base policy: expected" in one_line(result)
    assert (arrived.comments, arrived.checks) == ([], [])


OTHER = "5e" * 20
ROWS = {"commits", "results", "machines", "windows"}
LINK = zipfile.ZipInfo("laptop/link.json")
LINK.external_attr = (stat.S_IFLNK | 0o777) << 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"../../evil.json": b"{}"}, "names of results"),
        ({"/etc/evil.json": b"{}"}, "names of results"),
        ({"bench-1/a/b.json": b"{}"}, "names of results"),
        ({"<script>/x.json": b"{}"}, "names of results"),
        ({".git/config.json": b"{}"}, "names of results"),
        ({"commits.tsv": b""}, "JSON in plain files"),
        ({"run.sh": b""}, "JSON in plain files"),
        ({LINK: b"/etc/passwd"}, "JSON in plain files"),
        ({"BENCHMARKS.json": b"{}"}, "each file once"),
        ({"bench-1/x.json": json.dumps({"commit_hash": OTHER}).encode()}, "got '5e5e"),
        ({"bench-1/x.json": b"[]"}, "expected an object"),
        ({"telemetry/x.jsonl": b'{"commit": null}'}, "got None"),
        ({"bench-1/x.json": b"{" * 100_000}, "expected JSON"),
        ({"bomb.json": b" " * (2**20 + 1)}, "together, got"),
        ({"confirmed.json": b"{}"}, "object with cases"),
        ({"confirmed.json": confirmation(base=OTHER)}, "other commits"),
        ({"confirmed.json": confirmation("fine")}, "expected a verdict"),
        ({"confirmed.json": confirmation(pairs=10**9)}, "pairs"),
        ({"confirmed.json": confirmation(high=None)}, "finite"),
    ],
)
def test_tampered_artifact_is_refused_and_nothing_is_written(arrived, monkeypatch, changes, said):
    monkeypatch.setattr(artifact, "MOST_UNPACKED_BYTES", 2**20)

    result = arrived.comment(archive_of(arrived, changes))

    assert said in one_line(result)
    assert (arrived.comments, arrived.checks) == ([], [])
    with closing(sqlite3.connect(arrived.folder / "pull-request.db")) as stored:
        tables = {name for (name,) in stored.execute("select name from sqlite_master")}
        counts = [
            stored.execute(f"select count(*) from {name}").fetchone() for name in tables & ROWS
        ]
    assert counts == [(0,)] * len(ROWS)
    assert not (arrived.folder / "evil.json").exists()


def archive_of(arrived, changes):
    """An archive with entries that only a ZipInfo can make, too."""
    path = arrived.archive()
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as made:
        for name, content in changes.items():
            made.writestr(name, content)
    return path


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no archive", None])
def test_archive_that_is_none_is_refused(arrived, damage, tmp_path):
    path = arrived.archive()
    content = path.read_bytes()
    at = content.index(b'"commit_hash"')
    flipped = content[:at] + b"X" + content[at + 1 :]
    path.write_bytes(flipped if damage is None else damage)

    assert "readable zip file" in one_line(arrived.comment(path))


def test_archive_too_large_is_not_opened(arrived, monkeypatch):
    monkeypatch.setattr(artifact, "MOST_BYTES", 100)

    assert "at most 100 bytes" in one_line(arrived.comment(arrived.archive()))


def test_artifact_of_another_pull_request_names_no_commit_of_this_one(arrived):
    """Which pull request it is comes from the head that GitHub says was run, nothing else."""
    arrived.server.expect_request(f"/repos/o/r/commits/{OTHER}/pulls").respond_with_json([])
    result = arrived.call(
        *("comment", "--repo", "o/r", "--head", OTHER, "--author", "bot"),
        *("--artifact", str(arrived.archive())),
        *("--api-url", arrived.server.url_for("").rstrip("/")),
        GITHUB_TOKEN="ghp_secret",
    )

    assert "newer commits were pushed" in one_line(result)
    assert arrived.comments == []


def test_results_of_other_code_than_they_name_are_refused_as_a_whole(arrived, tmp_path):
    repository = GitRepository(tmp_path / "code")
    shas = [repository.commit(text, code=text) for text in ("base", "head")]
    pull = {"number": 9, "base": {"sha": shas[0]}, "head": {"sha": shas[1]}}
    arrived.server.clear()
    arrived.server.expect_request("/repos/o/r/pulls/9").respond_with_json(pull)
    tree = empty_tree(tmp_path / "tree")
    for day, sha in enumerate(shas):
        add_run(tree, sha, [0.010, 0.020], day=day)
        add_window(
            tree,
            sha,
            1024,
            time_s=0.01,
            day=day,
            provenance={"engine_tree": repository.engine_tree(shas[0])},
        )
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for path in (one for one in tree.root.rglob("*") if one.is_file()):
            made.write(path, path.relative_to(tree.root))

    result = arrived.call(
        *("comment", "--repo", "o/r", "--pr", "9", "--base", shas[0], "--head", shas[1]),
        *("--artifact", str(archive), "--repository", str(repository.root)),
        *("--api-url", arrived.server.url_for("").rstrip("/")),
        GITHUB_TOKEN="ghp_secret",
    )

    assert "refused: step.Step.time_step" in one_line(result)
    assert [asked.path for asked, _ in arrived.server.log] == ["/repos/o/r/pulls/9"]
    with closing(sqlite3.connect(arrived.folder / "pull-request.db")) as stored:
        assert stored.execute("select count(*) from results").fetchone() == (0,)
