"""The files of Streamlit's page are answered whole, and nothing else is."""

import asyncio

from starlette.responses import Response

from dashboard.static_files import STATIC, StaticFiles


def answered(app, path, method="GET"):
    """Ask for a path; give status, headers and content."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
    asyncio.run(app(scope, receive, send))
    return (
        sent[0]["status"],
        {name.decode(): value.decode() for name, value in sent[0]["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
    )


def test_each_kind_of_file_is_answered_as_it_is_and_may_be_kept():
    files = [path for path in sorted((STATIC / "static").rglob("*")) if path.is_file()]
    one_of_each = {path.suffix: path for path in files}
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
    assert {*kinds, ".woff2"} <= set(one_of_each)

    for suffix, path in one_of_each.items():
        asked = f"/{path.relative_to(STATIC).as_posix()}"
        status, headers, content = answered(StaticFiles(elsewhere), asked)

        assert (status, content) == (200, path.read_bytes())
        assert headers["content-type"] == kinds.get(suffix, headers["content-type"])
        assert headers["content-length"] == str(len(content))
        assert headers["cache-control"] == "public, immutable, max-age=31536000"


def test_whatever_is_no_file_of_the_page_is_left_to_the_pages():
    for path in ("/", "/history", "/static/../index.html", "/static/js/none.js", "/static"):
        assert answered(StaticFiles(elsewhere), path)[0] == 404

    there = next(path for path in (STATIC / "static").rglob("*") if path.is_file())
    asked = f"/{there.relative_to(STATIC).as_posix()}"
    assert answered(StaticFiles(elsewhere), asked, method="POST")[0] == 404


async def elsewhere(scope, receive, send):
    await Response(status_code=404)(scope, receive, send)
