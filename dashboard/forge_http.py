"""Requests to a forge: sent, repeated where that is harmless, followed from page to page.

Knows no endpoint and no Markdown. Its errors are those of `dashboard.forge_errors`.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final, Self

import httpx

from dashboard.forge_answers import read_items
from dashboard.forge_errors import (
    AnswerError,
    AuthenticationError,
    ConnectionFailedError,
    ForgeInputError,
    RateLimitError,
    ServerError,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

TIMEOUT_S: Final = 20.0
BACKOFF_S: Final = (1.0, 4.0)  # waits between attempts; one attempt more than waits
LONGEST_WAIT_S: Final = 120.0  # for a limit; a forge that asks for longer is not waited for
REPEATABLE: Final = frozenset({"GET", "PATCH", "PUT", "DELETE"})  # a second POST is a second thing
PER_PAGE: Final = 100  # the largest page

_TOKEN = re.compile(r"[\x21-\x7e]+")


class ForgeHttp:
    """A client for one forge, one token and one address.

    Parameters
    ----------
    forge : what messages call it.
    headers : sent with every request; one of them carries `token`, which is never logged.
    sleep : how to wait between attempts.
    timeout_s : how long one request may take without a byte.
    """

    def __init__(
        self,
        forge: str,
        api_url: str,
        token: str,
        headers: Mapping[str, str],
        *,
        sleep: Callable[[float], None] = time.sleep,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._forge = forge
        self._token = token
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._client = httpx.Client(
            base_url=_api_base(api_url),
            headers={"User-Agent": "ddtree-bench", **headers},
            timeout=timeout_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def pages(self, path: str, params: Mapping[str, str | int]) -> Iterator[object]:
        """Yield the entries of a list, page after page."""
        response = self.call("GET", path, params={**params, "per_page": PER_PAGE})
        seen = {str(response.url)}
        while True:
            yield from read_items(response)
            link = response.links.get("next", {}).get("url")
            if link is None:
                return
            url = self._next_page(response, link)
            if url in seen:
                raise AnswerError(f"next page: expected a new address, got {url} again")
            seen.add(url)
            response = self.call("GET", url)

    def call(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, str | int] | None = None,
        json: Mapping[str, object] | None = None,
    ) -> httpx.Response:
        """Send one request, again where that is harmless.

        After a 5xx or a lost connection nobody knows whether it was done, so only what may be done
        twice is repeated; a limit says that nothing was done, and is waited for.
        """
        request = self._client.build_request(method, url, params=params, json=json)
        for wait_s in BACKOFF_S:
            try:
                return self._send(request)
            except (ServerError, ConnectionFailedError):
                if method not in REPEATABLE:
                    raise
                self._sleep(wait_s)
            except RateLimitError as error:
                if error.wait_s is None or error.wait_s > LONGEST_WAIT_S:
                    raise
                self._sleep(error.wait_s)
        return self._send(request)

    def _next_page(self, response: httpx.Response, link: str) -> str:
        """Return the absolute next address, refusing to carry the token to another host."""
        url = response.url.join(link)
        home = self._client.base_url
        if (url.scheme, url.host, url.port) != (home.scheme, home.host, home.port):
            raise AnswerError(f"next page: expected an address on {home.host}, got {url.host}")
        return str(url)

    def _send(self, request: httpx.Request) -> httpx.Response:
        where = f"{request.method} {request.url.path}"
        try:
            response = self._client.send(request)
        except httpx.TimeoutException as error:
            raise ConnectionFailedError(
                f"{where}: no answer from {request.url.host} within {self._timeout_s:g} s"
            ) from error
        except httpx.HTTPError as error:
            raise ConnectionFailedError(
                f"{where}: no connection to {request.url.host} ({type(error).__name__})"
            ) from error
        if not response.is_success:
            raise refusal(self._forge, where, response, self._token)
        return response


def usable_token(token: str, name: str) -> str:
    """Return a token that a header can carry; `name` is the variable it came from.

    Raises
    ------
    AuthenticationError
        It is empty or holds spaces, line ends or other letters than ASCII.
    """
    if not _TOKEN.fullmatch(token):
        raise AuthenticationError(
            f"{name}: expected printable characters without spaces, got "
            f"{len(token)} characters (its value is not shown)"
        )
    return token


def _api_base(api_url: str) -> str:
    try:
        url = httpx.URL(api_url)
    except httpx.InvalidURL as error:
        raise ForgeInputError(f"API address: expected http(s)://host, got {api_url!r}") from error
    if url.scheme not in {"http", "https"} or not url.host or url.userinfo:
        raise ForgeInputError(f"API address: expected http(s)://host, got {api_url!r}")
    return api_url
