"""The page of a machine: its environments, what its windows saw, which were doubted, its noise."""

import datetime as dt

import pandas as pd
import pytest
import vl_convert
from sqlalchemy import update
from sqlalchemy.orm import Session

from dashboard import machine_charts
from dashboard.data import opened as opened_database
from dashboard.drawing import drawing_of
from dashboard.freshness import age_text, local_text
from db.models import Window
from db.session import open_database
from tests import pages_database as demo
from tests.test_pages import charts, opened, unfolded, words


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


def test_strips_codes_and_environments_are_what_was_stored(url, monkeypatch):
    monkeypatch.setenv("DDTREE_BENCH_DB", url)
    app = opened("machines", url, machine=demo.REPRODUCTION)

    assert not app.exception
    assert not app.dataframe  # its code would keep a browser from drawing the charts
    environments, codes, _ = (rows(text.value) for text in app.markdown if "\n| ---" in text.value)
    assert [(row[0], row[-1]) for row in environments] == [
        ("NVIDIA H200, driver 580.159, 700 W", "8")
    ]
    assert [row[:3] for row in codes] == [["throttled", "1", "12.5%"], [r"no\_gpm", "1", "12.5%"]]
    assert "support no claim" in words(app)
    whole = unfolded(app, "machines.environments").dataframe[0].value
    assert whole["windows"].tolist() == [8]
    assert len(unfolded(app, "machines.windows").dataframe[1].value) == 8
    titles = [chart["layer"][-1]["encoding"]["y"]["title"] for chart in charts(app)]
    assert titles == ["power (W)", "SM active (%)"]


def test_every_strip_is_a_file_of_each_kind_and_the_windows_are_one(url, monkeypatch):
    monkeypatch.setenv("DDTREE_BENCH_DB", url)
    app = opened("machines", url, machine=demo.REPRODUCTION)

    strips = [f"telemetry-{demo.REPRODUCTION}-{name}" for name in ("power_w", "gpm_sm_active_pct")]
    assert offered(app)[: 2 * 3] == [
        f"download.{name}.{kind}" for name in strips for kind in ("csv", "svg", "png")
    ]
    whole = f"download.telemetry-{demo.REPRODUCTION}.csv"
    assert whole not in offered(app)
    assert whole in offered(unfolded(app, "machines.windows"))


def offered(app):
    """Give the keys of the files that a page offers."""
    return [str(one.key) for one in app.get("download_button")]


@pytest.mark.parametrize("make", ["strip", "noise"])
def test_charts_are_drawn_into_files_with_all_that_they_say(make):
    at = pd.date_range("2026-03-02", periods=3, freq="1h", tz="UTC")
    frame = pd.DataFrame({"at": at, "reading": [131.0, 132.0, 133.0], "benchmark": "b"})
    frame = frame.assign(kind=["sound", "sound", "doubted"], codes="x")
    weeks = pd.DataFrame({"week": at, "noise_pct": [0.5, 0.6, 0.7], "results": 10})
    chart, title = {
        "strip": (machine_charts.strip(frame, "power (W)", (at[0], at[-1])), "power (W)"),
        "noise": (machine_charts.noise(weeks), "spread (%) · lower is better"),
    }[make]

    drawing = drawing_of(chart)
    picture = vl_convert.vegalite_to_svg(drawing.for_file())

    assert f">{title}<" in picture
    assert picture.count('aria-roledescription="point"') == 3
    assert vl_convert.vegalite_to_png(drawing.for_file()).startswith(b"\x89PNG")


def rows(table):
    """Give the cells of a table in Markdown."""
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


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
