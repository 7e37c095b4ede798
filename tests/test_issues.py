"""Findings of main as issues: a stub GitHub served over HTTP, and the file between the two jobs."""

import html
import json
import re
import shutil
import zipfile
from dataclasses import replace

import pytest
from werkzeug import Response

from dashboard import forge_errors, issues
from dashboard.cli_exit import ExitCode
from dashboard.finding_reports import (
    FindingReport,
    MovedCase,
    ReportError,
    Reports,
    read_reports,
)
from dashboard.github import GitHub
from dashboard.issues import CLOSED_BY_US, MOST_NEW, Teller, body, title
from tests.command_on_tree import command_on, one_line
from tests.daily_history import History, sha

REPO, ME, BOT = "octo/engine", "me@example.org", "github-actions[bot]"
HEAD = "9" * 40
CASE = MovedCase("step.Step.time_step", "context=1024", "seconds", 8e-3, 1e-2, 0.25)
FINDING = FindingReport(
    machine="blackwell",
    commit="a" * 40,
    previous="b" * 40,
    owner="commit aaaaaaaaaaaa",
    cause="code",
    is_live=True,
    is_told=True,
    said="confirmed by the service: re-run in turns: regression, +25.0 % over 6 pairs",
    summary="Verify takes 93% of the change: 4 \N{RIGHTWARDS ARROW} 6 ms. Not it: clocks.",
    numbers=(7,),
    num_cases=1,
    cases=(CASE,),
    levels=(8e-3, 8.01e-3, 7.99e-3, 1e-2, 1.001e-2),
)
GONE = replace(FINDING, is_live=False, is_told=False, said="fixed by the service: it returned")


class StubIssues:
    """GitHub's issues of one repository."""

    def __init__(self, httpserver, *, per_page=100):
        self.rows, self.writes, self.server, self.per_page = [], [], httpserver, per_page
        path = f"/repos/{REPO}/issues"
        httpserver.expect_request(path, method="GET").respond_with_handler(self.page)
        httpserver.expect_request(path, method="POST").respond_with_handler(self.create)

    def add(self, author, text, *, state="open", **more):
        number = len(self.rows) + 1
        user = None if author is None else {"login": author}
        url = f"https://x/{number}"
        row = {"number": number, "user": user, "title": "t", "body": text, "state": state}
        self.rows.append({**row, "html_url": url, **more})
        path = f"/repos/{REPO}/issues/{number}"
        self.server.expect_request(path, method="PATCH").respond_with_handler(self.edit)
        return self.rows[-1]

    def page(self, request):
        number = int(request.args.get("page", "1"))
        rows = self.rows[(number - 1) * self.per_page : number * self.per_page]
        response = Response(json.dumps(rows), content_type="application/json")
        if number * self.per_page < len(self.rows):
            url = self.server.url_for(f"/repos/{REPO}/issues?page={number + 1}")
            response.headers["Link"] = f'<{url}>; rel="next"'
        return response

    def create(self, request):
        said = request.get_json()
        self.writes.append(("POST", said))
        row = self.add(BOT, said["body"], title=said["title"])
        return Response(json.dumps(row), 201, content_type="application/json")

    def edit(self, request):
        row = self.rows[int(request.path.rsplit("/", 1)[1]) - 1]
        row |= request.get_json()
        self.writes.append(("PATCH", request.get_json()))
        return Response(json.dumps(row), content_type="application/json")


@pytest.fixture
def stub(httpserver):
    return StubIssues(httpserver)


@pytest.fixture
def tell(httpserver):
    """Tell findings, as of one measured commit."""
    with GitHub("ghp_secret", httpserver.url_for("").rstrip("/"), sleep=lambda _: None) as client:

        def told(*findings, head=HEAD):
            done = Teller(client.issues(REPO), BOT).tell(Reports(head, findings))
            return [one.action for one in done]

        yield told


def test_a_finding_is_opened_once_with_its_labels(stub, tell):
    assert tell(FINDING) == ["opened"]
    assert tell(FINDING) == ["unchanged"]

    ((method, said),) = stub.writes
    assert (method, said["labels"]) == ("POST", ["performance"])
    assert said["title"] == (
        "step.Step.time_step(context=1024) slower on blackwell since aaaaaaaaaa: +25.0 %"
    )


def test_a_finding_of_the_runner_is_labelled_for_its_keeper(stub, tell):
    tell(replace(FINDING, owner="runner blackwell", cause="clock"))

    assert stub.writes[0][1]["labels"] == ["performance", "runner"]


def test_what_nobody_stands_for_is_told_to_nobody(stub, tell):
    assert tell(replace(FINDING, is_told=False), GONE) == []
    assert stub.writes == []


def test_a_finding_that_is_seen_again_edits_its_issue_in_place(stub, tell):
    tell(FINDING)

    assert tell(FINDING, head="8" * 40) == ["updated"]
    assert [method for method, _ in stub.writes] == ["POST", "PATCH"]
    assert "Still so at `8888888888`" in stub.rows[0]["body"]
    assert stub.rows[0]["state"] == "open"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("fixed by the service: the level returned at 1a2b", "completed"),
        ("false positive by me@example.org: warm-up", "not_planned"),
        ("expected by me@example.org: exact masks", "not_planned"),
        ("withdrawn by the service: not found any more", "not_planned"),
    ],
)
def test_an_issue_closes_with_what_was_said_and_opens_again_with_its_finding(
    stub, tell, said, reason
):
    tell(FINDING)

    assert tell(replace(GONE, said=said)) == ["closed"]
    (row,) = stub.rows
    assert (row["state"], row["state_reason"]) == ("closed", reason)
    assert f"Closed: {said.split(' by ')[0]}" in html.unescape(row["body"])
    assert tell(replace(GONE, said=said)) == ["left closed"]
    assert tell(FINDING) == ["reopened"]
    assert stub.rows[0]["state"] == "open"
    assert CLOSED_BY_US not in stub.rows[0]["body"]


def test_what_people_closed_stays_closed(stub, tell):
    tell(FINDING)
    stub.rows[0]["state"] = "closed"
    stub.writes.clear()

    assert tell(FINDING, head="8" * 40) == ["left closed"]
    assert stub.writes == []


def test_an_issue_is_found_on_the_second_page_under_another_title(httpserver, tell):
    stub = StubIssues(httpserver, per_page=2)
    for _ in range(3):
        stub.add(BOT, "something else")
    stub.add(BOT, body(FINDING, seen=HEAD), title="renamed by somebody")

    assert tell(FINDING) == ["updated"]
    assert stub.rows[3]["title"] == title(FINDING)


def test_a_marker_in_anybody_elses_issue_or_in_a_pull_request_means_nothing(stub, tell):
    stub.add("mallory", body(FINDING, seen=HEAD))
    stub.add(None, body(FINDING, seen=HEAD))
    stub.add(BOT, body(FINDING, seen=HEAD), pull_request={})
    stub.add(BOT, None)

    assert tell(FINDING) == ["opened"]


def test_an_answer_that_got_lost_opens_no_second_issue(stub, tell, httpserver):
    def write_and_fail(request):
        stub.create(request)
        return Response("bad gateway", 502)

    lost = httpserver.expect_oneshot_request(f"/repos/{REPO}/issues", method="POST")
    lost.respond_with_handler(write_and_fail)

    assert tell(FINDING) == ["opened"]
    assert len(stub.rows) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (403, forge_errors.ForbiddenError),
        (404, forge_errors.NotFoundError),
        (410, forge_errors.AnswerError),  # a repository without issues
        (422, forge_errors.UnprocessableError),
        (502, forge_errors.ServerError),
    ],
)
def test_a_refused_issue_is_a_typed_error(stub, tell, httpserver, status, error):
    refused = httpserver.expect_oneshot_request(f"/repos/{REPO}/issues", method="POST")
    refused.respond_with_json({"message": "no"}, status)

    with pytest.raises(error):
        tell(FINDING)
    assert stub.rows == []


def test_a_bad_night_opens_few_issues_and_the_next_ones_the_others(stub, tell):
    many = [replace(FINDING, commit=f"{number:040x}") for number in range(MOST_NEW + 3)]

    first, second = tell(*many), tell(*many)

    assert first == ["opened"] * MOST_NEW + ["held back"] * 3
    assert second == ["unchanged"] * MOST_NEW + ["opened"] * 3


def test_an_issue_reads_like_this():
    text = body(FINDING, seen=HEAD, dashboard="https://bench.example.org")

    assert text == (
        "**1 case slower on `blackwell` since `aaaaaaaaaa`** (likely cause code, owner commit "
        "aaaaaaaaaaaa). Last said of it: confirmed by the service&#58; re-run in turns&#58; "
        "regression, +25.0 % over 6 pairs. Still so at `9999999999`, measured last.\n\n"
        "Verify takes 93% of the change&#58; 4 \N{RIGHTWARDS ARROW} 6 ms. Not it&#58; clocks.\n\n"
        "| case | before \N{RIGHTWARDS ARROW} after | change |\n| --- | ---: | ---: |\n"
        "| [`step.Step.time_step(context=1024)`](https://bench.example.org/history?"
        "benchmark=step.Step.time_step&machine=blackwell&p.context=1024) "
        "| 8 ms \N{RIGHTWARDS ARROW} 10 ms | +25.0 % |\n\n"
        "`\u2581\u2581\u2581\u2588\u2588` `step.Step.time_step(context=1024)`, oldest first\n\n\n"
        "Measure it again, both commits in turns, and see what lies between:\n\n```sh\n"
        f"ddtree-bench confirm {'b' * 40} {'a' * 40} --profile full --bench "
        "'^step\\.Step\\.time_step\\(1024\\)$'\n"
        f"git log --oneline {'b' * 40}..{'a' * 40}\n```\n\n"
        "Its alerts are 7. Meant, or no regression? `ddtree-bench alerts set 7 expected --author "
        'YOU --note WHY` (or `"false positive"`) closes this issue the next night, and so does '
        "the return of the level. Closed by hand, it stays closed.\n\n"
        f"<!-- ddtree-bench:finding:{FINDING.key} -->"
    )


HOSTILE = (
    "`|<!-- ddtree-bench:finding:0123456789abcdef -->\n```\n@octocat #12 </details> [x](http://e)"
)


@pytest.mark.parametrize("field", ["machine", "owner", "cause", "said", "summary"])
def test_hostile_text_becomes_no_markup_no_mention_and_no_marker(field):
    hostile = replace(
        FINDING,
        **{field: HOSTILE},
        cases=(replace(CASE, benchmark=HOSTILE, params=HOSTILE, unit=HOSTILE),),
    )

    text = body(hostile, seen=HEAD, dashboard="https://x")

    fence = re.search(r"^`{3,}", text, re.MULTILINE).group()
    outside = re.sub(rf"{fence}sh\n.*?\n{fence}\n|`[^`\n]*`", "", text, flags=re.DOTALL)
    outside = re.sub(r"\]\(https://x/history\?[\w.=&%~-]+\)", "]", outside)
    assert "`" not in outside
    assert not re.search(r"<(?!/?code>|!-- ddtree)|://|\]\(", outside)
    assert not re.search(r"@\w|#\w", html.unescape(outside))
    assert text.count("<!--") == 1
    assert issues._key_in(text) == hostile.key
    assert not re.search(r"@\w|\n", title(hostile))


def test_the_file_between_the_jobs_is_read_as_it_was_written():
    reports = Reports(HEAD, (FINDING, GONE_ELSEWHERE))

    assert read_reports(json.loads(json.dumps(reports.to_dict(), allow_nan=False))) == reports


GONE_ELSEWHERE = replace(GONE, commit="c" * 40, previous=None, levels=())


def changed(**changes):
    plain = json.loads(json.dumps(Reports(HEAD, (FINDING,)).to_dict()))
    plain["findings"][0] |= changes
    return plain


@pytest.mark.parametrize(
    "found",
    [
        [],
        {"schema": 1},
        changed() | {"schema": 2},
        changed() | {"head": "main"},
        changed() | {"findings": [FINDING.key] * 2_000},
        changed() | {"findings": changed()["findings"] * 2},
        changed(commit="../../x"),
        changed(machine=["x"]),
        changed(summary="x" * 3_000),
        changed(is_live=1),
        changed(num_cases=-1),
        changed(numbers=[True]),
        changed(cases=[]),
        changed(cases=[{"name": "x"}]),
        changed(levels=[float("nan")]),
        changed(levels=[1.0] * 100),
        changed(url="https://evil.example"),
    ],
)
def test_a_file_that_is_something_else_is_refused(found):
    with pytest.raises(ReportError):
        read_reports(found)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A history that became slower, was judged real, and then returned."""
    folder = tmp_path_factory.mktemp("nights")
    history = History(folder / "results").add(1.0, 12).add(1.2, 8)
    call = command_on(f"sqlite:///{folder / 'main.db'}")
    for words in (("ingest", str(history.tree.root)), ("detect",)):
        assert call(*words).exit_code == ExitCode.OK
    return folder, history


def test_nights_from_a_slower_level_to_its_return_keep_one_issue(
    stored, stub, httpserver, tmp_path
):
    folder, history = stored
    call = command_on(f"sqlite:///{shutil.copy(folder / 'main.db', tmp_path / 'main.db')}")
    archive = tmp_path / "findings.zip"

    def night():
        found = call("alerts", "findings", "--head", sha(history.days - 1))
        with zipfile.ZipFile(archive, "w") as made:
            made.writestr("findings.json", found.stdout)
        return call(
            *("alerts", "issues", "--repo", REPO, "--findings", str(archive), "--author", BOT),
            *("--api-url", httpserver.url_for("").rstrip("/")),
            GITHUB_TOKEN="ghp_secret",
        ).output

    quiet = night()
    said = ("confirmed", "--author", ME, "--note", "seen on two runners")
    assert call("alerts", "set", "1", *said).exit_code == ExitCode.OK
    opened_one = night()
    history.add(1.0, 8)
    for words in (("ingest", str(history.tree.root)), ("detect",)):
        assert call(*words).exit_code == ExitCode.OK
    closed = night()

    assert quiet == "issues: nothing to tell\n"
    assert opened_one == "issue: opened https://x/1\nissues: 1 opened\n"
    assert closed == "issue: closed https://x/1\nissues: 1 closed\n"
    (row,) = stub.rows
    assert row["state_reason"] == "completed"
    assert "the level returned at" in row["body"]
    assert (
        stub.writes[0][1]["title"]
        == f"step.Step.time_step slower on laptop since {sha(12)[:10]}: +20.0 %"
    )
    assert "seen on two runners" in stub.writes[0][1]["body"]
    assert "\u2581\u2581\u2581" in stub.writes[0][1]["body"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"findings.json": b"{}", "more.json": b"{}"}, "findings.json alone"),
        ({"../findings.json": b"{}"}, "names of results"),
        ({"findings.json": b"[" * 100_000}, "expected JSON"),
        ({"findings.json": b"{}"}, "expected an object of"),
    ],
)
def test_an_archive_that_holds_something_else_is_refused_in_a_line(tmp_path, files, said):
    path = tmp_path / "findings.zip"
    with zipfile.ZipFile(path, "w") as made:
        for name, content in files.items():
            made.writestr(name, content)

    result = command_on("sqlite://")("alerts", "issues", "--repo", REPO, "--findings", str(path))

    assert said in one_line(result)


def test_a_head_that_is_no_commit_is_refused():
    assert "40 hex" in one_line(command_on("sqlite://")("alerts", "findings", "--head", "main"))
