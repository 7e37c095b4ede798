"""The browser's face: pages, their order, and what is said when there is no database to show.

Run it with `ddtree-bench dashboard`; the database's URL is taken from DDTREE_BENCH_DB.
"""

import os
from collections.abc import Callable
from functools import partial

import streamlit as st

from dashboard import (
    alerts_page,
    compare_page,
    diagnose_page,
    freshness,
    history_page,
    incident_page,
    machines_page,
    overview_page,
)
from dashboard.data import Source, opened
from dashboard.theme import FIRST_PAGE, PAGE_ICON, PAGE_STYLE
from dashboard.words import escaped
from db.errors import DamagedDatabaseError, DbError
from db.session import DEFAULT_URL


def main() -> None:
    """Show the page that the URL names."""
    st.set_page_config(page_title="ddtree-bench", page_icon=PAGE_ICON, layout="wide")
    st.html(f"<style>{PAGE_STYLE}</style>")
    history = st.Page(
        _page(history_page.render), title="History", icon=":material/timeline:", url_path="history"
    )
    incident = st.Page(
        _page(incident_page.render),
        title="Incident",
        icon=":material/troubleshoot:",
        url_path="incident",
    )
    compare = st.Page(
        _page(compare_page.render), title="Compare", icon=":material/compare:", url_path="compare"
    )
    alerts = st.Page(
        _page(partial(alerts_page.render, history_page=history)),
        title="Alerts",
        icon=":material/notifications:",
        url_path="alerts",
    )
    diagnosed = st.Page(
        _page(diagnose_page.render),
        title="Diagnose",
        icon=":material/stethoscope:",
        url_path="diagnose",
    )
    machines = st.Page(
        _page(machines_page.render), title="Machines", icon=":material/dns:", url_path="machines"
    )
    pages = overview_page.Pages(history, compare, diagnosed, machines)
    overview = st.Page(
        _page(partial(overview_page.render, pages=pages)),
        title="Overview",
        icon=":material/dashboard:",
        url_path=FIRST_PAGE,
        default=True,
    )
    st.navigation(
        [overview, history, compare, diagnosed, machines, alerts, incident], position="top"
    ).run()


def _page(render: Callable[[Source], None]) -> Callable[[], None]:
    """Give a page its database, or the reader the reason why there is none."""

    def show() -> None:
        try:
            with opened(os.environ.get("DDTREE_BENCH_DB", DEFAULT_URL)) as source:
                freshness.line(source.newest_change())
                render(source)
        except DbError as error:
            _explain(error)

    return show


def _explain(error: DbError) -> None:
    if isinstance(error, DamagedDatabaseError):
        st.error(escaped(str(error)), icon=":material/database_off:")
        return
    st.title("Nothing to show yet")
    st.error(escaped(str(error)), icon=":material/database_off:")
    st.markdown(
        "`make bench` measures this machine, stores the results and prints verdicts. "
        "To show results that exist already:"
    )
    st.code("ddtree-bench db upgrade\nddtree-bench ingest PATH\nddtree-bench detect", "shell")


main()
