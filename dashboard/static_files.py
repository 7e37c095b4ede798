"""The files of Streamlit's own page, answered from memory.

A browser that opens its first page asks for a hundred of them, each of which Streamlit finds, opens
and reads in a thread: that was half of the processor's time that a page took of the server.
"""

import mimetypes
from functools import cache
from pathlib import Path
from typing import Final

import streamlit as st
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

STATIC: Final = Path(st.__file__).with_name("static")
_FOLDER: Final = STATIC / "static"
# As Streamlit itself says of them: their names have a digest of what they are.
_HEADERS: Final = {"Cache-Control": "public, immutable, max-age=31536000"}


class StaticFiles:
    """Answers for the files, before anything else looks at what is asked."""

    def __init__(self, app: ASGIApp, root: str = "/") -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a file where one is asked for, else let the pages answer."""
        is_asked = scope["type"] == "http" and scope["method"] == "GET"
        path = _files().get(scope["path"].removeprefix(self._root)) if is_asked else None
        if path is None:
            await self._app(scope, receive, send)
        else:
            kind, _ = mimetypes.guess_type(path.name)
            answer = Response(_content(path), media_type=kind, headers=_HEADERS)
            await answer(scope, receive, send)


@cache
def _files() -> dict[str, Path]:
    """Name the files there are: nothing else is ever read, whatever a path says."""
    paths = (path for path in _FOLDER.rglob("*") if path.is_file())
    return {f"static/{path.relative_to(_FOLDER).as_posix()}": path for path in paths}


@cache
def _content(path: Path) -> bytes:
    return path.read_bytes()
