"""Whoever signs in comes back to where they did, and never to another host."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import RedirectResponse
from starlette.routing import Route

from dashboard.returning import COOKIE, Returning

HERE = "https://bench.example.org"


def client(root):
    """A browser before the two requests of signing in, as Streamlit answers them."""

    async def login(_):
        return RedirectResponse("https://id.example.org/authorize", 302)

    async def callback(_):
        return RedirectResponse(root, 302)

    routes = [Route(f"{root}auth/login", login), Route(f"{root}oauth2callback", callback)]
    app = Starlette(routes=routes, middleware=[Middleware(Returning, root=root)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HERE)


async def _sent_back(root, referer):
    async with client(root) as browser:
        await browser.get(f"{root}auth/login", headers={"Referer": referer} if referer else {})
        back = await browser.get(f"{root}oauth2callback")
        assert COOKIE not in browser.cookies
        return back.headers["location"]


@pytest.fixture
def sent_back():
    return lambda root, referer: asyncio.run(_sent_back(root, referer))


@pytest.mark.parametrize("root", ["/", "/bench/"])
def test_the_page_and_its_query_are_kept_until_one_is_back(sent_back, root):
    page = f"{root}alerts?alert=7&owner=commit+a%26b&owner=%F0%9F%98%80"

    assert sent_back(root, f"{HERE}{page}") == page
    assert sent_back(root, f"{HERE}{root}history") == f"{root}history"


@pytest.mark.parametrize(
    "referer",
    [
        None,
        HERE,
        f"{HERE}/",
        f"{HERE}/nowhere",
        f"{HERE}//elsewhere.example/alerts",
        "javascript:alert(1)",
        "https://[::1",
        f"{HERE}/alerts?note={'y' * 5_000}",
    ],
)
def test_from_anywhere_else_one_comes_to_the_first_page(sent_back, referer):
    assert sent_back("/", referer) == "/"


@pytest.mark.parametrize(
    "told",
    ["https%3A//elsewhere.example/", "//elsewhere.example/", "%2Falerts%0d%0aX-Bad%3A%201", "%"],
)
def test_a_cookie_of_somebody_elses_making_leads_nowhere(told):
    async def asked():
        async with client("/") as browser:
            cookies = {"Cookie": f"{COOKIE}={told}"}
            return (await browser.get("/oauth2callback", headers=cookies)).headers["location"]

    assert asyncio.run(asked()) == "/"


def test_another_site_of_the_same_path_is_not_gone_to(sent_back):
    assert sent_back("/", "https://elsewhere.example/alerts?alert=1") == "/alerts?alert=1"
