"""Where each stored commit stands among the others, read once and asked by whole columns."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sqlalchemy import select

from db.cells import digest_of
from db.columns import OrderBasis
from db.models import Commit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from sqlalchemy.orm import Session

    from db.frames import AnyRow

BASES = list(OrderBasis)
UNRANKED = -1
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
MICROSECOND = dt.timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class CommitPlaces:
    """Columns over the commits; the first index is a commit's id."""

    ids: NDArray[np.int64]  # those there are, ascending
    on_main: NDArray[np.bool_]  # or of no known branch
    basis: NDArray[np.int64]
    position: NDArray[np.int64]
    date_us: NDArray[np.int64]
    sha_place: NDArray[np.int64]  # by their names
    place: NDArray[np.int64]  # among all, whatever orders them

    @classmethod
    def of(cls, session: Session) -> CommitPlaces:
        """Read the commits."""
        query = select(
            Commit.id,
            Commit.sha,
            Commit.position,
            Commit.committed_at,
            Commit.order_basis,
            Commit.branch,
        )
        rows = session.execute(query.order_by(Commit.id)).all()
        ids = np.asarray([row.id for row in rows], dtype=np.int64)
        on_main = [
            row.branch is not None or row.order_basis != OrderBasis.REPOSITORY for row in rows
        ]
        dates = [(row.committed_at - EPOCH) // MICROSECOND for row in rows]
        positions = [UNRANKED if row.position is None else row.position for row in rows]
        names = sorted(range(len(rows)), key=lambda index: rows[index].sha)
        return cls(
            ids=ids,
            on_main=_spread(ids, on_main).astype(bool),
            basis=_spread(ids, [BASES.index(row.order_basis) for row in rows]),
            position=_spread(ids, positions),
            date_us=_spread(ids, dates),
            sha_place=_spread(ids, _ranks(names)),
            place=_spread(ids, _ranks(_all_in_order(rows))),
        )

    @property
    def newest_id(self) -> int:
        """The commit that was stored last; 0 where there is none."""
        return int(self.ids[-1]) if len(self.ids) else 0

    def is_main(self, commits: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each is on the main branch, or of no repository that could say."""
        return self.on_main[commits]

    def order(
        self, commits: NDArray[np.float64], started: NDArray[np.float64], ids: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Sort a series' results as its history does: one kind of rank orders where all have it."""
        of = commits.astype(np.int64)
        kinds = self.basis[of]
        is_ranked = bool((kinds == kinds[0]).all()) and BASES[kinds[0]] is not OrderBasis.DATE
        rank = self.position[of] if is_ranked else self.date_us[of]
        begun = np.where(np.isnan(started), -np.inf, started)
        return np.lexsort((ids, begun, self.sha_place[of], rank))

    def digest(self, newest_id: int) -> int:
        """Tell the order of the commits up to one, so that a new one beside them does not count."""
        known = self.ids[self.ids <= newest_id]
        by_rank = np.lexsort((self.sha_place[known], self.position[known], self.basis[known]))
        by_date = np.lexsort((self.sha_place[known], self.date_us[known]))
        facts = (known[by_rank], known[by_date], self.basis[known], self.on_main[known])
        return digest_of(b"".join(one.tobytes() for one in facts))


def _spread(ids: NDArray[np.int64], values: Sequence[int]) -> NDArray[np.int64]:
    """Put values where their ids point; there is none for the ids between."""
    column = np.zeros(int(ids[-1]) + 1 if len(ids) else 1, dtype=np.int64)
    column[ids] = values
    return column


def _ranks(order: Sequence[int]) -> list[int]:
    ranks = [0] * len(order)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def _all_in_order(rows: Sequence[AnyRow]) -> list[int]:
    """Order all commits by their rank, or by date where they have none of one kind."""
    is_ranked = all(row.position is not None for row in rows)

    def key(index: int) -> tuple[int, str]:
        row = rows[index]
        return (row.position if is_ranked else (row.committed_at - EPOCH) // MICROSECOND), row.sha

    return sorted(range(len(rows)), key=key)
