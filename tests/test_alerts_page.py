"""Alerts in the browser: read by anybody, judged by those who may, and no note is ever lost."""

import datetime as dt
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner
from sqlalchemy.orm import Session

from dashboard.cli import main
from dashboard.cli_dashboard import admit
from dashboard.data import opened as opened_database
from dashboard.theme import LOCAL_USER
from db.alert_queries import alert, alerts
from db.alerts import update_alerts
from db.columns import AlertState, Role
from db.errors import AlertError
from db.people import role_of, set_role
from db.session import open_database
from tests import pages_database as demo
from tests.test_pages import opened, unfolded, words

ANNA, BEN, CARL = "anna@example.org", "ben@example.org", "carl@example.org"
HOSTILE = "<script>alert(1)</script> **bold** `x` \u202eright to left 😀 " + "x" * 9_000


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The database that every test gets a copy of."""
    file = tmp_path_factory.mktemp("alerts") / "demo.db"
    address = f"sqlite:///{file}"
    demo.build(address)
    engine = open_database(address, must_exist=True)
    with Session(engine) as session, session.begin():
        update_alerts(session, dt.datetime(2026, 3, 20, tzinfo=dt.UTC))
        for email in (ANNA, BEN):
            set_role(session, email, Role.TRIAGER)
    engine.dispose()
    return file


@pytest.fixture
def url(template, tmp_path):
    return f"sqlite:///{shutil.copy(template, tmp_path)}"


def history_of(url, number):
    engine = open_database(url, must_exist=True)
    with Session(engine) as session:
        found = alert(session, number)
    engine.dispose()
    return found


def page_of(url, email, monkeypatch, **query):
    monkeypatch.setenv("DDTREE_BENCH_DB", url)
    if email is None:
        monkeypatch.delenv(LOCAL_USER, raising=False)
    else:
        monkeypatch.setenv(LOCAL_USER, email)
    return opened("alerts", url, **query)


def say(app, email, state, note, monkeypatch):
    monkeypatch.setenv(LOCAL_USER, email)
    number = app.selectbox(key="alerts.filter.alert").value
    if state is not None:
        app.radio(key=f"alerts.state.{number}").set_value(state)
    app.text_area(key=f"alerts.note.{number}").set_value(note)
    form = next(button for button in app.button if button.label == "Take it down")
    form.click().run()
    assert not app.exception


def test_a_page_without_a_name_shows_everything_and_takes_nothing(url, monkeypatch):
    app = page_of(url, None, monkeypatch)

    assert not app.exception
    assert "2 alerts, none judged yet." in words(app)
    assert not app.dataframe  # its code would keep a browser from showing anything
    (first,) = [text.value for text in app.markdown if text.value.startswith("| Alert")]
    lines = first.replace("\N{NO-BREAK SPACE}", " ").splitlines()[2:]
    told = [(":red-badge[open]", rf"\+{change} %") for change in ("9.0", "8.9")]
    assert [tuple(line.split(" | ")[1:3]) for line in lines] == told
    table = unfolded(app, "alerts.table").dataframe[0].value
    assert table["state"].tolist() == ["open", "open"]
    assert table["change_pct"].tolist() == pytest.approx([8.98, 8.91], abs=0.01)
    assert "Read-only: nobody can sign in here" in words(app)
    assert not app.text_area


def test_a_column_of_notes_is_shown_only_where_somebody_wrote_one(url, monkeypatch):
    app = page_of(url, ANNA, monkeypatch, alert="1")
    assert "| Last note |" not in words(app)

    say(app, ANNA, "confirmed", "I see it too", monkeypatch)

    (first,) = [text.value for text in app.markdown if text.value.startswith("| Alert")]
    titles, _, *lines = first.splitlines()
    assert titles.endswith("| Last note |")
    assert {line.count(" | ") for line in lines} == {titles.count(" | ")}
    assert sum(line.endswith("| I see it too |") for line in lines) == 1


def test_a_viewer_reads_and_no_more(url, monkeypatch):
    app = page_of(url, CARL, monkeypatch)

    assert not app.exception
    assert "the role viewer reads and no more" in words(app)
    assert not app.text_area
    with (
        opened_database(url) as source,
        pytest.raises(AlertError, match="expected somebody who may judge, got the viewer carl"),
    ):
        source.triage(1, AlertState.EXPECTED, author=CARL, note=None)


def test_of_two_people_at_once_nobodys_note_is_lost(url, monkeypatch):
    hers, his = (page_of(url, email, monkeypatch, alert="1") for email in (ANNA, BEN))

    say(hers, ANNA, "confirmed", HOSTILE, monkeypatch)
    say(his, BEN, "confirmed", "I see it on my machine too", monkeypatch)

    steps = history_of(url, 1).history
    said = [(step.state, step.author, step.note) for step in steps]
    assert said == [
        ("open", None, None),
        ("confirmed", ANNA, HOSTILE),
        ("confirmed", BEN, "I see it on my machine too"),
    ]
    assert "Taken down." in his.success[0].value
    assert his.text_area(key="alerts.note.1").value == ""
    # Shown as text, by the element that knows no markup.
    assert HOSTILE in [element.value for element in his.text]
    assert "<script>" not in words(his)


def test_a_note_on_what_somebody_else_has_just_settled_is_taken_down(url, monkeypatch):
    hers, his = page_of(url, ANNA, monkeypatch, alert="2"), page_of(url, BEN, monkeypatch)
    assert his.selectbox(key="alerts.filter.alert").value == "2"

    say(hers, ANNA, "expected", "larger pages", monkeypatch)
    say(his, BEN, "expected", "agreed", monkeypatch)

    said = [(step.author, step.note) for step in history_of(url, 2).history]
    assert said == [(None, None), (ANNA, "larger pages"), (BEN, "agreed")]
    for app in (hers, his):
        assert "Taken down." in app.success[0].value
        assert unfolded(app, "alerts.table").dataframe[0].value["alert"].tolist() == [1]
    # Settled as it is, its link goes on showing it.
    later = page_of(url, None, monkeypatch, alert="2")
    assert not later.warning
    assert "larger pages" in [element.value for element in later.text]


def test_a_note_takes_nothing_back_that_somebody_else_has_said_in_the_meantime(url, monkeypatch):
    hers, his = (page_of(url, email, monkeypatch, alert="1") for email in (ANNA, BEN))

    say(hers, ANNA, "confirmed", "seen on my machine", monkeypatch)
    say(his, BEN, None, "I am looking at it", monkeypatch)

    steps = history_of(url, 1).history
    assert (steps[-1].state, steps[-1].author) == ("confirmed", BEN)
    assert [step.note for step in steps[1:]] == ["seen on my machine", "I am looking at it"]


def test_saying_nothing_is_not_taken_down(url, monkeypatch):
    app = page_of(url, ANNA, monkeypatch, alert="1")

    say(app, ANNA, None, " ", monkeypatch)

    assert "It is open already" in app.info[0].value
    assert len(history_of(url, 1).history) == 1


def test_writers_in_one_moment_all_get_their_turn(url):
    def write(number):
        with opened_database(url) as source:
            state = (AlertState.ACKNOWLEDGED, AlertState.CONFIRMED)[number % 2]
            source.triage(1, state, author=(ANNA, BEN)[number % 2], note=f"note {number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(12)))

    notes = [step.note for step in history_of(url, 1).history if step.note]
    assert sorted(notes) == sorted(f"note {number}" for number in range(12))


def test_a_note_that_is_refused_stays_in_its_field(url, monkeypatch):
    app = page_of(url, ANNA, monkeypatch, alert="1")
    engine = open_database(url, must_exist=True)
    with Session(engine) as session, session.begin():
        set_role(session, ANNA, Role.VIEWER)
    engine.dispose()
    # The form was on her screen when her role was taken away.
    monkeypatch.setattr("dashboard.signing_in.MAY_JUDGE", frozenset(Role))

    say(app, ANNA, "expected", "wanted: larger pages", monkeypatch)

    assert "Not stored" in app.error[0].value
    assert app.text_area(key="alerts.note.1").value == "wanted: larger pages"
    assert history_of(url, 1).state == "open"


def test_who_is_not_stored_is_a_viewer(url):
    engine = open_database(url, must_exist=True)
    with Session(engine) as session:
        assert role_of(session, "nobody@example.org") is Role.VIEWER
        assert len(alerts(session)) == 2
    engine.dispose()


def test_the_person_of_a_laptop_may_judge_unless_told_otherwise(url):
    engine = open_database(url, must_exist=True)
    admit(engine, CARL)
    with Session(engine) as session, session.begin():
        assert role_of(session, CARL) is Role.TRIAGER
        set_role(session, CARL, Role.VIEWER)
    admit(engine, CARL)
    with Session(engine) as session:
        assert role_of(session, CARL) is Role.VIEWER
    engine.dispose()


def test_the_pages_are_served_to_this_machine_alone_unless_told_otherwise(url, monkeypatch):
    started = []
    monkeypatch.setattr("os.execve", lambda _, arguments, __: started.append(arguments))
    command = ["--db", url, "dashboard", "--headless"]

    for more in ([], ["--host", "0.0.0.0"], ["--user", ANNA]):
        assert CliRunner().invoke(main, [*command, *more]).exit_code == 0
    refused = CliRunner().invoke(main, [*command, "--user", ANNA, "--host", "0.0.0.0"])

    addresses = ["127.0.0.1", "0.0.0.0", "127.0.0.1"]
    found = [[one for one in line if "server.address" in one] for line in started]
    assert found == [[f"--server.address={address}"] for address in addresses]
    assert refused.exit_code == 2
    assert "expected 127.0.0.1 with --user" in refused.output
