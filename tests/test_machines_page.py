"""The page of a machine: its environments, what its windows saw, which were doubted, its noise."""

import datetime as dt

import pandas as pd
import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from dashboard import machine_charts
from dashboard.data import opened as opened_database
from dashboard.freshness import age_text, local_text
from db.models import Window
from db.session import open_database
from tests import pages_database as demo
from tests.test_pages import charts, opened, words


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    address = f"sqlite:///{tmp_path_factory.mktemp('machines')}/demo.db"
    demo.build(address)
    engine = open_database(address, must_exist=True)
    with Session(engine) as session, session.begin():
        doubted = session.query(Window).filter_by(programs=8).first()
        session.execute(
            update(Window).where(Window.id == doubted.id).values(validity=["throttled", "no_gpm"])
        )
    engine.dispose()
    return address


def test_strips_codes_and_environments_are_what_was_stored(url):
    app = opened("machines", url, machine=demo.REPRODUCTION)

    assert not app.exception
    environments, codes, *_ = (table.value for table in app.dataframe)
    assert environments["environment"].tolist() == ["NVIDIA H200, driver 580.159, 700 W"]
    assert environments["windows"].tolist() == [8]
    assert dict(zip(codes["code"], codes["windows"], strict=True)) == {"throttled": 1, "no_gpm": 1}
    titles = [chart["layer"][-1]["encoding"]["y"]["title"] for chart in charts(app)]
    assert titles == ["power (W)", "SM active (%)"]


def test_a_machine_without_telemetry_says_so(url):
    app = opened("machines", url, machine=demo.HISTORY_MACHINE)

    assert not app.exception
    assert "No window of telemetry belongs to a result of this machine" in words(app)


def test_noise_is_half_the_quartiles_distance_by_week(url):
    with opened_database(url) as source:
        found = source.noise_by_week(demo.HISTORY_MACHINE)
        empty = source.noise_by_week("nowhere")

    # Every result of the demo has quartiles 0.5 % below and 0.6 % above it, all of one start.
    assert found["noise_pct"].tolist() == pytest.approx([0.55])
    assert found["week"].iloc[0].weekday() == 0
    assert empty.empty


def test_charts_follow_the_schema():
    at = pd.Timestamp("2026-03-02", tz="UTC")
    windows = pd.DataFrame(
        {"at": [at], "reading": [131.0], "kind": ["doubted"], "codes": ["x"], "benchmark": ["b"]}
    )
    weeks = pd.DataFrame({"week": [at], "noise_pct": [0.5], "results": [10]})

    machine_charts.strip(windows, "power (W)", (at, at)).to_dict()
    machine_charts.noise(weeks).to_dict()


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (dt.timedelta(seconds=59), "just now"),
        (dt.timedelta(minutes=1), "1 minute ago"),
        (dt.timedelta(hours=47), "1 day ago"),
        (dt.timedelta(days=274), "274 days ago"),
    ],
)
def test_an_age_is_told_in_its_largest_unit(age, text):
    assert age_text(age) == text


def test_a_time_without_a_browser_is_in_utc():
    assert local_text(dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)) == "2026-03-01 12:00 UTC"
