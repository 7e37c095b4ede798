"""What a reader meets in a browser: texts of anybody, links of others, files, keys, no mouse."""

import csv
import io
import sqlite3
from contextlib import closing
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from dashboard.data import opened
from dashboard.theme import LOCAL_USER, PAGES
from db.columns import AlertState
from tests import pages_database as demo
from tests.browsing import CHROMIUM, NARROW, STICKS_OUT, WIDE, Tab, browser, served
from tests.test_team import ANNA, said_of

HOSTILE = (
    "<script>window.broken=1</script><img src=x onerror='window.broken=1'> **b** `c` $x^2$ :red[r] "
    "[x](javascript:window.broken=1) ![i](http://elsewhere.example/i) http://elsewhere.example "
    "<a href='http://elsewhere.example'>go</a> \u202eltr \u05d0 😀 " + "y" * 10_000
)
# What a text may not become: something that runs, is fetched, or leads away.
BROKEN = """() => [
  ...(window.broken ? ["a script ran"] : []),
  ...[...document.querySelectorAll("a[href],img[src],script[src]")]
    .filter(one => new URL(one.href || one.src).origin !== location.origin && !one.href?.startsWith("mailto:"))
    .map(one => one.outerHTML),
]"""
SHOWN = "() => document.querySelector('[data-testid=stMain]').innerText"
AXE = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"],
    # Asks for something in it to stop at; the browser itself stops at what scrolls (tested below).
    "rules": {"scrollable-region-focusable": {"enabled": False}},
}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    address = f"sqlite:///{tmp_path_factory.mktemp('reader')}/demo.db"
    demo.build_with_alerts(address)
    return address


@pytest.fixture(scope="module")
def site(url, tmp_path_factory):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(LOCAL_USER, ANNA)
        with served(url, tmp_path_factory.mktemp("server") / "server.log") as server:
            yield server.address


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


@pytest.fixture
def tab(chromium):
    opened_tab = Tab(chromium.new_page(viewport=WIDE, timezone_id="Asia/Tokyo"))
    yield opened_tab
    opened_tab.page.close()
    assert opened_tab.troubles == []


def test_texts_of_anybody_are_shown_as_text(chromium, tmp_path, monkeypatch):
    address = f"sqlite:///{tmp_path}/hostile.db"
    demo.build_with_alerts(address)
    with closing(sqlite3.connect(tmp_path / "hostile.db")) as connection, connection:
        connection.execute("UPDATE commits SET subject = ?", (HOSTILE,))
        connection.execute("UPDATE benchmarks SET name = name || ?", (HOSTILE,))
    with opened(address) as source:
        source.triage(1, AlertState.CONFIRMED, author=ANNA, note=HOSTILE[:10_000])
    monkeypatch.setenv(LOCAL_USER, ANNA)
    names = ("benchmark", "machine", "commit", "base", "head", "alert", "show", "axis", "<b>x")
    links = ("", urlencode(dict.fromkeys(names, HOSTILE[:5_000])))
    with served(address, tmp_path / "server.log") as server:
        page = (tab := Tab(chromium.new_page(viewport=WIDE))).page
        page.on("dialog", lambda _: tab.troubles.append("a dialog"))
        for name, query in ((name, query) for query in links for name in ("", *PAGES)):
            tab.open(f"{server.address}/{name}?{query}")
            tab.settle()
            unfold(tab)

            assert page.evaluate(BROKEN) == []
            assert page.evaluate(STICKS_OUT) <= 0
            assert name in ("machines", "incident") or "<script>" in page.evaluate(SHOWN)
            assert (
                not query or name in ("", "overview") or page.get_by_text("From the link").count()
            )
        tab.open(f"{server.address}/alerts?alert=1")
        expect(page.get_by_test_id("stText").filter(has_text="</script>")).to_be_visible()
        tab.open(f"{server.address}/history")
        page.locator("svg.marks [aria-roledescription=point]").first.hover()
        expect(page.locator("#vg-tooltip-element")).to_contain_text("<script>")
        assert page.evaluate(BROKEN) == []
        page.close()
    assert tab.troubles == []


@pytest.mark.parametrize(
    ("page", "query"),
    [
        ("history", {"benchmark": "generation.Generation.track_rate", "commits": "last 50"}),
        ("compare", {"machine": demo.HISTORY_MACHINE, "base": demo.sha(3), "head": demo.sha(50)}),
        ("diagnose", {"machine": demo.INCIDENT}),
        ("machines", {"machine": demo.REPRODUCTION}),
        ("alerts", {"show": "all", "alert": "1"}),
        ("incident", {"machine": demo.INCIDENT}),
    ],
)
def test_a_link_shows_anybody_what_its_sender_saw_and_survives_reload(
    site, tab, chromium, page, query
):
    def seen(by):
        by.settle()
        assert by.page.get_by_text("From the link").count() == 0
        assert (
            parse_qs(urlsplit(by.page.url).query).items()
            >= {name: [value] for name, value in query.items()}.items()
        )
        _, _, shown = by.page.evaluate(SHOWN).partition("Refresh")  # the data's age stands above
        return shown

    tab.open(f"{site}/{page}?{urlencode(query)}")
    first = seen(tab)
    tab.page.reload()
    again = seen(tab)
    other = Tab(chromium.new_page(viewport=WIDE, timezone_id="Asia/Tokyo"))
    other.open(tab.page.url)

    assert len(first) > 100
    assert first == again == seen(other)
    other.page.close()
    assert other.troubles == []


def test_times_are_those_of_the_readers_zone(site, tab):
    tab.open(f"{site}/alerts")
    tab.settle()
    expect(tab.page.get_by_text("2026-03-20 09:00 JST").first).to_be_visible()
    unfold(tab)
    assert "2026-03-20 09:00:00+09:00" in tables(tab.page, 1)[0]

    tab.open(f"{site}/machines?machine={demo.REPRODUCTION}")
    tab.settle()
    unfold(tab)
    shown = tables(tab.page, 3)
    assert "+09:00" in shown[0]
    assert all("+00:00" not in one for one in shown)


def unfold(tab):
    """Open all that is folded: each runs its own part of the page."""
    for fold in tab.page.locator("[data-testid=stExpander] summary").all():
        tab.act(fold.click)
    tab.settle()


def tables(page, count):
    """Give the texts of the tables as a screen reader has them."""
    found = page.locator("[data-testid=stDataFrame] canvas table")
    expect(found).to_have_count(count)
    return found.all_text_contents()


def test_a_chart_and_its_numbers_are_files(site, tab):
    tab.open(f"{site}/history?benchmark=step.Step.time_step&p.page_size=16")
    tab.settle()
    tab.page.get_by_test_id("stPopover").first.get_by_role("button").click()
    files = {}
    for kind in ("CSV", "SVG", "PNG"):
        with tab.page.expect_download() as waiting:
            tab.page.get_by_role("button", name=kind, exact=True).click()
        assert waiting.value.suggested_filename.endswith(f".{kind.lower()}")
        files[kind] = waiting.value.path().read_bytes()

    rows = list(csv.DictReader(io.StringIO(files["CSV"].decode())))
    assert len(rows) == demo.NUM_COMMITS
    assert files["SVG"].startswith(b"<svg")
    assert files["SVG"].count(b'aria-roledescription="point"') == demo.NUM_COMMITS
    assert files["PNG"].startswith(b"\x89PNG\r\n")
    assert len(files["PNG"]) > 10_000


def test_an_alert_is_judged_by_the_keyboard_alone(site, tab, url):
    tab.open(f"{site}/alerts?alert=2")
    tab.settle()
    press = tab.page.keyboard.press
    for _ in range(60):
        press("Tab")
        if tab.page.evaluate("() => document.activeElement.type") == "radio":
            break
    press("ArrowRight")
    press("Tab")
    tab.page.keyboard.type("no mouse at hand")
    press("Control+Enter")

    expect(tab.page.get_by_text("Taken down.")).to_be_visible()
    assert said_of(url, 2)[-1] == ("acknowledged", ANNA, "no mouse at hand")


def test_a_long_query_says_that_it_is_at_work(chromium, tmp_path):
    address = f"sqlite:///{tmp_path}/slow.db"
    demo.build(address)
    with closing(sqlite3.connect(tmp_path / "slow.db")) as connection, connection:
        connection.executescript(
            "ALTER TABLE machines RENAME TO quick;"
            "CREATE VIEW machines AS SELECT quick.* FROM quick, (WITH RECURSIVE up(n) AS "
            "(SELECT 1 UNION ALL SELECT n + 1 FROM up WHERE n < 9000000) SELECT max(n) FROM up);"
        )
    with served(address, tmp_path / "server.log") as server:
        tab = Tab(chromium.new_page(viewport=WIDE))
        tab.page.goto(f"{server.address}/machines")
        expect(tab.page.get_by_text("Reading the database")).to_be_visible()
        tab.settle()
        expect(tab.page.get_by_text("Reading the database")).to_have_count(0)
        expect(tab.page.get_by_role("combobox", name="Machine")).to_be_visible()
        tab.page.close()
    assert tab.troubles == []


def test_a_table_wider_than_its_window_is_scrolled_by_the_keyboard(site, tab):
    tab.page.set_viewport_size(NARROW)
    tab.open(f"{site}/machines?machine={demo.REPRODUCTION}")
    tab.settle()
    press = tab.page.keyboard.press
    for _ in range(60):
        press("Tab")
        if (
            tab.page.evaluate("() => document.activeElement.dataset.testid")
            == "stMarkdownContainer"
        ):
            break
    press("ArrowRight")

    tab.page.wait_for_function("() => document.activeElement.scrollLeft > 0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_axe_finds_nothing(chromium, site, scheme, size):
    tab = Tab(chromium.new_page(viewport=size, color_scheme=scheme))
    found = {}
    for name in ("", *PAGES):
        tab.open(f"{site}/{name}")
        tab.settle()
        unfold(tab)
        for one in Axe().run(tab.page, options=AXE).response["violations"]:
            found[name, one["id"]] = [node["html"][:200] for node in one["nodes"]]
    tab.page.close()
    assert found == {}
    assert tab.troubles == []
