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
from dashboard.theme import FIRST_PAGE, PAGE_ICON
from dashboard.words import escaped
from db.errors import DamagedDatabaseError, DbError, SchemaError
from db.session import DEFAULT_URL


def main() -> None:
    """Show the page that the URL names."""
    st.set_page_config(page_title="ddtree-bench", page_icon=PAGE_ICON, layout="wide")
    history = _page("history", "timeline", history_page.render)
    compare = _page("compare", "compare", compare_page.render)
    diagnosed = _page("diagnose", "stethoscope", diagnose_page.render)
    machines = _page("machines", "dns", machines_page.render)
    alerts = _page("alerts", "notifications", partial(alerts_page.render, history_page=history))
    incident = _page("incident", "troubleshoot", incident_page.render)
    pages = overview_page.Pages(history, compare, diagnosed, machines)
    overview = _page(FIRST_PAGE, "dashboard", partial(overview_page.render, pages=pages))
    st.navigation(
        [overview, history, compare, diagnosed, machines, alerts, incident], position="top"
    ).run()


def _page(name: str, icon: str, render: Callable[[Source], None]) -> st.Page:
    """Make a page that has the database, or tells its reader why there is none."""

    def show() -> None:
        try:
            with opened(os.environ.get("DDTREE_BENCH_DB", DEFAULT_URL)) as source:
                freshness.line(source.newest_change())
                render(source)
        except DbError as error:
            _explain(error)

    return st.Page(
        show,
        title=name.capitalize(),
        icon=f":material/{icon}:",
        url_path=name,
        default=name == FIRST_PAGE,
    )


def _explain(error: DbError) -> None:
    if isinstance(error, DamagedDatabaseError):
        st.error(escaped(str(error)), icon=":material/database_off:")
        return
    is_stored = isinstance(error, SchemaError)
    st.title("Nothing can be read" if is_stored else "Nothing to show yet")
    st.error(escaped(str(error)), icon=":material/database_off:")
    freshness.button("refresh.again")
    if is_stored:
        return
    st.markdown(
        "`make bench` measures this machine, stores the results and prints verdicts. "
        "To show results that exist already:"
    )
    st.code("ddtree-bench db upgrade\nddtree-bench ingest PATH\nddtree-bench detect", "shell")


main()
