"""GitLab's notes under the same sticky comment, against a stub served over HTTP."""

import json

import pytest
from werkzeug import Response

from dashboard import forge_errors
from dashboard.gitlab import MergeRequestNotes, gitlab_http, login
from dashboard.sticky import Sticky

MARKER = "<!-- ddtree-bench:suite -->"
TOKEN = "glpat-secret"


@pytest.fixture
def notes(httpserver):
    """Merge request 7 of a project in a group, whose notes come one a page."""
    rows = []

    def answer(request):
        assert request.headers["PRIVATE-TOKEN"] == TOKEN
        # The path of the project is one segment, its slash encoded.
        assert "/projects/group%2Fengine/merge_requests/7/notes" in request.environ["REQUEST_URI"]
        if request.method == "GET":
            page = int(request.args.get("page", "1"))
            response = Response(json.dumps(rows[page - 1 : page]), content_type="application/json")
            if page < len(rows):
                response.headers["Link"] = f'<{request.base_url}?page={page + 1}>; rel="next"'
                response.headers["Link"] = response.headers["Link"].replace(
                    "group/engine", "group%2Fengine"
                )
            return response
        if request.method == "DELETE":
            rows.pop(int(request.path.rsplit("/", 1)[1]) - 1)
            return Response(status=204)
        if request.method == "POST":
            row = {"id": len(rows) + 1, "author": {"username": "bot"}, **request.get_json()}
            rows.append(row)
        else:
            row = rows[int(request.path.rsplit("/", 1)[1]) - 1]
            row["body"] = request.get_json()["body"]
        return Response(json.dumps(row), content_type="application/json")

    httpserver.expect_request("/api/v4/user").respond_with_json({"username": "bot"})
    path = "/api/v4/projects/group/engine/merge_requests/7/notes"
    httpserver.expect_request(path).respond_with_handler(answer)
    for number in range(1, 4):
        httpserver.expect_request(f"{path}/{number}").respond_with_handler(answer)
    return rows


def test_note_is_created_edited_and_left_alone_beside_a_foreign_marker(notes, httpserver):
    notes.append({"id": 1, "author": {"username": "mallory"}, "body": MARKER})
    with gitlab_http(TOKEN, httpserver.url_for("/api/v4")) as http:
        sticky = Sticky(MergeRequestNotes(http, "group/engine", 7), MARKER, login(http))
        done = [sticky.upsert(f"{text} {MARKER}") for text in ("slow", "slow", "fast")]

    assert [one.action for one in done] == ["created", "unchanged", "updated"]
    assert [row["body"] for row in notes] == [MARKER, f"fast {MARKER}"]
    assert done[0].url == "group/engine!7#note_2"


def test_notes_that_two_jobs_left_become_one_and_a_deleted_one_is_written_anew(notes, httpserver):
    notes += [{"id": n, "author": {"username": "bot"}, "body": f"{n} {MARKER}"} for n in (1, 2)]
    path = "/api/v4/projects/group/engine/merge_requests/7/notes"
    with gitlab_http(TOKEN, httpserver.url_for("/api/v4")) as http:
        sticky = Sticky(MergeRequestNotes(http, "group/engine", 7), MARKER, "bot")

        assert sticky.upsert(f"slow {MARKER}").action == "updated"
        assert [row["body"] for row in notes] == [f"slow {MARKER}"]

        def gone(_request):
            notes.clear()
            return Response('{"message": "404 Not found"}', 404, content_type="application/json")

        httpserver.expect_oneshot_request(f"{path}/1", method="PUT").respond_with_handler(gone)
        assert sticky.upsert(f"fast {MARKER}").action == "created"
        assert [row["body"] for row in notes] == [f"fast {MARKER}"]


def test_refusal_names_gitlab_and_not_the_token(httpserver):
    httpserver.expect_request("/user").respond_with_json({"message": f"no {TOKEN}"}, 403)

    with (
        gitlab_http(TOKEN, httpserver.url_for("").rstrip("/")) as http,
        pytest.raises(forge_errors.ForbiddenError, match=r"GitLab answered 403: no \*\*\*"),
    ):
        login(http)
