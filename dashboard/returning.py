"""Whoever signs in comes back to the page where they did, not to the first one.

Streamlit sends everybody to its first page, so that a link to an alert leads there through the
provider. The browser says where it comes from when it sets out, and keeps that until it is back.
"""

from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard.theme import PAGES

COOKIE: Final = "ddtree_bench_back"
_LONGEST: Final = 3_000  # of a browser's 4096 bytes for a cookie
_SECONDS: Final = 900


class Returning:
    """Stands before the pages, for the two requests that signing in begins and ends with."""

    def __init__(self, app: ASGIApp, root: str = "/") -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the pages answer, and add where somebody came from or is going."""
        path = scope["path"].removeprefix(self._root) if scope["type"] == "http" else ""
        if path not in {"auth/login", "oauth2callback"}:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        is_over = path == "oauth2callback"
        told = request.cookies.get(COOKIE, "") if is_over else request.headers.get("referer", "")
        page = self._page(unquote(told) if is_over else told)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if is_over:
                    headers.append("Set-Cookie", self._cookie("", 0))
                    if page and headers.get("location") == self._root:
                        headers["Location"] = page
                elif page:
                    headers.append("Set-Cookie", self._cookie(quote(page), _SECONDS))
            await send(message)

        await self._app(scope, receive, send_on)

    def _page(self, address: str) -> str | None:
        """Give the address of one of our own pages, written anew; nothing else is ever gone to."""
        try:
            told = urlsplit(address)
        except ValueError:
            return None
        name = told.path.removeprefix(self._root)
        if name not in PAGES:
            return None
        query = urlencode(parse_qsl(told.query))
        page = f"{self._root}{name}?{query}" if query else f"{self._root}{name}"
        return page if len(quote(page)) <= _LONGEST else None

    def _cookie(self, value: str, seconds: int) -> str:
        return f"{COOKIE}={value}; Path={self._root}; Max-Age={seconds}; HttpOnly; SameSite=Lax"
