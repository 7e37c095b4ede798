"""Commits learn their rank, subject and branch from a repository or from what a tree recorded."""

import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, select, update

from db.columns import OrderBasis
from db.frames import AnyRow
from db.models import Commit
from db.registry import table_of
from db.repository import CommitInfo, Repository


def update_order(
    connection: Connection, repository: Repository | None, recorded: Iterable[CommitInfo]
) -> int:
    """Rank every stored commit the repository holds; of the others, those a tree recorded.

    Gives the number of commits that changed.

    Ranks of one repository are given anew each time, because a new side branch moves them.
    """
    stored = connection.execute(
        select(*table_of(Commit).columns).where(Commit.external.is_(False))
    ).all()
    known = {} if repository is None else repository.history(row.sha for row in stored)
    kept = {info.sha: info for info in recorded}
    changes = [change for row in stored if (change := _change(row, known, kept)) is not None]
    if changes:
        table = table_of(Commit)
        names = [name.removeprefix("new_") for name in changes[0] if name != "commit"]
        connection.execute(
            update(table)
            .where(table.c.id == bindparam("commit"))
            .values({name: bindparam(f"new_{name}") for name in names}),
            changes,
        )
    return len(changes)


def order_basis(connection: Connection, commit_ids: Iterable[int]) -> OrderBasis:
    """Give what orders these commits; transcribed ones do not count beside others."""
    ids = set(commit_ids)
    rows = connection.execute(select(Commit.id, Commit.order_basis, Commit.external)).all()
    ours = [row for row in rows if row.id in ids]
    kinds = {row.order_basis for row in ours if not row.external}
    return kinds.pop() if len(kinds) == 1 else OrderBasis.DATE


def _change(
    row: AnyRow, known: Mapping[str, CommitInfo], kept: Mapping[str, CommitInfo]
) -> dict[str, Any] | None:
    """Give the new values of a commit; None where nothing is known or nothing changes."""
    info = known.get(row.sha)
    basis = OrderBasis.REPOSITORY
    if info is None or info.position is None:
        if row.order_basis is OrderBasis.REPOSITORY:
            return None  # an earlier, fuller look at the repository stands
        if row.sha in kept:
            info, basis = kept[row.sha], OrderBasis.RECORDED
        elif info is None:
            return None
        else:
            basis = OrderBasis.DATE
    new = {
        "new_authored_at": _instant(info.authored_at_s),
        "new_subject": info.subject,
        "new_branch": info.branch,
        "new_position": info.position,
        "new_order_basis": basis,
        "new_merge_base": info.merge_base,
        "new_merge_base_position": info.merge_base_position,
        "new_side_branch": info.side_branch,
    }
    same = all(getattr(row, name.removeprefix("new_")) == value for name, value in new.items())
    return None if same else new | {"commit": row.id}


def _instant(seconds: int) -> dt.datetime | None:
    """Give a date; None where a commit's is none of the calendar's, as git allows."""
    try:
        return dt.datetime.fromtimestamp(seconds, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return None
