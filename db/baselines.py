"""What a commit beside the main branch is held against: main as it was where they parted."""

from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from db.columns import OrderBasis
from db.counted import counts
from db.errors import UnknownCommitError
from db.models import Commit, Machine, Result, Series


def baseline(session: Session, commit: str, machine: str | None = None) -> str:
    """Give the newest commit of the main branch with results that a commit holds.

    Not the newest there is: main may have gone on since, and its changes are not the commit's.

    Parameters
    ----------
    commit : full hash, as `resolve_commit` gives it
    machine : whose results count; None counts all

    Raises
    ------
    UnknownCommitError
        It is not stored, no repository told where it parted from main, or nothing that it holds
        of main was measured.
    """
    head = session.scalar(select(Commit).where(Commit.sha == commit))
    if head is None:
        raise UnknownCommitError(f"commit: expected a stored hash, got {commit!r}")
    if head.merge_base_position is None:
        raise UnknownCommitError(
            f"merge base: expected one of {commit[:12]}, found none "
            "(ingest with --repository, on a clone that is not shallow, learns it)"
        )
    measured = (
        exists()
        .where(Result.commit_id == Commit.id, Result.series_id == Series.id, counts())
        .where(Series.machine_id == Machine.id)
    )
    if machine is not None:
        measured = measured.where(Machine.name == machine)
    found = session.scalar(
        select(Commit.sha)
        .where(
            Commit.branch.is_not(None),
            Commit.order_basis == OrderBasis.REPOSITORY,
            Commit.position <= head.merge_base_position,
            Commit.id != head.id,
            measured,
        )
        .order_by(Commit.position.desc())
        .limit(1)
    )
    if found is None:
        raise UnknownCommitError(
            f"merge base: expected results of main up to {str(head.merge_base)[:12]}, found none"
        )
    return found
