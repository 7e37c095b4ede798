"""The pages in a real browser: they are drawn without errors, follow links and keep their URL."""

# ruff: noqa: RUF001 - factors are asserted as they are printed

import socket
import time
from http.client import HTTPConnection
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from dashboard.theme import FIRST_PAGE, PAGES
from tests import pages_database as demo
from tests.browsing import CHROMIUM, NARROW, STICKS_OUT, WIDE, Tab, browser, served, settle

# Text whose contrast is below that of WCAG 2.1 AA, with the contrast it has.
TOO_PALE = """() => {
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = rgb => rgb.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const over = (top, bottom, alpha) => top.map((v, i) => v * alpha + bottom[i] * (1 - alpha));
  const ground = element => {
    if (!element) return [255, 255, 255];
    const [r, g, b, alpha = 1] = numbers(getComputedStyle(element).backgroundColor);
    return alpha === 0 ? ground(element.parentElement)
      : over([r, g, b], alpha === 1 ? [0, 0, 0] : ground(element.parentElement), alpha);
  };
  const pale = [];
  for (const element of document.querySelectorAll("h1,h2,h3,p,li,code,label,a,strong,td,th,span")) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("svg,[aria-hidden=true],[data-testid=stIconMaterial]"))
      continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    let [r, g, b, alpha = 1] = numbers(style.color);
    for (let e = element; e; e = e.parentElement) alpha *= parseFloat(getComputedStyle(e).opacity);
    const bottom = ground(element), found = [light(over([r, g, b], bottom, alpha)), light(bottom)];
    const contrast = (Math.max(...found) + 0.05) / (Math.min(...found) + 0.05);
    const isLarge = size >= 24 || (size >= 18.6 && parseInt(style.fontWeight) >= 700);
    if (contrast < (isLarge ? 3 : 4.5)) pale.push(`${contrast.toFixed(2)} ${element.innerText}`);
  }
  return pale;
}"""

# How many lines the text of each element takes.
NUM_LINES = """elements => elements.map(element => {
  const text = document.createRange();
  text.selectNodeContents(element);
  return new Set([...text.getClientRects()].map(line => line.top)).size;
})"""

# The height of the gap between each filter and the next, top to bottom; all are read at one time.
GAPS = """() => {
  const below = document.querySelector(".st-key-answer").getBoundingClientRect().top;
  const filters = [...document.querySelectorAll("[data-testid=stColumn] [data-testid=stElementContainer]")]
    .map(one => one.getBoundingClientRect()).filter(box => box.top < below);
  return filters.slice(1).map((low, place) => low.top - filters[place].bottom);
}"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}"),
]


@pytest.fixture(scope="module")
def window():
    """One window for all tabs: a reader's browser has the pages' code from the first page on."""
    with browser() as chromium:
        context = chromium.new_context(viewport=WIDE)
        yield context
        context.close()


@pytest.fixture
def tab(window):
    """A fresh tab that fails the test on any error on its console or a request to another host."""
    opened = Tab(window.new_page())
    yield opened.page
    opened.page.close()
    assert opened.troubles == []


def visit(tab: Page, address: str) -> None:
    tab.goto(address)
    settle(tab)


def query(tab: Page) -> dict[str, list[str]]:
    return parse_qs(urlsplit(tab.url).query)


def charts(tab: Page):
    return tab.locator("[data-testid=stVegaLiteChart] svg.marks")


def test_no_small_answer_waits_for_the_browser_to_confirm_the_one_before(demo_site):
    server = HTTPConnection(urlsplit(demo_site).netloc)
    server.connect()
    times = []
    for _ in range(41):
        # A confirmation comes late, as after the first few of a long connection.
        server.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        began = time.perf_counter()
        server.request("GET", "/_stcore/health")
        server.getresponse().read()
        times.append(time.perf_counter() - began)
    server.close()

    # A busy machine makes some of them wait; all of them would, were it for the confirmation.
    assert min(times) < 0.03, "each waits 40 ms where the sockets do not send at once"


def test_a_finding_leads_to_its_own_history(demo_site, tab):
    visit(tab, demo_site)

    tab.get_by_role("link", name="History").nth(1).click()

    expect(tab.locator("h1")).to_have_text("History")
    expect(tab.get_by_text("60 results on 60 commits")).to_be_visible()
    assert query(tab)["p.page_size"] == ["16"]
    expect(charts(tab)).to_have_count(1)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("", f"All {demo.NUM_COMMITS + 1}, as a table to sort, search and keep"),
        pytest.param("diagnose", "Cases as a table", marks=pytest.mark.exhaustive),
        pytest.param("incident", "As a table", marks=pytest.mark.exhaustive),
    ],
)
def test_a_page_loads_the_code_of_tables_once_one_is_opened(demo_site, tab, name, label):
    files = []
    tab.on("request", lambda request: files.append(urlsplit(request.url).path))
    visit(tab, f"{demo_site}/{name}")
    fold = tab.get_by_text(label, exact=True).first
    expect(fold).to_be_visible()
    tab.wait_for_load_state("networkidle")
    assert len(files) > 10
    assert not [file for file in files if "DataFrame" in file]

    fold.click()

    expect(tab.locator("[data-testid=stDataFrame]")).to_be_visible()
    assert [file for file in files if "DataFrame" in file]


def test_a_narrow_window_breaks_no_head_and_has_no_gap_for_an_empty_column(demo_site, tab):
    tab.set_viewport_size(NARROW)
    visit(tab, demo_site)
    heads = tab.locator("[data-testid=stMarkdownContainer] th")
    assert set(heads.evaluate_all(NUM_LINES)) == {1}

    visit(tab, f"{demo_site}/history")

    gaps = tab.evaluate(GAPS)
    assert len(gaps) > 5
    assert max(gaps) == pytest.approx(min(gaps), abs=1)


def test_a_newcomer_reaches_commit_and_diagnosis_in_three_clicks(demo_site, tab):
    visit(tab, demo_site)
    commit = demo.sha(demo.STEP_AT)
    expect(tab.get_by_text(commit[:10]).first).to_be_visible()

    tab.get_by_role("link", name="All that moved at this commit").first.click()

    expect(tab.locator("h1")).to_have_text("Compare")
    expect(tab.get_by_text("Regressed: 2 regressions")).to_be_visible()
    assert query(tab)["head"] == [commit]
    tab.go_back()
    expect(tab.locator("h1")).to_have_text("Overview")
    settle(tab)
    tab.get_by_role("link", name="Why it is slow").first.click()

    expect(tab.locator("h1")).to_have_text("Diagnose")
    assert query(tab)["commit"] == [commit]
    expect(tab.get_by_text("What changed at this commit")).to_be_visible()
    expect(tab.get_by_text("+9.0 %").first).to_be_visible()
    expect(tab.get_by_text("cause code").first).to_be_visible()


def test_a_link_shows_what_its_sender_saw(demo_site, tab):
    visit(tab, f"{demo_site}/history?benchmark=step.Step.time_step&p.page_size=1")
    expect(charts(tab)).to_have_count(1)

    tab.get_by_text("log", exact=True).click()
    tab.wait_for_url("**axis=log**")
    copied = tab.url
    visit(tab, copied)

    assert query(tab)["axis"] == ["log"]
    assert query(tab)["p.page_size"] == ["1"]
    expect(charts(tab)).to_have_count(1)


def test_the_back_button_returns_to_the_last_view(demo_site, tab):
    visit(tab, f"{demo_site}/history?benchmark=step.Step.time_step&p.page_size=1")
    tab.get_by_text("log", exact=True).click()
    tab.wait_for_url("**axis=log**")

    tab.go_back()

    expect(tab.get_by_role("radio", name="linear")).to_be_checked()
    settle(tab)
    assert "axis" not in query(tab)


def test_a_wrong_link_is_told_and_put_right(demo_site, tab):
    visit(tab, f"{demo_site}/history?benchmark=nope&machine=nowhere")

    expect(tab.get_by_text("there is no benchmark “nope” here")).to_be_visible()
    tab.wait_for_url("**benchmark=step.Step.time_step**")
    expect(charts(tab)).to_have_count(2)


def test_charts_are_drawn_with_their_titles_in_light_and_dark(demo_site, tab):
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        visit(tab, f"{demo_site}/history?benchmark=step.Step.time_step&p.page_size=1")
        chart = charts(tab).first
        expect(chart).to_be_visible()
        assert chart.bounding_box()["width"] > 800
        points = chart.locator("[aria-roledescription=point]")
        expect(points).to_have_count(demo.NUM_COMMITS)  # the failed one is drawn as well
        expect(chart.get_by_text("time (ms) · lower is better").first).to_be_visible()
        expect(chart.get_by_text("▲ +8.9 %").first).to_be_visible()


def test_hovering_a_point_names_its_commit(demo_site, tab):
    visit(tab, f"{demo_site}/history?benchmark=step.Step.time_step&p.page_size=1")
    tab.locator("[data-testid=stVegaLiteChart] [aria-roledescription=point]").nth(10).hover()

    tooltip = tab.locator("#vg-tooltip-element")
    expect(tooltip).to_be_visible()
    text = tooltip.inner_text()
    for word in ("commit", "subject", "time (ms)", "samples", "environment"):
        assert word in text


def test_a_click_on_a_point_shows_it_and_is_part_of_the_link(demo_site, tab):
    visit(tab, f"{demo_site}/history?benchmark=step.Step.time_step&p.page_size=1")
    tab.locator("[data-testid=stVegaLiteChart] [aria-roledescription=point]").nth(10).click()

    tab.wait_for_url("**commit=**")
    commit = query(tab)["commit"][0]
    expect(tab.get_by_text(commit, exact=True).first).to_be_visible()
    expect(tab.locator("[data-testid=stCode]")).to_contain_text(commit)


# One walk takes every other page light and wide, the rest dark and narrow; the other walk turns it.
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_page_has_an_address_and_can_be_read_by_anybody(demo_site, tab, turn):
    for place, name in enumerate((FIRST_PAGE, *PAGES)):
        is_wide = (place + turn) % 2 == 0
        tab.emulate_media(color_scheme="light" if is_wide else "dark")
        tab.set_viewport_size(WIDE if is_wide else NARROW)
        visit(tab, f"{demo_site}/{name}")

        expect(tab.locator("h1")).to_have_text(name.capitalize())
        assert urlsplit(tab.url).path.strip("/") == ("" if name == FIRST_PAGE else name)
        assert nameless(tab) == []
        assert lasting(tab, TOO_PALE) == []
        # What Tab reaches is in the order of the page, and nothing sticks out of it sideways.
        expect(tab.locator("[tabindex]:not([tabindex='0']):not([tabindex='-1'])")).to_have_count(0)
        assert tab.evaluate(STICKS_OUT) <= 0
    expect(tab.locator("[data-testid=stMetricValue]", has_text="128×")).to_be_visible()
    expect(tab.get_by_text("Reproduced on NVIDIA H200")).to_be_visible()
    expect(charts(tab)).to_have_count(5)


def lasting(tab: Page, script: str) -> list[str]:
    """Give what a script still finds when nothing is being redrawn: what is old is pale till then."""
    for _ in range(20):
        if not (found := tab.evaluate(script)):
            break
        tab.wait_for_timeout(500)
    return found


def nameless(tab: Page) -> list[str]:
    """Give what a reader can use, but not a screen reader: the browser knows no name for it."""
    nodes = tab.context.new_cdp_session(tab).send("Accessibility.getFullAXTree")["nodes"]
    return [
        node["role"]["value"]
        for node in nodes
        if not node["ignored"]
        and node["role"]["value"] in {"button", "link", "combobox", "textbox", "radio"}
        and not node.get("name", {}).get("value")
    ]


def test_a_missing_database_is_explained(tab, tmp_path):
    with served(f"sqlite:///{tmp_path}/missing.db", tmp_path / "server.log") as server:
        visit(tab, server.address)

        expect(tab.get_by_text("Nothing to show yet")).to_be_visible()
        expect(tab.get_by_text("found none")).to_be_visible()
