"""Two hundred uses of the pages in one browser: nothing fails, nothing slows down, memory stays."""

import os
import statistics
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page

from dashboard.theme import FIRST_PAGE, PAGES
from tests.browsing import CHROMIUM, WIDE, Tab, browser, served
from tests.screenshots import recorded

USES = 200
WARM_UP = 30  # uses in which all code was loaded and caches were filled
HEAP = "() => { gc(); return performance.memory.usedJSHeapSize / 2 ** 20; }"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.exhaustive,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}"),
]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """What is recorded, or a database that is named: one of a million results."""
    return os.environ.get("DDTREE_BENCH_WALKED") or recorded(tmp_path_factory.mktemp("walk"))


def uses(page: Page, address: str) -> Iterator[Callable[[], object]]:
    """Yield one use after another: links, filters, points, back, forward, another page."""

    def link(name: str) -> Callable[[], object]:
        shown = page.get_by_test_id("stTopNavLink").filter(has_text=name.capitalize())
        return shown.first.click

    def word(text: str) -> Callable[[], object]:
        return page.get_by_text(text, exact=True).first.click

    def point() -> object:
        points = page.locator("svg.marks [aria-roledescription=point]")
        return points.nth(points.count() // 2).click(force=True)

    def choose(label: str) -> Callable[[], object]:
        def pick() -> None:
            page.get_by_role("combobox", name=label).first.click()
            # The first one is chosen already; the rest of a long list may not be drawn yet.
            page.get_by_role("option").nth(1).click()

        return pick

    def refresh() -> object:
        return page.get_by_role("button", name="Refresh").click()

    yield from (link("history"), word("log"), point, word("last 50"), page.go_back)
    yield from (page.go_forward, word("linear"), link("compare"), choose("Contender"), page.go_back)
    yield from (link("diagnose"), refresh, refresh, link("machines"), refresh)
    yield from (link("alerts"), word("all"), page.go_back, link("incident"), refresh)
    yield from (lambda: page.goto(f"{address}/history?{urlencode({'axis': 'nope'})}"), refresh)
    yield from (link(FIRST_PAGE), refresh)


def note(seconds: list[float], memory: list[tuple[float, float]]) -> dict[str, object]:
    """Say how long the uses took and what memory was held, into a file where one is named."""
    said = {
        "uses": len(seconds),
        "median_s": round(statistics.median(seconds), 2),
        "p95_s": round(statistics.quantiles(seconds, n=20)[-1], 2),
        "slowest_s": round(max(seconds), 2),
        "server_mib": [round(one) for one, _ in memory],
        "heap_mib": [round(one) for _, one in memory],
    }
    with Path(os.environ.get("DDTREE_BENCH_WALK", os.devnull)).open("a") as file:
        file.write(f"{said}\n")
    return said


def test_two_hundred_uses_leave_no_error_and_no_memory_behind(database, tmp_path, record_property):
    with served(database, tmp_path / "server.log") as site, browser() as chromium:
        tab = Tab(chromium.new_page(viewport=WIDE))
        for name in ("", *PAGES):
            tab.open(f"{site.address}/{name}")
            tab.settle()
        tab.open(site.address)
        seconds, memory = [], []
        actions = (action for _ in cycle([0]) for action in uses(tab.page, site.address))
        for place, action in enumerate(islice(actions, USES)):
            seconds.append(tab.act(action))
            tab.settle()
            if place + 1 in {WARM_UP, USES // 2, USES}:
                memory.append((site.memory_mib(), tab.page.evaluate(HEAP)))
                note(seconds, memory)
        troubles = tab.troubles

    said = note(seconds, memory)
    for name, value in said.items():
        record_property(name, value)
    assert troubles == []
    (server_before, heap_before), *_, (server_after, heap_after) = memory
    assert server_after < server_before + 100, said
    assert heap_after < heap_before + 50, said
