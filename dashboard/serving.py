"""The server of the pages: Streamlit's, with a first page that knows where its server is.

A browser that opens a page by its own address would look for the server below that address first,
which ends in two errors on its console; and Streamlit knows its first page under no name.
"""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

import streamlit as st
from altair.utils.schemapi import disable_debug_mode
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from dashboard.open_databases import close
from dashboard.returning import Returning
from dashboard.sockets import send_at_once
from dashboard.static_files import STATIC, StaticFiles
from dashboard.theme import FIRST_PAGE, PAGE_STYLE, PAGES

_INDEX: Final = STATIC / "index.html"
_BELOW: Final = st.get_option("server.baseUrlPath").strip("/")
_ROOT: Final = f"/{_BELOW}/" if _BELOW else "/"
# As the page's own files are addressed: relative to what the browser shows, under any proxy.
_SERVER: Final = (
    "<script>window.__streamlit={BACKEND_BASE_URL:new URL('./',location.href).href}</script>"
)
# Behind the styles that Streamlit's code adds to the head; drawn by that code instead, it would be
# an element of every page, and two files more to fetch.
_STYLE: Final = f"<style>{PAGE_STYLE}</style>"


async def _index(_: Request) -> Response:
    page = _INDEX.read_text(encoding="utf-8")
    page = page.replace("<head>", f"<head>{_SERVER}", 1).replace("</body>", f"{_STYLE}</body>", 1)
    return HTMLResponse(page, headers={"Cache-Control": "no-cache"})


async def _first(request: Request) -> Response:
    return RedirectResponse(f"./?{request.url.query}" if request.url.query else "./")


@asynccontextmanager
async def _ready(_: st.App) -> AsyncIterator[None]:
    """Read the pages before the first reader comes, who would wait for it.

    What stays is searched no more by the collector of garbage, which was a quarter of the time of
    a comparison. When the server is stopped, so are its connections to the database.
    """
    for name in (FIRST_PAGE, *PAGES):
        import_module(f"dashboard.{name}_page")
    gc.collect()
    gc.freeze()
    send_at_once()
    yield
    close()


# Every part of a chart would be checked while it is made; the tests check them all.
disable_debug_mode()
app = st.App(
    Path(__file__).with_name("app.py"),
    lifespan=_ready,
    middleware=[Middleware(StaticFiles, root=_ROOT), Middleware(Returning, root=_ROOT)],
    routes=[
        Route(f"{_ROOT}{FIRST_PAGE}", _first),
        *(Route(f"{_ROOT}{name}", _index) for name in ("", *PAGES)),
    ],
)
