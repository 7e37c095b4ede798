"""The one comment of a pull request: found by marker and author, edited where it stands.

Knows no forge: it works on whatever lists, writes and removes comments. Two jobs may do this at
once, and somebody may delete the comment between two of our requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from dashboard.forge_errors import ConnectionFailedError, NotFoundError, ServerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dashboard.forge_answers import Comment


class Comments(Protocol):
    """The comments of one pull request, on any forge."""

    def read(self) -> Iterator[Comment]:
        """Yield them all, oldest first."""

    def create(self, body: str) -> Comment:
        """Write one more."""

    def edit(self, comment: Comment, body: str) -> Comment:
        """Change one; NotFoundError where it is gone."""

    def delete(self, comment: Comment) -> None:
        """Remove one; NotFoundError where it is gone."""


@dataclass(frozen=True, slots=True)
class Upsert:
    """What became of the sticky comment."""

    action: Literal["created", "updated", "unchanged"]
    url: str


@dataclass(frozen=True, slots=True)
class Sticky:
    """Which comment is ours: anybody may paste a marker, so its author counts as well."""

    comments: Comments
    marker: str
    author: str

    def upsert(self, body: str, newer: str = "") -> Upsert:
        """Create the comment, or edit it; an equal body is not sent again.

        Of several the oldest is kept and the others are removed: what a race of two jobs left. One
        that holds `newer` stays as it is: it says what this body is too old to say.
        """
        found = self._ours()
        if newer and (told := [one for one in found if newer in one.body]):
            return Upsert("unchanged", told[0].url)
        if found:
            try:
                return self._keep(found, body)
            except NotFoundError:  # deleted between our reading and our writing
                found = self._ours()
                if found:
                    return self._keep(found, body)
        return self._create(body)

    def _ours(self) -> list[Comment]:
        ours = self.author.lower()
        return [
            comment
            for comment in self.comments.read()
            if self.marker in comment.body and comment.author.lower() == ours
        ]

    def _keep(self, found: list[Comment], body: str) -> Upsert:
        """Edit the oldest, then let go of the others."""
        oldest, *others = sorted(found, key=lambda comment: comment.id)
        done = Upsert("unchanged", oldest.url)
        if _normal(oldest.body) != _normal(body):
            done = Upsert("updated", self.comments.edit(oldest, body).url)
        for other in others:
            self._remove(other)
        return done

    def _create(self, body: str) -> Upsert:
        """Write the comment, then look whether another job did so at the same time.

        Nor does an answer that got lost say that nothing was written.
        """
        lost = None
        created = None
        try:
            created = self.comments.create(body)
        except (ServerError, ConnectionFailedError) as error:
            lost = error
        found = self._ours()
        if not found:
            if lost is not None:
                raise lost
            return Upsert("created", "" if created is None else created.url)
        kept = self._keep(found, body)
        is_kept = created is None or kept.url == created.url
        return Upsert("created", kept.url) if is_kept else kept

    def _remove(self, comment: Comment) -> None:
        try:
            self.comments.delete(comment)
        except NotFoundError:
            return  # the other job was faster


def _normal(body: str) -> str:
    """Return a body as forges keep it: one kind of line end, no blank ends."""
    return body.replace("\r\n", "\n").strip()


__all__ = ["Comments", "Sticky", "Upsert"]
