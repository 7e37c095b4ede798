"""Pages as people use them: databases are replaced, machines have no runs, clicks come quickly."""

from itertools import count

import pandas as pd
import pytest
import streamlit as st
from sqlalchemy.orm import Session

from dashboard.data import opened as opened_database
from dashboard.reproduce import recipe
from dashboard.selection import parse_params
from dashboard.theme import LOCAL_USER
from db.labels import canonical_params
from db.models import Result, Run, Series
from db.session import open_database
from tests import pages_database as demo
from tests.test_pages import charts, opened, words


def counts(app):
    return {metric.label: metric.value for metric in app.metric}


@pytest.fixture(scope="module")
def demo_url(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('used')}/demo.db"
    demo.build(url)
    return url


def test_a_database_put_in_the_place_of_another_is_read_anew(tmp_path):
    path, other = tmp_path / "demo.db", tmp_path / "other.db"
    # Both have one revision, each of a day of its own: a backup that went on by itself.
    for day, file, build in ((1, path, demo.build_one_commit), (2, other, demo.build)):
        build(f"sqlite:///{file}")
        demo.rewrite(
            f"sqlite:///{file}",
            f"UPDATE revisions SET created_at = '2026-03-0{day} 00:00:00.000000'",
        )
    assert counts(opened("overview", f"sqlite:///{path}"))["Results"] == "2"

    other.replace(path)

    assert counts(opened("overview", f"sqlite:///{path}"))["Results"] == "189"


@pytest.mark.parametrize("build", [demo.build, demo.build_empty])
def test_a_machine_without_runs_breaks_no_incident(tmp_path, build):
    url = f"sqlite:///{tmp_path}/demo.db"
    build(url)
    demo.rewrite(url, "INSERT INTO machines (name) VALUES ('aaa-new')")

    app = opened("incident", url, machine="aaa-new")

    assert not app.exception
    assert ("No recording yet" in words(app)) == (build is demo.build_empty)


def test_a_filter_is_kept_that_is_used_before_the_browser_has_heard_of_another(
    demo_url, monkeypatch
):
    monkeypatch.setenv("DDTREE_BENCH_DB", demo_url)
    app = opened("history", demo_url, p__page_size="16")
    first = dict(app.query_params)
    app.segmented_control(key="history.filter.axis").set_value("log").run()
    assert app.query_params["axis"] == "log"

    # Far from the server the second click leaves before the answer to the first one is there.
    app.query_params.clear()
    app.query_params.update(first)
    app.segmented_control(key="history.filter.commits").set_value("last 50").run()

    assert app.query_params["axis"] == "log"
    assert app.query_params["commits"] == "last 50"
    assert app.query_params["p.page_size"] == "16"
    assert app.segmented_control(key="history.filter.axis").value == "log"


def test_the_back_button_wins_over_the_widgets_it_finds(demo_url, monkeypatch):
    monkeypatch.setenv("DDTREE_BENCH_DB", demo_url)
    app = opened("history", demo_url, p__page_size="16")
    first = dict(app.query_params)
    app.segmented_control(key="history.filter.axis").set_value("log").run()

    app.query_params.clear()
    app.query_params.update(first)
    app.run()

    assert "axis" not in app.query_params
    assert app.segmented_control(key="history.filter.axis").value == "linear"


def test_a_database_that_comes_back_is_read_once_it_is_asked_for(tmp_path, monkeypatch):
    path, away = tmp_path / "demo.db", tmp_path / "away.db"
    demo.build_one_commit(f"sqlite:///{path}")
    monkeypatch.setenv("DDTREE_BENCH_DB", f"sqlite:///{path}")
    path.rename(away)
    app = opened("overview", f"sqlite:///{path}")
    assert "found none" in words(app)

    away.rename(path)
    app.button(key="refresh.again").click().run()

    assert not app.error
    assert counts(app)["Results"] == "2"


@pytest.mark.parametrize(
    ("revision", "advice"), [("0001", "db upgrade brings it"), ("9999", "a newer ddtree")]
)
def test_a_database_of_another_version_is_no_empty_one(tmp_path, revision, advice):
    url = f"sqlite:///{tmp_path}/demo.db"
    demo.build_one_commit(url)
    demo.rewrite(url, f"UPDATE alembic_version SET version_num = '{revision}'")

    app = opened("history", url)

    assert [one.value for one in app.title] == ["Nothing can be read"]
    (error,) = [one.value for one in app.error]
    assert advice in error.replace("\\", "")
    assert not app.code


def test_a_noise_that_is_not_told_by_all_results_says_so(demo_url, monkeypatch):
    whole = opened("machines", demo_url, machine=demo.HISTORY_MACHINE)
    monkeypatch.setattr("db.page_queries.MOST_NOISY", 50)
    monkeypatch.setattr("dashboard.machines_page.MOST_NOISY", 50)
    st.cache_data.clear()

    cut = opened("machines", demo_url, machine=demo.HISTORY_MACHINE)

    st.cache_data.clear()
    assert "newest 50 results alone" in words(cut)
    assert "results alone" not in words(whole)


@pytest.mark.parametrize("names", [("page size", "head dim"), ("page-size", "head.dim")])
def test_the_command_of_a_case_whose_parameters_have_names_of_several_words_is_exact(names):
    params = canonical_params(names, ("1", "(2, 3)"))

    how = recipe(
        benchmark="step.time_step",
        params=params,
        commit="beef",
        is_external=False,
        has_repository=False,
    )

    assert parse_params(params) == dict(zip(names, ("1", "(2, 3)"), strict=True))
    assert how.command == r"asv run --bench '^step\.time_step\(1, \(2, 3\)\)$' beef^!"


def test_a_note_that_is_sent_by_two_clicks_is_taken_down_once(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/demo.db"
    demo.build_with_alerts(url)
    monkeypatch.setenv("DDTREE_BENCH_DB", url)
    monkeypatch.setenv(LOCAL_USER, demo.PEOPLE[0])
    app = opened("alerts", url, alert="1")

    for note in ("the fan", "the fan", "and the clock"):
        app.text_area(key="alerts.note.1").set_value(note)
        next(one for one in app.button if one.label == "Take it down").click().run()
        assert "Taken down." in [one.value for one in app.success]

    with opened_database(url) as source:
        (view,) = [one for one in source.alerts() if one.id == 1]
    assert [step.note for step in view.history] == [None, "the fan", "and the clock"]


def test_a_click_shows_the_result_that_was_clicked_though_its_commit_was_measured_again(
    tmp_path, monkeypatch
):
    url = f"sqlite:///{tmp_path}/demo.db"
    demo.build(url)
    again = repeat_first_result(url)
    monkeypatch.setenv("DDTREE_BENCH_DB", url)
    app = opened("history", url, p__page_size="1", commit=demo.sha(0))
    assert "20 ms · ok" in words(app)

    app.session_state["history-1"] = {"selection": {"picked": [{"result_id": 1}]}}
    app.run()

    assert app.query_params["result"] == "1"
    assert "20 ms · ok" not in words(app)
    assert not app.warning
    app.selectbox(key="history.filter.result").set_value(str(again)).run()
    assert "20 ms · ok" in words(app)
    # Another commit, which was measured once, asks for nothing.
    app.selectbox(key="history.filter.commit").set_value(demo.sha(1)).run()
    assert "result" not in app.query_params
    assert not app.warning


def repeat_first_result(url):
    """Measure the demo's first commit once more, at 20 ms; give the number of the result."""
    engine = open_database(url, must_exist=True)
    with Session(engine) as session, session.begin():
        filler = demo.Filler(session, digests=count(10_000))
        first = session.get(Result, 1)
        line = session.get(Series, first.series_id)
        run = session.get(Run, first.run_id)
        number = filler.result(line, run, 0.02, started_at_ms=1_780_000_000_001).id
    engine.dispose()
    return number


@pytest.mark.parametrize("layout", ["panels", "one chart"])
def test_the_rows_of_a_history_as_a_file_name_their_series_their_commit_and_their_unit(
    demo_url, monkeypatch, layout
):
    offered = {}
    monkeypatch.setattr(
        "dashboard.drawing.offer", lambda name, table, spec: offered.update({name: table})
    )

    opened("history", demo_url, benchmark="step.Step.time_step", layout=layout, commits="last 50")

    table = pd.concat(offered.values())
    assert len(table) == 2 * 50
    assert table["commit"].nunique() == 50
    assert table["commit"].iloc[0] == demo.sha(demo.NUM_COMMITS - 1)
    assert table["unit"].unique().tolist() == ["ms"]
    assert sorted(table["params"].unique()) == [
        "context=1024, page_size=1",
        "context=1024, page_size=16",
    ]
    assert table["value"].dropna().between(9, 12).all()


def test_a_link_full_of_nonsense_does_not_bury_the_page(demo_url):
    app = opened("history", demo_url, **{f"x{number}": "1" for number in range(300)})

    told = [one.value for one in app.warning]
    assert len(told) == 4
    assert "297 more values that this page does not know" in told[-1]
    assert charts(app)


@pytest.mark.parametrize("zeros", [0, 1])
def test_an_axis_that_cannot_be_logarithmic_says_so(tmp_path, zeros):
    url = f"sqlite:///{tmp_path}/demo.db"
    demo.build(url)
    demo.rewrite(url, f"UPDATE results SET value = 0 WHERE id = 1 AND {zeros}")

    app = opened("history", url, p__page_size="1", axis="log")

    assert ("linear axis" in words(app)) == bool(zeros)
