"""The notes of a GitLab merge request, as `dashboard.sticky` asks for comments.

Its projects are named by number or by path, its merge requests by their number in the project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from dashboard.forge_answers import Comment, read_int, read_json, read_str
from dashboard.forge_http import ForgeHttp, usable_token

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_API_URL: Final = "https://gitlab.com/api/v4"


def gitlab_http(token: str, api_url: str = DEFAULT_API_URL) -> ForgeHttp:
    """Return a client for one token, which is never logged."""
    usable_token(token, "GITLAB_TOKEN")
    return ForgeHttp("GitLab", api_url, token, {"PRIVATE-TOKEN": token})


def login(http: ForgeHttp) -> str:
    """Return the account behind the token."""
    return read_str(read_json(http.call("GET", "/user")), "username")


@dataclass(frozen=True, slots=True)
class MergeRequestNotes:
    """The notes of one merge request."""

    http: ForgeHttp
    project: str  # "group/name" or a number
    number: int

    def read(self) -> Iterator[Comment]:
        """Yield every note, oldest first, page after page."""
        for item in self.http.pages(self._path, {"sort": "asc", "order_by": "created_at"}):
            yield self._note(item)

    def create(self, body: str) -> Comment:
        """Write one more."""
        return self._note(read_json(self.http.call("POST", self._path, json={"body": body})))

    def edit(self, comment: Comment, body: str) -> Comment:
        """Change one."""
        path = f"{self._path}/{comment.id}"
        return self._note(read_json(self.http.call("PUT", path, json={"body": body})))

    def delete(self, comment: Comment) -> None:
        """Remove one."""
        self.http.call("DELETE", f"{self._path}/{comment.id}")

    @property
    def _path(self) -> str:
        return f"/projects/{quote(self.project, safe='')}/merge_requests/{self.number}/notes"

    def _note(self, item: object) -> Comment:
        """Read a note; GitLab gives it no address of its own."""
        number = read_int(item, "id")
        url = f"{self.project}!{self.number}#note_{number}"
        return Comment(number, read_str(item, "author", "username"), read_str(item, "body"), url)
