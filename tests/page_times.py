"""How long each page takes: `python -m tests.page_times DATABASE.db [--times 3] [PAGE...]`.

Every page has a server of its own. `first` is its first run in that process, which the pages' code
was imported into before; `cold` are runs of which nothing is cached, because somebody wrote in
between (into a copy of the database); `again` finds all of it. Their seconds are those until the
server has sent the last of the page, and of its processor's time. Then a browser opens the page, as
cold, until its first useful content is seen, until its first chart is drawn, and until it is whole;
and uses it. The first useful content is what answers the reader: text where a page has some.
"""

import argparse
import datetime as dt
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import click
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from streamlit.proto.BackMsg_pb2 import BackMsg
from websockets.sync.client import connect

from dashboard.theme import FIRST_PAGE, PAGES
from db.models import Revision
from tests.browsing import WIDE, Tab, browser, has_ended, served

# What a reader came for, and a use of the page: what is clicked.
USEFUL = {
    "overview": "[data-testid=stAlert]",
    "history": ".st-key-answer p, .st-key-answer li",
    "compare": ".st-key-answer td, .st-key-answer [data-testid=stAlert]",
    "diagnose": "svg.marks, [data-testid=stAlert]",
    "machines": "[data-testid=stMarkdownContainer] td",
    "alerts": "[data-testid=stMarkdownContainer] td",
    "incident": "[data-testid=stMetric], [data-testid=stAlert]",
}
USES = {"history": "log", "alerts": "all"}
# Pages whose charts come after what answers the reader.
CHARTED = {"history"}
COLUMNS = "{:10}" + " {:>14}" * 3 + " {:>17}" * 4


def write(database):
    """Leave nothing of the database cached: a page reads anew what was written to."""
    engine = create_engine(f"sqlite:///{database}")
    with Session(engine) as session, session.begin():
        session.add(Revision(kind="ingest", created_at=dt.datetime.now(dt.UTC), summary={}))
    engine.dispose()


def run_page(site, name):
    """Give the seconds and the processor's seconds in which the server makes a page."""
    asked = BackMsg()
    asked.rerun_script.page_name = "" if name == FIRST_PAGE else name
    address = f"{site.address.replace('http', 'ws', 1)}/_stcore/stream"
    with connect(address, subprotocols=["streamlit"], max_size=None) as server:
        began, cpu_s = time.perf_counter(), site.cpu_s()
        server.send(asked.SerializeToString())
        while not has_ended(server.recv(timeout=120)):
            pass
        return time.perf_counter() - began, site.cpu_s() - cpu_s


def use(tab, name):
    """Use a page: choose in a filter where it has one of a few choices, else read it anew."""
    if word := USES.get(name):
        return tab.act(tab.page.get_by_text(word, exact=True).first.click)
    return tab.act(tab.page.get_by_role("button", name="Refresh").click)


def measure(database, name, times, chromium, folder):
    """Give the columns of one page."""
    with served(f"sqlite:///{database}", folder / "server.log") as site:
        first = run_page(site, name)
        cold = []
        for _ in range(times):
            write(database)
            cold.append(run_page(site, name))
        again = run_page(site, name)
        seen, whole, drawn, used = [], [], [], []
        for _ in range(times):
            write(database)
            tab = Tab(chromium.new_page(viewport=WIDE))
            began = time.perf_counter()
            where = "" if name == FIRST_PAGE else name
            seen.append(tab.open(f"{site.address}/{where}", USEFUL[name]))
            if name in CHARTED:
                tab.page.locator("svg.marks").first.wait_for()
                drawn.append(time.perf_counter() - began)
            tab.settle()
            whole.append(time.perf_counter() - began)
            tab.page.wait_for_timeout(1000)
            used.append(use(tab, name))
            tab.page.close()
            assert tab.troubles == [], tab.troubles
    median = [statistics.median(column) for column in zip(*cold, strict=True)]
    return (first, median, again), [spread(one) for one in (seen, drawn, whole, used)]


def spread(times_s):
    """Write the median and the range of times."""
    if not times_s:
        return "-"
    return f"{statistics.median(times_s):.2f} [{min(times_s):.2f} {max(times_s):.2f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", type=Path)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="all of them unless named")
    parser.add_argument("--times", type=int, default=3, help="runs of which the median is told")
    told = parser.parse_args()
    click.echo("Seconds; of the server: until the page is sent (of its processor)")
    click.echo(
        COLUMNS.format("page", "first", "cold", "again", "useful", "drawn", "whole", "a use")
    )
    with tempfile.TemporaryDirectory() as kept, browser() as chromium:
        copy = Path(kept) / "copy.db"
        shutil.copy(told.database, copy)
        for name in told.pages or (FIRST_PAGE, *PAGES):
            runs, rest = measure(copy, name, told.times, chromium, Path(kept))
            times = [f"{wall_s:.2f} ({cpu_s:.2f})" for wall_s, cpu_s in runs]
            click.echo(COLUMNS.format(name, *times, *rest))


if __name__ == "__main__":
    main()
