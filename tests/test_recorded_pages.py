"""Every page on all that is recorded; what its histories draw is what the tables hold."""

import sqlite3
from contextlib import closing

import pandas as pd
import pytest
from streamlit.dataframe_util import convert_arrow_bytes_to_pandas_df as frame_of

from dashboard.data import opened as opened_database
from dashboard.selection import link_query
from dashboard.theme import FIRST_PAGE, PAGES
from tests.screenshots import recorded
from tests.test_pages import opened

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

EVERY = 41  # one of so many series is looked at
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
RESULTS = "SELECT id AS result_id, value, q25, q75 FROM results WHERE series_id = ?"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize("name", [FIRST_PAGE, *PAGES])
def test_a_page_shows_all_that_is_recorded(url, name):
    # What a comparison draws is open where a link narrows its cases.
    app = opened(name, url, **({"verdict": "inconclusive"} if name == "compare" else {}))

    assert not app.exception
    assert name in {"machines", "alerts"} or app.get("vega_lite_chart")
    assert app.markdown or app.dataframe


def test_a_history_draws_what_the_tables_hold(url):
    with opened_database(url) as source:
        rows = source.series().iloc[::EVERY].to_dict("records")
    assert len(rows) > 10
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as tables:
        for row in rows:
            query = {name.replace(".", "__"): value for name, value in link_query(row).items()}
            app = opened("history", url, **query)
            assert not app.exception
            stored = pd.read_sql(RESULTS, tables, params=[row["series_id"]])
            drawn = drawn_of(app, set(stored["result_id"]))
            found = drawn.merge(stored, on="result_id")
            assert len(found) == len(drawn) == len(stored), query
            divisor = UNITS[unit_of(app)] if row["unit"] == "seconds" else None
            for shown, kept in (("shown", "value"), ("low", "q25"), ("high", "q75")):
                assert_alike(found[shown], found[kept].astype(float), divisor)


def drawn_of(app, wanted):
    """Give the rows of the chart that holds these results."""
    charts = [chart.proto for chart in app.get("vega_lite_chart")]
    frames = [
        frame_of(one.data.data)
        for chart in charts
        for one in chart.datasets
        if one.name == "results"
    ]
    return next(frame for frame in frames if set(frame["result_id"]) & wanted)


def unit_of(app):
    """Give the unit that the axis of values names."""
    spec = app.get("vega_lite_chart")[0].proto.spec
    return spec.partition("time (")[2].partition(")")[0].encode().decode("unicode_escape")


def assert_alike(shown, kept, divisor):
    known = kept.notna()
    assert shown.notna().equals(known)
    if not known.any() or not kept[known].all():
        return
    ratios = (kept / shown)[known]
    assert ratios.max() == pytest.approx(ratios.min(), rel=1e-9)
    assert divisor is None or ratios.iloc[0] == pytest.approx(divisor, rel=1e-9)
