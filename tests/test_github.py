"""The GitHub client against a stub served over HTTP: nothing of ours is replaced."""

import json
import logging
import socket
import threading

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from dashboard import forge_errors, forge_http, github
from dashboard.github import GitHub
from dashboard.pr_comment import CommentContext, render
from db.cases import Verdict
from tests.compared import case, comparison

REPO = "octo/engine"
MARKER = "<!-- ddtree-bench:suite -->"
TOKEN = "ghp_secret0123456789"
HEAD = "a" * 40
BASE = "b" * 40
COMMENTS = f"/repos/{REPO}/issues/7/comments"


class Comments:
    """GitHub's comments of one pull request: pages, creation and editing."""

    def __init__(self, httpserver: HTTPServer, *, per_page: int = 100) -> None:
        self.all: list[dict[str, object] | None] = []
        self.writes: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.per_page = per_page
        self.after_page: list = []  # calls, one after each page that is read
        self.server = httpserver
        httpserver.expect_request(COMMENTS, method="GET").respond_with_handler(self.page)
        httpserver.expect_request(COMMENTS, method="POST").respond_with_handler(self.create)
        httpserver.expect_request("/user").respond_with_json({"login": "bench-bot"})

    def add(self, author: str | None, body: str | None) -> int:
        number = len(self.all) + 1
        user = None if author is None else {"login": author}
        url = f"https://github.example/{REPO}/pull/7#issuecomment-{number}"
        self.all.append({"id": number, "user": user, "body": body, "html_url": url})
        path = f"/repos/{REPO}/issues/comments/{number}"
        self.server.expect_request(path, method="PATCH").respond_with_handler(self.edit)
        self.server.expect_request(path, method="DELETE").respond_with_handler(self.delete)
        return number

    @property
    def rows(self) -> list[dict[str, object]]:
        return [row for row in self.all if row is not None]

    def page(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        number = int(request.args.get("page", "1"))
        last = number * self.per_page >= len(self.rows)
        rows = self.rows[(number - 1) * self.per_page : number * self.per_page]
        response = Response(json.dumps(rows), content_type="application/json")
        if self.after_page:
            self.after_page.pop(0)()
        if not last:
            url = self.server.url_for(f"{COMMENTS}?page={number + 1}")
            response.headers["Link"] = f'<{url}>; rel="next", <{url}>; rel="last"'
        return response

    def create(self, request: Request) -> Response:
        body = request.get_json()["body"]
        if len(body) > 65_536:
            return self.too_long()
        self.writes.append(("POST", body))
        self.add("bench-bot", body)
        return Response(json.dumps(self.all[-1]), status=201, content_type="application/json")

    def edit(self, request: Request) -> Response:
        row = self.all[int(request.path.rsplit("/", 1)[1]) - 1]
        if row is None:
            return Response('{"message": "Not Found"}', 404, content_type="application/json")
        if len(request.get_json()["body"]) > 65_536:
            return self.too_long()
        row["body"] = request.get_json()["body"]
        self.writes.append(("PATCH", str(row["body"])))
        return Response(json.dumps(row), content_type="application/json")

    def delete(self, request: Request) -> Response:
        number = int(request.path.rsplit("/", 1)[1])
        self.all[number - 1] = None
        self.writes.append(("DELETE", str(number)))
        return Response(status=204)

    @staticmethod
    def too_long() -> Response:
        answer = {"message": "Validation Failed: body is too long (maximum is 65536 characters)"}
        return Response(json.dumps(answer), 422, content_type="application/json")


@pytest.fixture
def comments(httpserver):
    return Comments(httpserver)


@pytest.fixture
def waits():
    return []


@pytest.fixture
def client(httpserver, waits):
    with GitHub(TOKEN, httpserver.url_for("").rstrip("/"), sleep=waits.append) as github:
        yield github


def test_first_upsert_creates_one_comment(client, comments):
    comments.add("alice", "nice work")

    done = client.upsert_comment(REPO, 7, MARKER, f"slower {MARKER}")

    assert done.action == "created"
    assert done.url.endswith("#issuecomment-2")
    assert comments.writes == [("POST", f"slower {MARKER}")]


def test_second_upsert_edits_the_same_comment(client, comments):
    client.upsert_comment(REPO, 7, MARKER, f"slower {MARKER}")

    done = client.upsert_comment(REPO, 7, MARKER, f"faster {MARKER}")

    assert done.action == "updated"
    assert [method for method, _ in comments.writes] == ["POST", "PATCH"]
    assert [row["body"] for row in comments.rows] == [f"faster {MARKER}"]


def test_equal_body_is_not_sent_again_whatever_its_line_ends(client, comments):
    comments.add("bench-bot", f"one\r\ntwo {MARKER}\r\n")

    done = client.upsert_comment(REPO, 7, MARKER, f"one\ntwo {MARKER}\n")

    assert done.action == "unchanged"
    assert comments.writes == []


def test_marker_pasted_by_somebody_else_is_left_alone(client, comments):
    comments.add("mallory", f"look at this {MARKER}")

    done = client.upsert_comment(REPO, 7, MARKER, f"slower {MARKER}")

    assert done.action == "created"
    assert comments.rows[0]["body"] == f"look at this {MARKER}"


def test_another_comment_of_the_bot_is_left_alone(client, comments):
    comments.add("bench-bot", "a note without the marker")

    assert client.upsert_comment(REPO, 7, MARKER, MARKER).action == "created"


def test_given_author_is_used_without_asking_who_we_are(client, comments, httpserver):
    comments.add("github-actions[bot]", f"old {MARKER}")

    done = client.upsert_comment(REPO, 7, MARKER, MARKER, author="GitHub-Actions[bot]")

    assert done.action == "updated"
    assert "/user" not in [request.path for request, _ in httpserver.log]


def test_comment_of_a_deleted_account_and_an_empty_body_are_read(client, comments):
    comments.add(None, f"ghost {MARKER}")
    comments.add("alice", None)

    assert [comment.author for comment in client.comments(REPO, 7).read()] == ["", "alice"]


def test_comment_on_the_third_page_is_found(client, comments):
    comments.per_page = 2
    for _ in range(4):
        comments.add("alice", "chat")
    comments.add("bench-bot", f"old {MARKER}")

    assert client.upsert_comment(REPO, 7, MARKER, f"new {MARKER}").action == "updated"
    assert [method for method, _ in comments.writes] == ["PATCH"]


def test_next_page_on_another_host_does_not_get_the_token(client, httpserver):
    link = '<http://elsewhere.example/steal>; rel="next"'
    httpserver.expect_request(COMMENTS).respond_with_json([], headers={"Link": link})

    with pytest.raises(forge_errors.AnswerError, match=r"elsewhere\.example"):
        list(client.comments(REPO, 7).read())


def test_pages_that_go_round_in_circles_end_in_an_error(client, httpserver):
    link = f'<{httpserver.url_for(COMMENTS)}?page=2>; rel="next"'
    httpserver.expect_request(COMMENTS).respond_with_json([], headers={"Link": link})

    with pytest.raises(forge_errors.AnswerError, match="expected a new address"):
        list(client.comments(REPO, 7).read())


def test_requests_carry_token_version_and_page_size(client, comments, httpserver):
    list(client.comments(REPO, 7).read())

    sent = comments.headers[0]
    assert sent["Authorization"] == f"Bearer {TOKEN}"
    assert sent["X-Github-Api-Version"] == github.API_VERSION
    assert httpserver.log[0][0].args["per_page"] == "100"


@pytest.mark.parametrize(
    ("status", "headers", "error"),
    [
        (401, {}, forge_errors.AuthenticationError),
        (403, {}, forge_errors.ForbiddenError),
        (403, {"x-ratelimit-remaining": "0"}, forge_errors.RateLimitError),
        (403, {"retry-after": "600"}, forge_errors.RateLimitError),
        (404, {}, forge_errors.NotFoundError),
        (429, {}, forge_errors.RateLimitError),
        (301, {"location": "/elsewhere"}, forge_errors.AnswerError),
        (422, {}, forge_errors.UnprocessableError),
        (500, {}, forge_errors.ServerError),
        (503, {}, forge_errors.ServerError),
    ],
)
def test_each_refusal_has_its_type_and_one_line(client, httpserver, status, headers, error):
    answer = {"message": f"no\nway for {TOKEN}"}
    httpserver.expect_request("/user").respond_with_json(answer, status, headers)

    with pytest.raises(error) as caught:
        client.login()

    assert type(caught.value) is error
    message = str(caught.value)
    assert f"GET /user: GitHub answered {status}: no way for ***" in message
    assert "\n" not in message


def test_rate_limit_says_when_to_come_back(client, httpserver):
    headers = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1700000000"}
    httpserver.expect_request("/user").respond_with_json({}, 403, headers)

    with pytest.raises(forge_errors.RateLimitError, match="again at 2023-11-14 22:13:20 UTC"):
        client.login()


def test_read_is_repeated_after_5xx_with_growing_waits(client, httpserver, waits):
    httpserver.expect_ordered_request("/user").respond_with_data("bad gateway", 502)
    httpserver.expect_ordered_request("/user").respond_with_data("still bad", 503)
    httpserver.expect_ordered_request("/user").respond_with_json({"login": "bench-bot"})

    assert client.login() == "bench-bot"
    assert waits == list(forge_http.BACKOFF_S)


def test_read_gives_up_after_three_attempts(client, httpserver):
    httpserver.expect_request("/user").respond_with_data("", 500)

    with pytest.raises(forge_errors.ServerError):
        client.login()

    assert len(httpserver.log) == 1 + len(forge_http.BACKOFF_S)


def test_edit_is_repeated_but_creation_never(client, comments, httpserver, waits):
    httpserver.expect_oneshot_request(COMMENTS, method="POST").respond_with_data("", 502)

    with pytest.raises(forge_errors.ServerError):
        client.upsert_comment(REPO, 7, MARKER, MARKER)
    assert waits == []

    number = comments.add("bench-bot", f"old {MARKER}")
    path = f"/repos/{REPO}/issues/comments/{number}"
    httpserver.expect_oneshot_request(path, method="PATCH").respond_with_data("", 502)
    assert client.upsert_comment(REPO, 7, MARKER, MARKER).action == "updated"
    assert waits == [forge_http.BACKOFF_S[0]]


def test_refusals_are_not_repeated(client, httpserver, waits):
    httpserver.expect_request("/user").respond_with_json({}, 404)

    with pytest.raises(forge_errors.NotFoundError):
        client.login()

    assert waits == []
    assert len(httpserver.log) == 1


def test_refused_connection_is_tried_again_and_named(waits):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"

    with (
        GitHub(TOKEN, address, sleep=waits.append) as client,
        pytest.raises(forge_errors.ConnectionFailedError, match=r"no connection to 127\.0\.0\.1"),
    ):
        client.login()
    assert waits == list(forge_http.BACKOFF_S)


def test_silence_becomes_a_timeout_error(httpserver, waits):
    released = threading.Event()

    def silent(_):
        released.wait(5.0)
        return Response("{}")

    httpserver.expect_request("/user").respond_with_handler(silent)
    address = httpserver.url_for("").rstrip("/")
    with (
        GitHub(TOKEN, address, sleep=waits.append, timeout_s=0.05) as client,
        pytest.raises(
            forge_errors.ConnectionFailedError, match=r"no answer from localhost within 0\.05 s"
        ),
    ):
        client.login()
    released.set()
    assert waits == list(forge_http.BACKOFF_S)


def test_comment_deleted_between_reading_and_editing_is_written_anew(client, comments):
    number = comments.add("bench-bot", f"old {MARKER}")
    comments.after_page = [lambda: comments.all.__setitem__(number - 1, None)]

    done = client.upsert_comment(REPO, 7, MARKER, f"new {MARKER}")

    assert done.action == "created"
    assert [row["body"] for row in comments.rows] == [f"new {MARKER}"]


@pytest.mark.parametrize("other", ["first", "last"])
def test_two_jobs_at_once_leave_one_comment(client, comments, other):
    """The other job writes after we looked and found none, before or after we write ours."""

    def write():
        comments.add("bench-bot", f"theirs {MARKER}")

    comments.after_page = [write] if other == "first" else [lambda: None, write]

    client.upsert_comment(REPO, 7, MARKER, f"ours {MARKER}")
    client.upsert_comment(REPO, 7, MARKER, f"ours {MARKER}")

    assert [row["body"] for row in comments.rows] == [f"ours {MARKER}"]
    assert comments.rows[0]["id"] == 1


@pytest.mark.parametrize("attempt", range(3))
def test_two_jobs_that_run_side_by_side_leave_one_comment(comments, httpserver, attempt):
    address, done = httpserver.url_for("").rstrip("/"), []

    def job(name):
        with GitHub(TOKEN, address) as client:
            body = f"{name} {attempt} {MARKER}"
            done.append(client.upsert_comment(REPO, 7, MARKER, body, author="bench-bot"))

    jobs = [threading.Thread(target=job, args=(name,)) for name in ("one", "two")]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join()

    assert len(done) == 2
    (row,) = comments.rows
    assert row["body"] in {f"one {attempt} {MARKER}", f"two {attempt} {MARKER}"}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (403, forge_errors.ForbiddenError),
        (404, forge_errors.NotFoundError),
        (410, forge_errors.AnswerError),
        (422, forge_errors.UnprocessableError),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PATCH"])
def test_refusal_of_each_call_for_a_comment_is_told_and_leaves_it_as_it_was(
    client, comments, httpserver, waits, method, status, error
):
    """A fork's token, a pull request that is gone, a conversation that is locked."""
    number = comments.add("bench-bot", f"old {MARKER}") if method == "PATCH" else None
    path = COMMENTS if number is None else f"/repos/{REPO}/issues/comments/{number}"
    message = "Resource not accessible by integration"
    refused = httpserver.expect_oneshot_request(path, method=method)
    refused.respond_with_json({"message": message}, status)
    if method == "PATCH" and status == 404:
        assert client.upsert_comment(REPO, 7, MARKER, MARKER, author="bench-bot")
        return  # somebody deleted it: told by another test

    with pytest.raises(error, match=f"{method} .*GitHub answered {status}: {message}"):
        client.upsert_comment(REPO, 7, MARKER, MARKER, author="bench-bot")

    assert (waits, comments.writes) == ([], [])


def test_comments_that_a_race_left_behind_become_one(client, comments):
    for number in range(3):
        comments.add("bench-bot", f"job {number} {MARKER}")
    comments.add("mallory", f"not yours {MARKER}")

    assert client.upsert_comment(REPO, 7, MARKER, MARKER).action == "updated"
    assert [row["id"] for row in comments.rows] == [1, 4]


def test_creation_whose_answer_got_lost_is_found_and_not_repeated(client, comments, httpserver):
    def write_and_fail(request):
        comments.create(request)
        return Response("bad gateway", 502)

    httpserver.expect_oneshot_request(COMMENTS, method="POST").respond_with_handler(write_and_fail)

    done = client.upsert_comment(REPO, 7, MARKER, f"slower {MARKER}")

    assert done.action == "created"
    assert comments.writes == [("POST", f"slower {MARKER}")]


def test_creation_that_is_never_answered_is_found_and_not_repeated(comments, httpserver):
    released = threading.Event()

    def write_and_say_nothing(request):
        done = comments.create(request)
        released.wait(10.0)
        return done

    silent = httpserver.expect_oneshot_request(COMMENTS, method="POST")
    silent.respond_with_handler(write_and_say_nothing)
    address = httpserver.url_for("").rstrip("/")
    # The stub answers one request at a time, so the first look for the comment is not answered too.
    with GitHub(TOKEN, address, sleep=lambda _: released.set(), timeout_s=1.0) as client:
        done = client.upsert_comment(REPO, 7, MARKER, MARKER, author="bench-bot")

    assert done.action == "created"
    assert comments.writes == [("POST", MARKER)]


def test_limit_is_waited_for_as_long_as_it_asks_and_then_the_comment_is_written(
    client, comments, httpserver, waits
):
    limited = httpserver.expect_oneshot_request(COMMENTS, method="POST")
    limited.respond_with_json({"message": "slow down"}, 429, {"retry-after": "7"})

    assert client.upsert_comment(REPO, 7, MARKER, MARKER).action == "created"
    assert waits == [7.0]


def test_limit_that_asks_for_too_long_is_not_waited_for(client, httpserver, waits):
    headers = {"retry-after": str(int(forge_http.LONGEST_WAIT_S) + 1)}
    httpserver.expect_request("/user").respond_with_json({}, 429, headers)

    with pytest.raises(forge_errors.RateLimitError, match="again in 121 s"):
        client.login()
    assert waits == []


def test_body_of_70_000_characters_is_refused_in_one_line(client, comments):
    with pytest.raises(forge_errors.UnprocessableError, match=r"422: .*maximum is 65536"):
        client.upsert_comment(REPO, 7, MARKER, MARKER + "x" * 70_000)
    assert comments.rows == []


def test_comment_of_2000_slower_cases_is_short_enough_to_be_taken(client, comments):
    cases = [case(Verdict.REGRESSION, benchmark=f"a.B.time_{number}") for number in range(2000)]
    context = CommentContext(BASE, HEAD)

    body = render(comparison(*cases), context)

    assert len(render(comparison(*cases), context, limit_bytes=10**7)) > 70_000
    assert client.upsert_comment(REPO, 7, MARKER, body).action == "created"


def test_calls_are_few(client, comments, httpserver):
    """Reading and writing are all; one more look tells whether another job wrote as well."""
    counts = []
    for body in ("one", "one", "two"):
        httpserver.log.clear()
        client.upsert_comment(REPO, 7, MARKER, f"{body} {MARKER}", author="bench-bot")
        counts.append(len(httpserver.log))

    assert counts == [3, 1, 2]


@pytest.mark.parametrize("data", ["<html>proxy</html>", "", '"text"', "[1]", '{"login": 3}'])
def test_answer_of_another_shape_is_refused(client, httpserver, data):
    httpserver.expect_request("/user").respond_with_data(data, 200)

    with pytest.raises(forge_errors.AnswerError):
        client.login()


@pytest.mark.parametrize("token", ["", " ", "two words", "line\n", "ключ"])
def test_unusable_token_is_refused_without_being_shown(token):
    with pytest.raises(forge_errors.AuthenticationError) as caught:
        GitHub(token)

    assert not token.strip() or token.strip() not in str(caught.value)


@pytest.mark.parametrize("url", ["", "ftp://x", "api.github.com", "http://user:pw@x", "http://[::"])
def test_unusable_api_address_is_refused(url):
    with pytest.raises(forge_errors.ForgeInputError):
        GitHub(TOKEN, url)


@pytest.mark.parametrize(
    "repo", ["", "octo", "octo/engine/x", "octo/../admin", "octo/..", "a b/c", "o/r?x=1"]
)
def test_unusable_repository_is_refused_before_any_request(client, httpserver, repo):
    with pytest.raises(forge_errors.ForgeInputError):
        client.upsert_comment(repo, 7, MARKER, MARKER, author="bench-bot")

    assert httpserver.log == []


def test_api_address_with_a_path_keeps_it(httpserver):
    httpserver.expect_request("/api/v3/user").respond_with_json({"login": "bench-bot"})

    with GitHub(TOKEN, httpserver.url_for("/api/v3")) as client:
        assert client.login() == "bench-bot"


PULLS = [
    {"number": 6, "state": "open", "base": {"sha": BASE}, "head": {"sha": "c" * 40}},
    {"number": 7, "state": "open", "base": {"sha": BASE}, "head": {"sha": HEAD}},
    {"number": 8, "state": "closed", "base": {"sha": BASE}, "head": {"sha": "d" * 40}},
]


def test_open_pull_request_is_found_by_its_newest_commit(client, httpserver):
    httpserver.expect_request(f"/repos/{REPO}/pulls").respond_with_json(PULLS[:2])

    assert client.open_pull_request(REPO, HEAD).number == 7
    assert len(httpserver.log) == 1


@pytest.mark.parametrize(
    ("answer", "status", "number"),
    [
        (PULLS[1:], 200, 7),
        (PULLS, 200, None),
        ([], 200, None),
        (PULLS[2:], 200, None),
        ({"message": "No commit found"}, 422, None),
        ({"message": "Not Found"}, 404, None),
    ],
)
def test_commit_that_was_pushed_over_belongs_to_the_only_one_that_holds_it(
    client, httpserver, answer, status, number
):
    old = "e" * 40
    httpserver.expect_request(f"/repos/{REPO}/pulls").respond_with_json(PULLS[:2])
    holding = httpserver.expect_request(f"/repos/{REPO}/commits/{old}/pulls")
    holding.respond_with_json(answer, status)

    if number is not None:
        assert client.open_pull_request(REPO, old).number == number
        return
    with pytest.raises(forge_errors.NotFoundError, match="newer commits were pushed"):
        client.open_pull_request(REPO, old)


def test_merge_base_is_read_from_the_comparison(client, httpserver):
    answer = {"merge_base_commit": {"sha": "e" * 40}}
    path = f"/repos/{REPO}/compare/{BASE}...{HEAD}"
    httpserver.expect_request(path).respond_with_json(answer)

    assert client.merge_base(REPO, BASE, HEAD) == "e" * 40
    with pytest.raises(forge_errors.ForgeInputError, match="hexadecimal"):
        client.merge_base(REPO, "main/../x", HEAD)


def test_token_is_never_logged(client, comments, caplog):
    caplog.set_level(logging.DEBUG)

    client.upsert_comment(REPO, 7, MARKER, MARKER)

    assert caplog.records
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(client)
