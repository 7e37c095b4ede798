"""Pages in a browser as people set theirs up."""

import re

import pytest

from tests.browsing import CHROMIUM, WIDE, Tab, browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}"),
]

LEGEND_COLOURS = """() => [...document.querySelectorAll("[data-testid=stHtml] [aria-hidden]")]
  .map(mark => getComputedStyle(mark).color)"""
OUTLINES = """() => [...document.querySelectorAll("[role=radio]")]
  .map(one => [one.ariaChecked, getComputedStyle(one).outlineStyle])"""

DAY = re.compile(r"\d{4}-\d\d-\d\d")
TICKS = """() => [...document.querySelectorAll("svg.marks .role-axis-label text")]
  .map(one => one.textContent)"""
SCROLLED = "() => document.querySelector('[data-testid=stMain]').scrollTop > 0"


@pytest.fixture(scope="module")
def chromium():
    with browser() as started:
        yield started


def test_where_a_system_has_few_colours_marks_and_choices_are_still_told_apart(demo_site, chromium):
    tab = Tab(chromium.new_page(viewport=WIDE, forced_colors="active"))
    tab.open(f"{demo_site}/history?axis=log")
    tab.settle()

    # A rule shares the colour of what failed, another that of what was skipped, the band that of ok.
    assert len(set(tab.page.evaluate(LEGEND_COLOURS))) >= 7
    outlines = tab.page.evaluate(OUTLINES)
    assert {style for checked, style in outlines if checked == "true"} == {"solid"}
    assert {style for checked, style in outlines if checked == "false"} == {"none"}
    tab.page.close()
    assert tab.troubles == []


def days_and_values(page):
    """Give the days of the first and the last commit that an axis names, and its values."""
    ticks = page.evaluate(TICKS)
    days = [day for tick in ticks for day in DAY.findall(tick)]
    return days[0], days[-1], sorted(tick for tick in ticks if not DAY.search(tick))


def redrawn(page, is_wanted):
    """Wait until the axes are as wanted and stay so; give their days and values."""
    found = days_and_values(page)
    for _ in range(200):
        before = found
        page.wait_for_timeout(300)
        found = days_and_values(page)
        if found == before and is_wanted(found):
            return found
    raise AssertionError(f"the axes stayed at {found}")


def middle_of(chart):
    box = chart.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_a_history_is_zoomed_moved_and_whole_again(demo_site, chromium):
    tab = Tab(chromium.new_page(viewport=WIDE))
    page, mouse = tab.page, tab.page.mouse
    tab.open(f"{demo_site}/history")
    tab.settle()
    chart = page.locator("svg.marks").first
    chart.wait_for()
    assert page.get_by_text("Shift and the wheel").is_visible()
    whole = days_and_values(page)

    mouse.move(*middle_of(chart))
    mouse.wheel(0, 200)  # the wheel alone moves the page
    page.wait_for_function(SCROLLED)
    assert redrawn(page, lambda _: True) == whole
    mouse.move(*middle_of(chart))
    page.keyboard.down("Shift")
    mouse.wheel(0, -300)
    page.keyboard.up("Shift")
    near = redrawn(page, lambda now: whole[0] < now[0] < now[1] < whole[1])

    x, y = middle_of(chart)
    mouse.move(x, y)
    mouse.down()
    mouse.move(x + 150, y, steps=5)
    mouse.up()
    redrawn(page, lambda now: now[0] <= near[0] and now[1] < near[1])

    mouse.dblclick(x, y)
    # Vega leaves the first commit's name out when it draws an axis again.
    redrawn(page, lambda now: now[1:] == whole[1:])
    page.close()
    assert tab.troubles == []
