"""Databases that stay open between the runs of pages, each shared by all who read it at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final

from db.session import open_database

_MOST_DATABASES: Final = 4


class Database:
    """What is kept of a database between runs: its statements, whose making takes a while.

    Connections to a file are closed when nobody reads it, so that it can be replaced by a backup;
    those to a server are kept.
    """

    def __init__(self, url: str) -> None:
        self.engine = open_database(url, must_exist=True)
        self._is_file = self.engine.dialect.name == "sqlite"
        self._readers = 0
        self._lock = Lock()

    def enter(self) -> None:
        """Count a reader more."""
        with self._lock:
            self._readers += 1

    def leave(self) -> None:
        """Count a reader less; the last one closes a file."""
        with self._lock:
            self._readers -= 1
            if self._is_file and not self._readers:
                self.engine.dispose()


_OPENING: Final = Lock()
_KEPT: Final[dict[str, Database]] = {}  # by URL, the one named last at the end


@contextmanager
def reading(url: str) -> Iterator[Database]:
    """Lend a database for one run of a page.

    Raises
    ------
    DbError
        It does not exist, has no tables or those of another version, or the URL is none.
    """
    database = _known(url)
    database.enter()
    try:
        yield database
    finally:
        database.leave()


def close() -> None:
    """Close what is kept of databases between the runs of pages."""
    with _OPENING:
        while _KEPT:
            _KEPT.popitem()[1].engine.dispose()


def _known(url: str) -> Database:
    """Open a database once, whoever comes at once; those named least of late are closed."""
    with _OPENING:
        database = _KEPT.pop(url, None) or Database(url)
        _KEPT[url] = database
        while len(_KEPT) > _MOST_DATABASES:
            _KEPT.pop(next(iter(_KEPT))).engine.dispose()
    return database
