"""Pages show what the database says, keep their filters in the URL, and explain what is missing."""

# ruff: noqa: RUF001 - factors are asserted as they are printed

import json
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from db.exclusions import Selection, exclude
from db.session import open_database
from tests import pages_database as demo

APP = str(Path(__file__).parent.parent / "dashboard" / "app.py")
WORST = "step.Step.time_step"
RATE = "generation.Generation.track_rate"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    address = f"sqlite:///{tmp_path_factory.mktemp('pages')}/demo.db"
    demo.build(address)
    return address


def opened(name, database, **query):
    """Open a page as a browser with that URL would; `__` in a name stands for a dot."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DDTREE_BENCH_DB", database)
        app = AppTest.from_file(APP, default_timeout=60)
        for key, value in query.items():
            app.query_params[key.replace("__", ".")] = value
        # AppTest switches to pages that are files only; a session knows a page by this hash.
        app._page_hash = "" if name == "overview" else calc_hash(name)
        return app.run()


@pytest.fixture(scope="module")
def overview(url):
    return opened("overview", url)


@pytest.fixture(scope="module")
def incident(url):
    return opened("incident", url)


@pytest.fixture
def show(url, monkeypatch):
    """Open a page and let the test use its widgets."""

    def show_page(name="overview", database=url, **query):
        monkeypatch.setenv("DDTREE_BENCH_DB", database)
        return opened(name, database, **query)

    return show_page


def words(app):
    """Everything that a reader could read, charts and tables aside."""
    kinds = ("title", "header", "subheader", "markdown", "caption", "error", "warning", "info")
    texts = [element.value for kind in kinds for element in app.get(kind)]
    return "\n".join([*texts, *(f"{metric.label} {metric.value}" for metric in app.metric)])


def charts(app):
    return [json.loads(chart.proto.spec) for chart in app.get("vega_lite_chart")]


def unfolded(app, key):
    """Open what is folded."""
    app.session_state[key] = True
    return app.run()


def test_overview_begins_with_one_line_that_names_the_worst(overview):
    assert not overview.exception
    (line,) = [element.value for element in overview.error]
    assert "2 regressions, 1 improvement" in line
    assert "+9.0 %" in line
    assert r"step.Step.time\_step\(context=1024, page\_size=16\)" in line
    assert demo.sha(demo.STEP_AT)[:10] in line
    assert "cause: code" in line


def test_overview_groups_findings_by_commit_and_puts_regressions_first(overview):
    text_of = words(overview)

    first, second = demo.sha(demo.STEP_AT)[:10], demo.sha(15)[:10]
    assert text_of.index(f"`{first}` **") < text_of.index(f"`{second}` **")
    assert "p 3.2e-09" in text_of
    assert "9.8 ms → **10.68 ms**" in text_of
    assert "▲ +30.0 %" in text_of


def test_overview_counts_and_names_what_is_stale(overview):
    counts = {metric.label: metric.value for metric in overview.metric}
    assert counts == {
        "Results": "189",
        "Series": "17",
        "Commits": "61",
        "Machines": "3",
        "Runs": "62",
    }
    assert "**Stale**: 1 series without a result on their machine's newest commit" in words(
        overview
    )
    assert "belong to no repository at hand" in words(overview)


def test_a_subject_cannot_write_markdown_into_a_page(overview):
    assert r"change number 40 \[x\] \*y\*" in words(overview)


def test_every_finding_links_to_its_own_history(overview):
    queries = {link.proto.query_string for link in overview.get("page_link")}

    assert any(f"benchmark={WORST}" in query and "p.page_size=16" in query for query in queries)
    assert len([query for query in queries if "benchmark=" in query]) == 3
    # And each commit to all that moved at it, and to its diagnosis.
    for commit in (demo.sha(demo.STEP_AT), demo.sha(15)):
        assert f"machine={demo.HISTORY_MACHINE}&head={commit}" in queries
        assert f"machine={demo.HISTORY_MACHINE}&commit={commit}" in queries


def test_history_begins_with_the_worst_finding_and_writes_it_into_the_url(show):
    app = show("history")

    assert not app.exception
    assert len(charts(app)) == 1
    assert app.query_params["benchmark"] == WORST
    assert app.query_params["machine"] == demo.HISTORY_MACHINE
    assert app.query_params["p.page_size"] == "16"

    app.multiselect(key="history.filter.p.page_size").set_value([]).run()

    assert len(charts(app)) == 2
    assert "p.page_size" not in app.query_params


def test_history_shows_what_the_url_asks_for(show):
    app = show("history", benchmark=WORST, p__page_size="16", axis="log", commits="last 50")

    assert not app.warning
    (chart,) = charts(app)
    layers = [layer for layer in chart["layer"] if layer["mark"]["type"] == "point"]
    assert layers[0]["encoding"]["y"]["scale"]["type"] == "log"
    assert layers[0]["encoding"]["y"]["title"] == "time (ms) · lower is better"
    assert app.multiselect(key="history.filter.p.page_size").value == ["16"]
    assert app.segmented_control(key="history.filter.commits").value == "last 50"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"benchmark": "nope"}, "there is no benchmark “nope” here"),
        ({"machine": "'; DROP TABLE results; --"}, "there is no machine"),
        ({"p__page_size": "77"}, r"there is no p.page\_size “77” here"),
        ({"axis": "<img src=x> " + "y" * 10_000}, r"there is no axis “\<img src=x\> yyy"),
        ({"layout": "spiral"}, "there is no layout “spiral” here"),
        ({"commit": "beef"}, "there is no commit “beef” here"),
        ({"colour": "red"}, "colour is no filter of this page"),
    ],
)
def test_an_unknown_value_in_the_url_falls_back_with_a_message(show, query, message):
    app = show("history", **query)

    assert not app.exception
    assert message in "\n".join(element.value for element in app.warning)
    assert len(charts(app)) == 2


def test_a_filter_goes_into_the_url_and_its_message_is_told_once(show):
    app = show("history", benchmark="nope")

    app.multiselect(key="history.filter.benchmark").set_value([RATE]).run()

    assert app.query_params["benchmark"] == RATE
    assert not app.warning
    (chart,) = charts(app)
    assert "(tokens/s) · higher is better" in json.dumps(chart, ensure_ascii=False)


def test_a_filter_that_another_made_impossible_is_dropped(show):
    app = show("history", benchmark=WORST, p__page_size="16")

    app.multiselect(key="history.filter.benchmark").set_value([RATE]).run()

    assert not app.exception
    assert "p.page_size" not in app.query_params


def test_a_new_url_wins_over_the_widgets_of_the_old_one(show):
    app = show("history", benchmark=WORST)

    app.query_params["benchmark"] = RATE
    app.run()

    assert app.multiselect(key="history.filter.benchmark").value == [RATE]


def test_series_of_one_unit_can_be_laid_over_one_another(show):
    app = show("history", benchmark=WORST, layout="one chart")

    (chart,) = charts(app)
    assert "series" in json.dumps(chart)


def test_series_of_different_units_stay_in_panels_and_the_page_says_so(show):
    app = show("history", benchmark=[WORST, RATE], layout="one chart")

    assert len(charts(app)) == 3
    assert "units of these series differ" in words(app)


def test_every_number_of_a_chart_stands_in_a_table_too(show):
    app = show("history", benchmark=WORST, p__page_size="1")

    assert not app.dataframe  # its code would keep a browser from drawing the chart
    changes = unfolded(app, "history.changes").dataframe[0].value
    assert changes["change"].tolist() == ["+8.9 %"]
    assert changes["cause"].tolist() == ["code"]
    results = unfolded(app, "history.results").dataframe[1].value
    assert len(results) == demo.NUM_COMMITS
    assert results["commit"].iloc[0] == demo.sha(demo.NUM_COMMITS - 1)[:10]
    assert results["status"].value_counts().to_dict() == {"ok": 59, "failed": 1}
    assert results["value"].iloc[-1] == pytest.approx(10.1, rel=0.03)
    assert results["unit"].unique().tolist() == ["ms"]


def test_tables_of_a_history_have_no_column_of_subjects_where_no_commit_has_one(
    url, tmp_path, show
):
    unnamed = f"sqlite:///{tmp_path}/unnamed.db"
    demo.build(unnamed)
    demo.rewrite(unnamed, "UPDATE commits SET subject = NULL")

    for database, has_subjects in ((url, True), (unnamed, False)):
        app = show("history", database, benchmark=WORST, p__page_size="1")
        unfolded(app, "history.changes")
        tables = unfolded(app, "history.results").dataframe

        assert [len(table.value) for table in tables] == [1, demo.NUM_COMMITS]
        assert {"subject" in table.value for table in tables} == {has_subjects}


def test_history_says_first_where_a_series_stands_and_since_when(show):
    app = show("history", benchmark=WORST)

    (answer,) = [text.value for text in app.markdown if "newest result" in text.value.lower()]
    lines = answer.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(r"- **context=1024, page\_size=1**: Level **")
    assert ":red[**▲ +8.9 %**]" in lines[0]
    assert f"since `{demo.sha(demo.STEP_AT)[:10]}`" in lines[0]
    assert "cause code" in lines[0]
    assert f"at `{demo.sha(demo.NUM_COMMITS - 1)[:10]}`" in lines[0]


def test_a_panel_counts_what_it_shows(show):
    assert "60 results on 60 commits · 1 failed · 1 change point" in words(
        show("history", benchmark=WORST, p__page_size="1")
    )


def test_the_command_of_a_point_names_its_commit_and_case(show):
    commit = demo.sha(12)

    app = show("history", benchmark=WORST, p__page_size="16", commit=commit)

    (command,) = app.code
    assert command.value == (
        f"ddtree-bench run --profile full --commits {commit}^! "
        r"--bench '^step\.Step\.time_step\(1024, 16\)$'"
    )


def test_a_click_on_a_point_shows_its_commit_and_its_command(show):
    app = show("history", benchmark=WORST, p__page_size="1")
    assert not app.code
    assert f"--commits {demo.sha(demo.NUM_COMMITS - 1)}^!" in app.text[0].value
    results = unfolded(app, "history.results").dataframe[0].value
    clicked = results[results["commit"] == demo.sha(20)[:10]].iloc[0]

    # The first series that the database was given; the key of its chart names it.
    app.session_state["history-1"] = {
        "selection": {"picked": [{"result_id": int(clicked["result_id"])}]}
    }
    app.run()

    assert not app.exception
    assert app.query_params["commit"] == demo.sha(20)
    assert f"`{demo.sha(20)}`" in words(app)
    assert demo.sha(20) in app.code[0].value
    # A click counts once: what is chosen after it holds.
    app.selectbox(key="history.filter.commit").set_value(demo.sha(21)).run()
    assert app.query_params["commit"] == demo.sha(21)


def test_a_finding_whose_results_were_all_left_out_since_breaks_no_page(show, tmp_path):
    address = f"sqlite:///{tmp_path}/excluded.db"
    demo.build(address)
    engine = open_database(address, must_exist=True)
    for place in range(demo.NUM_COMMITS):
        exclude(engine, Selection(demo.sha(place), None, WORST), author="anna", reason="fan")
    engine.dispose()

    app = show(database=address)
    history = show("history", database=address)

    assert not app.exception
    assert "All its results were left out since" in words(app)
    assert not history.exception
    assert not history.warning
    assert history.query_params["benchmark"] == RATE


def test_what_was_left_out_is_drawn_with_its_reason_and_counts_no_more(show, tmp_path):
    address = f"sqlite:///{tmp_path}/excluded.db"
    demo.build(address)
    engine = open_database(address, must_exist=True)
    exclude(engine, Selection(demo.sha(25), None, WORST), author="anna", reason="the <b>fan</b>")
    engine.dispose()

    app = show("history", database=address, benchmark=WORST, p__page_size="1")

    assert not app.exception
    assert "59 results on 60 commits · 1 failed · 1 excluded" in words(app)
    table = unfolded(app, "history.results").dataframe[0].value.set_index("commit")
    assert table.loc[demo.sha(25)[:10], "status"] == "excluded"
    (chart,) = charts(app)
    (points, *_) = [layer for layer in chart["layer"] if layer["mark"]["type"] == "point"]
    shapes = points["encoding"]["shape"]["scale"]
    assert dict(zip(shapes["domain"], shapes["range"], strict=True))["excluded"] == "square"
    (line,) = [layer for layer in chart["layer"] if layer["mark"]["type"] == "line"]
    assert "excluded" in json.dumps(line["transform"])


def test_a_result_from_elsewhere_has_no_command_and_says_so(show):
    app = show("history", benchmark="incident.Probe.time_step", machine=demo.INCIDENT)

    assert not app.code
    assert "Recorded elsewhere" in words(app)
    assert "ordered as their recording lists them" in words(app)


def test_a_database_that_goes_away_is_told_on_the_next_run(show, tmp_path):
    file = tmp_path / "away.db"
    demo.build_one_commit(f"sqlite:///{file}")
    app = show("alerts", database=f"sqlite:///{file}")
    assert "No alert was ever opened" in words(app)

    file.rename(tmp_path / "elsewhere.db")
    app.run()

    assert "Nothing to show yet" in words(app)
    assert "found none" in words(app)


def test_too_many_series_are_cut_with_a_message(show, monkeypatch):
    monkeypatch.setattr("dashboard.history_page.MOST_PANELS", 1)

    app = show("history", benchmark=WORST)

    assert len(charts(app)) == 1
    assert "2 series match; the first 1 are drawn" in words(app)


def test_incident_shows_the_numbers_and_the_counter_that_misled(incident):
    assert not incident.exception
    shown = {metric.label: metric.value for metric in incident.metric}
    assert shown["Time"] == "327 ms"
    assert shown["Effective rate"] == "14.1 GB/s"
    assert shown["Above the KV-read floor"] == "128×"
    assert shown["Of peak bandwidth"] == "0.782 %"
    assert shown["Power"] == "133 W"
    text_of = words(incident)
    assert "misleads" in text_of
    assert "some kernel was resident" in text_of
    assert "is 128 times its KV\\-read floor" in incident.error[0].value


def test_incident_gives_each_claim_its_status(incident):
    statuses = [
        badge.split("[")[1].split("]")[0]
        for badge in words(incident).split(":")
        if "-badge[" in badge
    ]
    assert {"supported", "consistent", "untested"} <= set(statuses)
    assert "consistent, untested on this card" in words(incident)


def test_incident_draws_log_axes_and_the_datasheet_floor(incident):
    times = charts(incident)[0]

    drawn = json.dumps(times)
    assert "KV-read floor at 1.8 TB/s (datasheet)" in drawn
    assert drawn.count('"type": "log"') >= 2


def test_the_reproduction_stands_beside_the_incident(incident):
    assert "Reproduced on NVIDIA H200" in words(incident)
    assert "GPM SM active" in words(incident)
    assert len(charts(incident)) == 5  # times and counters, then times and two backends' counters


def test_a_commit_without_telemetry_has_nothing_to_diagnose(show):
    app = show("incident", machine=demo.HISTORY_MACHINE)

    assert not app.exception
    assert "nothing to diagnose" in words(app)


def test_a_database_of_an_unknown_kind_is_explained(show):
    app = show(database="mongodb://somewhere/else")

    assert not app.exception
    assert "got mongodb" in app.error[0].value


def test_a_write_is_seen_by_the_next_run(show, tmp_path):
    address = f"sqlite:///{tmp_path}/growing.db"
    demo.build(address)
    app = show("history", database=address, benchmark=WORST, p__page_size="1")
    engine = create_engine(address)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM change_points"))
        connection.execute(
            text(
                "INSERT INTO revisions (kind, created_at, summary) "
                "VALUES ('detect', '2026-03-02 00:00:00.000000', '{}')"
            )
        )
    engine.dispose()

    app.run()

    assert "0 change points" in words(app)
