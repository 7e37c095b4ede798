"""What was found, as the pages tell it: each finding of its own series, and all of them counted."""

from urllib.parse import parse_qs

import pytest
from sqlalchemy.orm import Session

from dashboard.selection import distinct_names
from db.alerts import update_alerts
from db.models import Machine, Metric, Revision, Variant
from db.session import open_database
from tests import pages_database as demo
from tests.test_page_parts import series_frame
from tests.test_pages import charts, opened, words

MANY = 120  # cases that got slower
SLOWER = "python 3.14"  # the variant that was slowed down, after all that a page draws at once


def variant_of(filler, label, digest):
    return filler.add(Variant(label=label, python="3", requirements={}, env_vars={}, digest=digest))


def build_twins(filler, time, machine):
    """Measure one case under six versions of Python; under the last one it got slower."""
    commits = [filler.commit(place) for place in range(6)]
    for minor in range(9, 15):
        label = f"python 3.{minor}"
        variant = variant_of(filler, label, minor)
        line = filler.series("step.Step.time_step", "", time, machine, variant)
        for place, commit in enumerate(commits):
            slower = 1.2 if label == SLOWER and place >= 3 else 1.0
            filler.result(line, filler.run(commit, machine, variant), 0.01 * slower)
    filler.change(line, 3, 0.01, 0.012)
    update_alerts(filler.session, demo.START)


def build_crowd(filler, time, machine):
    """Write one large slowdown, and after it a smaller one of each of many cases."""
    variant = variant_of(filler, "python", 1)
    runs = [filler.run(filler.commit(place), machine, variant) for place in range(3)]
    for case in range(MANY):
        line = filler.series(f"step.Step.time_{case}", "", time, machine, variant)
        place, after = (1, 0.018) if case == 0 else (2, 0.0105)
        for at, run in enumerate(runs):
            filler.result(line, run, after if at >= place else 0.01)
        filler.change(line, place, 0.01, after)


def stored(folder, build):
    """Give the URL of a database of one machine whose times are what `build` adds."""
    url = f"sqlite:///{folder}/found.db"
    engine = open_database(url, must_exist=False)
    with Session(engine) as session, session.begin():
        filler = demo.Filler(session)
        time = filler.add(Metric(name="time", unit="seconds", direction="lower"))
        build(filler, time, filler.add(Machine(name="ci")))
        filler.add(Revision(kind="ingest", created_at=demo.START, summary={}))
    engine.dispose()
    return url


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("twins"), build_twins)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("crowd"), build_crowd)


@pytest.mark.parametrize(
    ("name", "label"), [("overview", "History"), ("alerts", "History of this case")]
)
def test_a_finding_leads_to_its_own_variant(twins, name, label):
    (link,) = [
        one.proto for one in opened(name, twins).get("page_link") if one.proto.label == label
    ]
    query = {key: values[0] for key, values in parse_qs(link.query_string).items()}

    app = opened("history", twins, **query)

    assert query["variant"] == SLOWER
    assert not app.warning
    assert len(charts(app)) == 1
    assert "▲ +20.0 %" in words(app)


def test_history_begins_with_the_variant_that_got_slower(twins):
    app = opened("history", twins)

    assert app.multiselect(key="history.filter.variant").value == [SLOWER]
    assert "▲ +20.0 %" in words(app)


@pytest.mark.parametrize(
    ("series", "names"),
    [
        (({"version": "2026-01-01"}, {"version": "2026-01-02"}), ["2026-01-01", "2026-01-02"]),
        (({"version": "a" * 64}, {"version": "b" * 64}), ["a" * 8, "b" * 8]),
        (({"version": "1"}, {"version": "10"}), ["1", "10"]),
    ],
)
def test_versions_that_begin_alike_have_names_of_their_own(series, names):
    assert distinct_names(series_frame(*series)) == [f"version {name}" for name in names]


def test_a_series_without_parameters_beside_one_with_them_has_a_name():
    named = distinct_names(series_frame({"params": ""}, {"params": "page_size=1"}))

    assert named == ["step.Step.time_step", "page_size=1"]


def test_the_line_of_the_overview_counts_all_that_stands_and_names_the_worst_of_all(crowd):
    app = opened("overview", crowd)

    (line,) = [one.value for one in app.error]
    assert f"**{MANY} regressions** stand" in line
    assert r"**+80.0 %** in **step.Step.time\_0**" in line
    assert f"since `{demo.sha(1)[:10]}`" in line


def test_what_changed_at_a_commit_is_told_however_much_was_found_since(crowd):
    app = opened("diagnose", crowd, machine="ci", commit=demo.sha(1))

    assert "What changed at this commit" in words(app)
    assert r"**+80.0 %** step.Step.time\_0" in words(app)


def test_what_stands_is_told_by_the_order_of_commits_though_a_later_one_has_an_earlier_date(
    tmp_path,
):
    url = f"sqlite:///{tmp_path}/demo.db"
    demo.build(url)
    later = "FROM commits WHERE position = 50"
    demo.rewrite(
        url,
        "UPDATE commits SET committed_at = '2026-03-01 00:00:01.000000' WHERE position = 50",
        "INSERT INTO change_points (series_id, commit_id, before, after, relative_change, p_value,"
        " cause, detected_at) SELECT 1, id, 0.011, 0.0101, -0.08, 1e-5, 'code',"
        f" '2026-03-02 00:00:00.000000' {later}",
    )

    (line,) = [one.value for one in opened("overview", url).error]

    assert "**1 regression, 2 improvements** stand" in line
