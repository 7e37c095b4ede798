"""What the pages read: the one place of the browser's face that opens the database.

Each run of a page opens it anew and reads one number, the version of the data; what was read
under that version before is taken from the cache. Nothing is cached over a write.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import streamlit as st
from sqlalchemy.orm import Session

from db import queries
from db.diagnose import Diagnosis, diagnose
from db.evidence import Evidence
from db.session import open_database

if TYPE_CHECKING:
    from sqlalchemy import Engine

_MOST_ENTRIES = 256


@dataclass(frozen=True, slots=True)
class Source:
    """An opened database in one state of its data."""

    engine: "Engine"
    url: str
    version: str

    def overview(self) -> queries.Overview:
        """Counts and newest findings."""
        return _overview(self.engine, self.url, self.version)

    def series(self) -> pd.DataFrame:
        """All series with how many results each has."""
        return _series(self.engine, self.url, self.version)

    def one_series(self, series_id: int) -> dict[str, Any]:
        """Give the row of one series."""
        table = self.series()
        row = table[table["series_id"] == series_id].iloc[0]
        return {str(name): value for name, value in row.items()}

    def history(self, series_id: int) -> pd.DataFrame:
        """Results of a series in commit order."""
        return _history(self.engine, self.url, self.version, series_id)

    def change_points(self, series_id: int) -> pd.DataFrame:
        """Stored change points of a series."""
        return _change_points(self.engine, self.url, self.version, series_id)

    def machines(self) -> pd.DataFrame:
        """Machines with what each measured."""
        return _machines(self.engine, self.url, self.version)

    def commits(self) -> pd.DataFrame:
        """Commits with results, newest first."""
        return _commits(self.engine, self.url, self.version)

    def machine_commits(self, machine: str) -> pd.DataFrame:
        """Commits that one machine measured, newest first."""
        return _machine_commits(self.engine, self.url, self.version, machine)

    def diagnoses(self, machine: str, commit: str) -> list[tuple[Evidence, Diagnosis]]:
        """What a machine's runs of one commit measured, each with its diagnosis."""
        return _diagnoses(self.engine, self.url, self.version, machine, commit)

    def floor(self, series_id: int, commit: str) -> tuple[float | None, str | None]:
        """Least seconds a series' case can take as of a commit, and what that rests on."""
        return _floor(self.engine, self.url, self.version, series_id, commit)


@contextmanager
def opened(url: str) -> Iterator[Source]:
    """Open the database for one run of a page.

    Raises
    ------
    DbError
        It does not exist, has no tables or those of another version, or the URL is none.
    """
    engine = open_database(url, must_exist=True)
    try:
        with Session(engine) as session:
            version = queries.data_version(session)
        yield Source(engine, url, version)
    finally:
        engine.dispose()


# Arguments with a leading underscore are no part of the key: url and version say it all.


@st.cache_data(max_entries=_MOST_ENTRIES, show_spinner=False)
def _overview(_engine: "Engine", url: str, version: str) -> queries.Overview:
    del url, version
    with Session(_engine) as session:
        return queries.overview(session)


@st.cache_data(max_entries=_MOST_ENTRIES, show_spinner=False)
def _series(_engine: "Engine", url: str, version: str) -> pd.DataFrame:
    del url, version
    with Session(_engine) as session:
        return queries.series(session)


@st.cache_data(max_entries=_MOST_ENTRIES, show_spinner=False)
def _history(_engine: "Engine", url: str, version: str, series_id: int) -> pd.DataFrame:
    del url, version
    with Session(_engine) as session:
        return queries.history(session, series_id)


@st.cache_data(max_entries=_MOST_ENTRIES, show_spinner=False)
def _change_points(_engine: "Engine", url: str, version: str, series_id: int) -> pd.DataFrame:
    del url, version
    with Session(_engine) as session:
        return queries.change_points(session, series_id)


@st.cache_data(max_entries=_MOST_ENTRIES, show_spinner=False)
def _machines(_engine: "Engine", url: str, version: str) -> pd.DataFrame:
    del url, version
    with Session(_engine) as session:
        return queries.machines(session)


@st.cache_data(max_entries=_MOST_ENTRIES, show_spinner=False)
def _commits(_engine: "Engine", url: str, version: str) -> pd.DataFrame:
    del url, version
    with Session(_engine) as session:
        return queries.commits(session)


@st.cache_data(max_entries=_MOST_ENTRIES, show_spinner=False)
def _machine_commits(_engine: "Engine", url: str, version: str, machine: str) -> pd.DataFrame:
    del url, version
    with Session(_engine) as session:
        return queries.commits(session, machine)


@st.cache_data(max_entries=_MOST_ENTRIES, show_spinner=False)
def _floor(
    _engine: "Engine", url: str, version: str, series_id: int, commit: str
) -> tuple[float | None, str | None]:
    del url, version
    with Session(_engine) as session:
        found = queries.evidence(session, series=series_id, commit=commit)
    cases = [case for item in found for case in diagnose(item).cases]
    known = next((case for case in cases if case.floor_ms is not None), None)
    if known is None or known.floor_ms is None:
        return None, None
    return known.floor_ms / 1000, known.floor_basis


# Evidence and diagnoses are frozen records with read-only mappings: shared, never copied.


@st.cache_resource(max_entries=_MOST_ENTRIES, show_spinner=False)
def _diagnoses(
    _engine: "Engine", url: str, version: str, machine: str, commit: str
) -> list[tuple[Evidence, Diagnosis]]:
    del url, version
    with Session(_engine) as session:
        found = queries.evidence(session, machine=machine, commit=commit)
    return [(item, diagnose(item)) for item in found]
