"""What the pages read: the one place of the browser's face that opens the database.

Each run of a page opens it anew and reads one number, the version of the data; what was read
under that version before is taken from the cache. Nothing is cached over a write.
"""

import datetime as dt
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

import pandas as pd
import streamlit as st
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from dashboard.cli_exit import MissingResultsError
from dashboard.cli_incident import stored_incident
from dashboard.open_databases import reading
from dashboard.selection import link_query, own_query
from db import alert_queries, page_queries, queries
from db.baselines import baseline
from db.change_queries import ExplainedCases, explained, explained_alert
from db.columns import AlertState, Role
from db.compare import Comparison, compare
from db.diagnose import Diagnosis, diagnose
from db.errors import DamagedDatabaseError
from db.evidence import Claim, Evidence
from db.people import role_of, triage
from db.reproduction import SideBySide
from db.session import check_again, writing

if TYPE_CHECKING:
    from sqlalchemy import Engine

_MOST_ENTRIES = 256
_PROGRESS = "Reading the database"
_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@dataclass(frozen=True, slots=True)
class Source:
    """An opened database in one state of its data."""

    engine: "Engine"
    url: str
    version: str

    def overview(self) -> queries.Overview:
        """Counts and newest findings."""
        return self._read(queries.overview)

    def newest_change(self) -> dt.datetime | None:
        """When the data changed last."""
        return self._read(page_queries.newest_change)

    def series(self) -> pd.DataFrame:
        """All series that have a result."""
        return self._read(_all_series)

    def one_series(self, series_id: int) -> dict[str, Any] | None:
        """Give the row of one series; None where all its results were left out."""
        table = self.series()
        for row in table[table["series_id"] == series_id].to_dict("records"):
            return {str(name): value for name, value in row.items()}
        return None

    def history_query(self, found: queries.Finding | alert_queries.AlertView) -> dict[str, str]:
        """Give the URL parameters under which the page of histories shows a finding's series."""
        row = self.one_series(found.series_id)
        return link_query(asdict(found)) if row is None else own_query(row, self.series())

    def history(self, series_id: int) -> pd.DataFrame:
        """Results of a series in commit order."""
        return self._read(_history, series_id)

    def whole_history(self, series_id: int) -> pd.DataFrame:
        """Results of a series in commit order, with those that somebody left out."""
        return self._read(_whole_history, series_id)

    def samples(self, result_id: int) -> list[float]:
        """Recorded samples of one result."""
        return self._read(page_queries.samples, result_id)

    def windows(self, result_id: int) -> pd.DataFrame:
        """Telemetry windows of one result."""
        return self._read(_windows, result_id)

    def change_points(self, series_id: int) -> pd.DataFrame:
        """Stored change points of a series."""
        return self._read(queries.change_points, series_id)

    def machines(self) -> pd.DataFrame:
        """Machines with what each measured."""
        return self._read(queries.machines)

    def freshness(self) -> pd.DataFrame:
        """Series of each machine, and how many lack its newest commit."""
        return self._read(page_queries.freshness)

    def health(self) -> pd.DataFrame:
        """When each machine measured last, how noisy it is of late, and how often throttled."""
        return self._read(page_queries.health)

    def environments(self) -> pd.DataFrame:
        """Environments of all machines."""
        return self._read(page_queries.environments)

    def noise_by_week(self, machine: str) -> pd.DataFrame:
        """Spread of a machine's results, by week."""
        return self._read(page_queries.noise_by_week, machine)

    def telemetry(self, machine: str) -> pd.DataFrame:
        """Newest windows of a machine with their counters."""
        return self._read(page_queries.telemetry, machine)

    def commits(self) -> pd.DataFrame:
        """Commits with results, newest first."""
        return self._read(_all_commits)

    def machine_commits(self, machine: str) -> pd.DataFrame:
        """Commits that one machine measured, newest first."""
        return self._read(queries.commits, machine)

    def merge_base(self, commit: str) -> str:
        """Newest commit of the main branch with results that a commit holds.

        Raises
        ------
        UnknownCommitError
            None is known.
        """
        return self._read(_merge_base, commit)

    def comparison(
        self, base: str, head: str, machine: str | None
    ) -> tuple[Comparison, list[ExplainedCases]]:
        """Judge two commits case by case, and say what moved together and why."""
        return self._share(_comparison, base, head, machine)

    def alerts(self) -> list[alert_queries.AlertView]:
        """All alerts with their histories, closed ones too."""
        return self._read(_alerts)

    def precision(self) -> alert_queries.Precision:
        """How often the detector was right."""
        return self._read(alert_queries.precision)

    def alert_claims(self, view: alert_queries.AlertView) -> tuple[Claim, ...]:
        """Say what was recorded to have changed at an alert's commit."""
        return self._share(_alert_claims, view.id)

    def role(self, email: str) -> Role:
        """What somebody may do, read anew each time: roles are taken away for a reason."""
        with Session(self.engine) as session:
            return role_of(session, email)

    def triage(self, alert_id: int, state: AlertState, *, author: str, note: str | None) -> None:
        """Write down what somebody says of an alert; roles are checked under the write lock.

        Raises
        ------
        AlertError
            No alert has that number, or the author may not judge.
        """
        with writing(self.engine) as connection, Session(bind=connection) as session:
            triage(session, alert_id, state, author=author, note=note)
            session.flush()

    def diagnoses(self, machine: str, commit: str) -> list[tuple[Evidence, Diagnosis]]:
        """What a machine's runs of one commit measured, each with its diagnosis."""
        return self._share(_diagnoses, machine, commit)

    def incident(self) -> SideBySide | None:
        """Lay the stored incident beside the run that repeated it; None without one of them."""
        return self._share(_incident)

    def floor(self, series_id: int, commit: str) -> tuple[float | None, str | None]:
        """Least seconds a series' case can take as of a commit, and what that rests on."""
        return self._read(_floor, series_id, commit)

    def _read(self, what: Callable[[Session, *_Args], _T], *args: *_Args) -> _T:
        """Read through the cache; every caller gets a copy of its own."""
        name = f"{what.__module__}.{what.__name__}"
        return cast("_T", _copied(self.engine, what, (self.url, self.version, name), args))

    def _share(self, what: Callable[[Session, *_Args], _T], *args: *_Args) -> _T:
        """Read through the cache what nobody can change: frozen records of read-only mappings."""
        name = f"{what.__module__}.{what.__name__}"
        return cast("_T", _shared(self.engine, what, (self.url, self.version, name), args))


@contextmanager
def opened(url: str) -> Iterator[Source]:
    """Open the database for one run of a page.

    Raises
    ------
    DbError
        It does not exist, has no tables or those of another version, or the URL is none; or what
        the page asks for cannot be read of it.
    """
    try:
        with reading(url) as database:
            check_again(database.engine)
            with Session(database.engine) as session:
                version = queries.data_version(session)
            yield Source(database.engine, url, version)
    except DBAPIError as error:
        reason = str(error.orig).strip().splitlines()[0]
        raise DamagedDatabaseError(
            f"database: expected tables that can be read, got “{reason}” "
            "(ddtree-bench db check says more; a backup or the result files bring it back)"
        ) from None


# Arguments with a leading underscore are no part of the key: URL, version and name say it all.


@st.cache_data(max_entries=_MOST_ENTRIES, show_spinner=_PROGRESS)
def _copied(
    _engine: "Engine",
    _what: Callable[..., object],
    state: tuple[str, str, str],
    args: tuple[Hashable, ...],
) -> object:
    del state
    with Session(_engine) as session:
        return _what(session, *args)


@st.cache_resource(max_entries=_MOST_ENTRIES, show_spinner=_PROGRESS)
def _shared(
    _engine: "Engine",
    _what: Callable[..., object],
    state: tuple[str, str, str],
    args: tuple[Hashable, ...],
) -> object:
    del state
    with Session(_engine) as session:
        return _what(session, *args)


def _all_series(session: Session) -> pd.DataFrame:
    return queries.series(session)


def _all_commits(session: Session) -> pd.DataFrame:
    return queries.commits(session)


def _history(session: Session, series_id: int) -> pd.DataFrame:
    return queries.history(session, series_id)


def _whole_history(session: Session, series_id: int) -> pd.DataFrame:
    return queries.history(session, series_id, include_excluded=True)


def _windows(session: Session, result_id: int) -> pd.DataFrame:
    return queries.windows(session, result_id=result_id)


def _merge_base(session: Session, commit: str) -> str:
    return baseline(session, commit, None)


def _comparison(
    session: Session, base: str, head: str, machine: str | None
) -> tuple[Comparison, list[ExplainedCases]]:
    found = compare(*queries.both_results(session, base, head, machine))
    return found, explained(session, base, head, found)


def _alerts(session: Session) -> list[alert_queries.AlertView]:
    return alert_queries.alerts(session, list(AlertState))


def _alert_claims(session: Session, alert_id: int) -> tuple[Claim, ...]:
    return explained_alert(session, alert_queries.alert(session, alert_id))


def _diagnoses(session: Session, machine: str, commit: str) -> list[tuple[Evidence, Diagnosis]]:
    found = queries.evidence(session, machine=machine, commit=commit)
    return [(item, diagnose(item)) for item in found]


def _incident(session: Session) -> SideBySide | None:
    try:
        return stored_incident(session, None)
    except MissingResultsError:
        return None


def _floor(session: Session, series_id: int, commit: str) -> tuple[float | None, str | None]:
    found = queries.evidence(session, series=series_id, commit=commit)
    cases = [case for item in found for case in diagnose(item).cases]
    known = next((case for case in cases if case.floor_ms is not None), None)
    if known is None or known.floor_ms is None:
        return None, None
    return known.floor_ms / 1000, known.floor_basis
