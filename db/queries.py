"""What pages, comments and commands read: records and frames, never rows.

Every function is a pure read on the session it is given. Commits are ordered by their source's
rank where every commit of a series has one of the same kind, else by date; `order_basis` says
which.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from sqlalchemy import Select, exists, or_, select
from sqlalchemy.orm import Session

from db.case_queries import both_results, case_results
from db.columns import OrderBasis
from db.counted import counts
from db.errors import UnknownCommitError, UnknownSeriesError
from db.frames import AnyRow, frame_of, with_names
from db.labels import environment_labels
from db.models import (
    Alert,
    Benchmark,
    ChangePoint,
    Commit,
    Exclusion,
    Machine,
    Metric,
    Result,
    Revision,
    Series,
    Variant,
)
from db.overview_queries import (
    Finding,
    Overview,
    commits,
    machines,
    overview,
    still_found,
)
from db.window_queries import evidence, windows

__all__ = [
    "Finding",
    "Overview",
    "both_results",
    "case_results",
    "change_points",
    "commits",
    "data_version",
    "evidence",
    "history",
    "machines",
    "overview",
    "resolve_commit",
    "series",
    "windows",
]

SERIES_COLUMNS = (
    "series_id",
    "benchmark",
    "version",
    "params",
    "metric",
    "unit",
    "direction",
    "machine",
    "variant",
)
EXCLUDED = "excluded"  # the status of what somebody left out
HISTORY_COLUMNS = (
    "commit",
    "commit_date",
    "subject",
    "branch",
    "external",
    "dirty",
    "run_id",
    "result_id",
    "started_at",
    "value",
    "q25",
    "q75",
    "ci_low",
    "ci_high",
    "n",
    "status",
)


def data_version(session: Session) -> str:
    """Name the state of the data; it changes with every write that changes a page.

    Its instant tells it from a state of another database that was put in this one's place.
    """
    query = select(Revision.id, Revision.created_at).order_by(Revision.id.desc()).limit(1)
    newest = session.execute(query).first()
    return "0" if newest is None else f"{newest.id} of {newest.created_at.isoformat()}"


def resolve_commit(session: Session, text: str) -> str:
    """Give the full hash of the one stored commit that starts with `text`.

    Raises
    ------
    UnknownCommitError
        None does, or more than one.
    """
    wanted = text.strip().lower()
    found = session.scalars(
        select(Commit.sha)
        .where(Commit.sha.istartswith(wanted, autoescape=True))
        .order_by(Commit.sha)
        .limit(3)
    ).all()
    exact = [sha for sha in found if sha.lower() == wanted]
    if exact:
        return exact[0]
    if not wanted or not found:
        raise UnknownCommitError(f"commit: expected one with results, got {text!r} (none stored)")
    if len(found) > 1:
        names = ", ".join(sha[:12] for sha in found)
        raise UnknownCommitError(f"commit: expected one, got {text!r}, which fits {names}")
    return found[0]


def series(
    session: Session, *, benchmark: str | None = None, machine: str | None = None
) -> pd.DataFrame:
    """List the series that have a result."""
    query = with_names(
        select(
            Series.id,
            Benchmark.name,
            Benchmark.version,
            Series.params,
            Metric.name,
            Metric.unit,
            Metric.direction,
            Machine.name,
            Variant.label,
        )
    ).where(exists().where(Result.series_id == Series.id, counts()))
    if benchmark is not None:
        query = query.where(Benchmark.name == benchmark)
    if machine is not None:
        query = query.where(Machine.name == machine)
    rows = session.execute(query.order_by(Benchmark.name, Series.id)).all()
    frame = frame_of(rows, SERIES_COLUMNS)
    frame["direction"] = frame["direction"].astype(str)
    return frame


def history(
    session: Session,
    series_id: int,
    *,
    include_dirty: bool = False,
    main_only: bool = False,
    include_excluded: bool = False,
) -> pd.DataFrame:
    """Give the results of a series in the order of its commits.

    `main_only` leaves out commits that a repository knows to be off its main branch, such as
    those of pull requests; a commit of which no repository told stays in.

    `include_excluded` adds what somebody left out, with the status "excluded" and a column
    `excluded` that says who did and why.

    `order` counts commits from 0; results of one commit share it and follow their start.
    `epoch` numbers the runner environments by first appearance, so one that returns has its old
    number; a result whose environment nobody recorded belongs to the epoch before it.
    `attrs["order_basis"]` is "repository", "recorded" or "date".

    Raises
    ------
    UnknownSeriesError
        No series has that id.
    """
    _require_series(session, series_id)
    query = _history_query(series_id, main_only=main_only).where(
        *(() if include_excluded else (Result.exclusion_id.is_(None),)),
        *(() if include_dirty else (Result.dirty.is_(False),)),
    )
    rows = session.execute(query).all()
    basis = _order_basis(rows)
    rows = _in_order(rows)
    frame = frame_of(rows, HISTORY_COLUMNS)
    frame["started_at"] = pd.to_datetime(frame["started_at"], unit="ms", utc=True)
    frame["status"] = frame["status"].astype(str)
    if include_excluded:
        frame["excluded"] = [_left_out(row.author, row.reason) for row in rows]
        frame.loc[frame["excluded"] != "", "status"] = EXCLUDED
    for name in ("value", "q25", "q75", "ci_low", "ci_high", "n"):
        frame[name] = frame[name].astype(float)
    frame.insert(0, "order", pd.factorize(frame["commit"])[0])
    environments = [row.environment_id for row in rows]
    labels = environment_labels(session, environments)
    frame["epoch"] = _epochs(environments)
    frame["environment"] = pd.Series([labels.get(one) for one in environments], dtype=object)
    frame.attrs["order_basis"] = str(basis)
    return frame


def _history_query(series_id: int, *, main_only: bool) -> Select[*tuple[Any, ...]]:
    """Select what `history` shows, in the order in which it was measured."""
    query = (
        select(
            Commit.sha,
            Commit.committed_at,
            Commit.subject,
            Commit.branch,
            Commit.external,
            Result.dirty,
            Result.run_id,
            Result.id,
            Result.started_at_ms,
            Result.value,
            Result.q25,
            Result.q75,
            Result.ci_low,
            Result.ci_high,
            Result.n,
            Result.status,
            Commit.position,
            Commit.order_basis,
            Result.runner_environment_id.label("environment_id"),
            Exclusion.author,
            Exclusion.reason,
        )
        .join(Commit, Commit.id == Result.commit_id)
        .outerjoin(Exclusion, Exclusion.id == Result.exclusion_id)
        .where(Result.series_id == series_id)
    )
    if main_only:
        query = query.where(
            or_(Commit.branch.is_not(None), Commit.order_basis != OrderBasis.REPOSITORY)
        )
    return query.order_by(Result.started_at_ms, Result.id)


def _left_out(author: str | None, reason: str | None) -> str:
    return "" if author is None else f"left out by {author}: {reason}"


def change_points(session: Session, series_id: int) -> pd.DataFrame:
    """Give the stored change points of a series that are still found, oldest commit first."""
    _require_series(session, series_id)
    columns = (
        "commit",
        "commit_date",
        "subject",
        "before",
        "after",
        "relative_change",
        "p_value",
        "cause",
        "detected_at",
        "alert_state",
    )
    query = (
        select(
            Commit.sha,
            Commit.committed_at,
            Commit.subject,
            ChangePoint.before,
            ChangePoint.after,
            ChangePoint.relative_change,
            ChangePoint.p_value,
            ChangePoint.cause,
            ChangePoint.detected_at,
            Alert.state,
            Commit.position,
            Commit.order_basis,
        )
        .join(Commit, Commit.id == ChangePoint.commit_id)
        .outerjoin(Alert, Alert.change_point_id == ChangePoint.id)
        .where(ChangePoint.series_id == series_id, still_found())
    )
    rows = _in_order(session.execute(query).all())
    return frame_of(rows, columns)


def _require_series(session: Session, series_id: int) -> None:
    if session.get(Series, series_id) is None:
        raise UnknownSeriesError(f"series: expected the id of a stored series, got {series_id}")


def _order_basis(rows: Sequence[AnyRow]) -> OrderBasis:
    """One kind of rank orders commits only where all have it."""
    kinds = {row.order_basis for row in rows}
    return kinds.pop() if len(kinds) == 1 else OrderBasis.DATE


def _in_order(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Sort by rank or date; results of one commit keep the order of their start."""
    by_date = _order_basis(rows) is OrderBasis.DATE
    return sorted(rows, key=lambda row: (row.committed_at if by_date else row.position, row.sha))


def _epochs(environments: Sequence[int | None]) -> pd.Series:
    """Number environments by first appearance; an unknown one is the one before it."""
    known = pd.Series(list(environments), dtype=pd.Int64Dtype()).ffill().bfill()
    return pd.Series(pd.factorize(known)[0]).clip(lower=0)
