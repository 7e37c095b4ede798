"""`ddtree-bench comment` against GitHub's interface, served over HTTP."""

import json

import pytest
from werkzeug import Response

from dashboard.cli_exit import ExitCode
from tests.command_on_tree import BASE, SLOWER, command_on, one_line, small_tree


@pytest.fixture
def filled(tmp_path):
    call = command_on(f"sqlite:///{tmp_path / 'bench.db'}")
    assert call("ingest", str(small_tree(tmp_path / "results").root)).exit_code == ExitCode.OK
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
    assert [row["body"].startswith("**Regressed: 1 regression") for row in rows] == [True]


def test_comment_finds_pull_request_and_base_by_the_head(filled, httpserver):
    rows = serve_github(httpserver)

    result = filled(
        *("comment", "--repo", "o/r", "--head", SLOWER, "--author", "bot"),
        GITHUB_TOKEN="ghp_secret",
        GITHUB_API_URL=httpserver.url_for("").rstrip("/"),
    )

    assert result.exit_code == ExitCode.OK, result.output
    assert f"ddtree-bench compare {BASE} {SLOWER}" in rows[0]["body"]


def test_comment_without_a_token_is_refused(filled):
    arguments = ("comment", "--repo", "o/r", "--pr", "7", "--base", BASE, "--head", SLOWER)

    assert "GITHUB_TOKEN" in one_line(filled(*arguments))


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, ExitCode.BAD_INPUT), (404, ExitCode.BAD_INPUT), (429, ExitCode.INTERNAL)],
)
def test_refusal_of_github_is_one_line_without_the_token(filled, httpserver, status, code):
    httpserver.expect_request("/user").respond_with_json({"message": "ghp_secret no"}, status)

    result = filled(
        *("comment", "--repo", "o/r", "--pr", "7", "--base", BASE, "--head", SLOWER),
        *("--api-url", httpserver.url_for("").rstrip("/")),
        GITHUB_TOKEN="ghp_secret",
    )

    line = one_line(result, code)
    assert f"GitHub answered {status}" in line
    assert "ghp_secret" not in line
