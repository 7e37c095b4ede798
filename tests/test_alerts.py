"""Alerts from the first detection to what people say of them, and who is told."""

import datetime as dt
import json
import shutil

import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session

from dashboard.cli import main
from db.alert_queries import alert, alerts, precision, stale
from db.alerts import LIVE, judge, settle, update_alerts
from db.cases import Verdict
from db.columns import AlertState
from db.detection import detect_all
from db.errors import AlertError
from db.models import AlertEvent, ChangePoint, User
from db.session import downgrade, upgrade
from tests.asv_trees import START_S
from tests.daily_history import DAY_S, History, sha

ME = "me@example.org"


@pytest.fixture
def told(tmp_path):
    return History(tmp_path / "results").add(1.0, 12)


def listed(engine, states=tuple(AlertState)):
    with Session(engine) as session:
        return alerts(session, states)


def say(engine, number, state, author=ME, note=None):
    with Session(engine) as session, session.begin():
        judge(session, number, AlertState(state), author=author, note=note)


def test_a_slowdown_opens_one_alert_that_a_second_pass_keeps(engine, told):
    told.add(1.2, 8).detect(engine)
    detect_all(engine)

    (found,) = listed(engine)

    assert (found.state, found.commit, found.owner) == ("open", sha(12), f"commit {sha(12)[:12]}")
    assert found.relative_change == pytest.approx(0.2, abs=0.01)
    assert [(one.state, one.author) for one in found.history] == [("open", None)]


def test_an_improvement_opens_none(engine, told):
    told.add(0.8, 8).detect(engine)

    assert listed(engine) == []


def test_a_slowdown_that_went_before_anybody_looked_opens_none(engine, told):
    told.add(1.2, 8).add(1.0, 8).detect(engine)

    assert listed(engine) == []


def test_an_alert_closes_when_its_level_returns_and_says_where(engine, told):
    told.add(1.2, 8).detect(engine)
    say(engine, listed(engine)[0].id, "acknowledged", note="looking")

    told.add(1.0, 8).detect(engine)

    (found,) = listed(engine)
    assert [(one.state, one.author, one.note) for one in found.history] == [
        ("open", None, None),
        ("acknowledged", ME, "looking"),
        ("fixed", None, f"the level returned at {sha(20)[:12]}"),
    ]


def test_a_list_reads_the_history_of_what_it_lists_alone(engine, told):
    """What was closed over the years costs nothing."""
    told.add(1.2, 8).add(1.5, 8).detect(engine)
    second, first = (found.id for found in listed(engine))
    for state in ("acknowledged", "confirmed", "expected"):
        say(engine, first, state)
    read = []
    event.listen(AlertEvent, "load", read_by := lambda row, _: read.append(row.alert_id))
    try:
        open_ones = listed(engine, LIVE)
        with Session(engine) as session:
            one = alert(session, second)
    finally:
        event.remove(AlertEvent, "load", read_by)

    assert ([found.id for found in open_ones], one.id) == ([second], second)
    assert read == [second, second]


def test_a_pass_reads_no_series_that_can_neither_open_nor_close_an_alert(engine, told):
    told.add(1.2, 8).add(0.9, 8).detect(engine)
    told_of = listed(engine)
    read = []
    event.listen(ChangePoint, "load", read_by := lambda row, _: read.append(row.id))
    try:
        with Session(engine) as session:
            update_alerts(session, dt.datetime(2026, 12, 1, tzinfo=dt.UTC))
            before = list(read)
            session.execute(text("UPDATE change_points SET cause = 'noise'"))
            session.expire_all()
            update_alerts(session, dt.datetime(2026, 12, 1, tzinfo=dt.UTC))
    finally:
        event.remove(ChangePoint, "load", read_by)

    assert (told_of, len(before), len(read)) == ([], 2, 2)


def test_half_of_the_way_back_is_not_fixed(engine, told):
    told.add(1.2, 8).detect(engine)
    told.add(1.1, 8).detect(engine)

    assert [found.state for found in listed(engine)] == ["open"]


def test_what_somebody_settled_is_not_opened_or_closed_again(engine, told):
    told.add(1.2, 8).detect(engine)
    say(engine, listed(engine)[0].id, "expected")

    told.add(1.0, 8).detect(engine)

    assert [found.state for found in listed(engine)] == ["expected"]


def test_an_alert_is_withdrawn_with_its_change_point_and_returns_with_it(engine, told):
    told.add(1.2, 8).detect(engine)
    (first,) = listed(engine)
    with Session(engine) as session, session.begin():
        session.execute(text("UPDATE results SET dirty = :yes"), {"yes": True})
    detect_all(engine)
    (gone,) = listed(engine)
    with Session(engine) as session, session.begin():
        session.execute(text("UPDATE results SET dirty = :no"), {"no": False})

    report = detect_all(engine)

    assert (first.state, gone.state, listed(engine)[0].state) == ("open", "withdrawn", "open")
    assert (report.new, report.gone, len(listed(engine))) == (0, 0, 1)


@pytest.mark.parametrize("state", ["withdrawn", "open"])
def test_a_state_that_nobody_may_set_is_refused(engine, told, state):
    told.add(1.2, 8).detect(engine)

    with pytest.raises(AlertError, match=r"expected (one that people set|another state)"):
        say(engine, listed(engine)[0].id, state)


def test_a_viewer_may_not_judge(engine, told):
    told.add(1.2, 8).detect(engine)
    with Session(engine) as session, session.begin():
        session.add(User(email="guest@example.org", name="guest", role="viewer"))

    with pytest.raises(AlertError, match=r"the viewer guest@example\.org"):
        say(engine, listed(engine)[0].id, "confirmed", author="guest@example.org")


@pytest.mark.parametrize(
    ("verdict", "state"),
    [("regression", "confirmed"), ("no change", "false positive"), ("inconclusive", "open")],
)
def test_a_re_run_settles_what_nobody_decided(engine, told, verdict, state):
    told.add(1.2, 8).detect(engine)
    (found,) = listed(engine)
    now = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)

    with Session(engine) as session, session.begin():
        first = settle(session, found.id, Verdict(verdict), now, note="re-run")
    say(engine, found.id, "expected")
    with Session(engine) as session, session.begin():
        assert not settle(session, found.id, Verdict.NO_CHANGE, now, note="again")

    (after,) = listed(engine)
    assert first == (state != "open")
    assert after.history[-2].state == state
    assert after.state == "expected"


def test_precision_counts_what_people_said_last(engine, told):
    told.add(1.2, 8).add(1.5, 8).add(2.0, 8).detect(engine)
    first, second, _ = (found.id for found in listed(engine))
    say(engine, first, "false positive")
    say(engine, first, "confirmed")
    say(engine, second, "false positive")

    with Session(engine) as session:
        found = precision(session)

    assert (found.real, found.false_positives, found.unjudged) == (1, 1, 1)
    assert found.value == 0.5
    assert found.at_least == pytest.approx(0.0253, abs=1e-3)


def test_a_runner_that_measured_nothing_for_long_is_stale(engine, told):
    told.detect(engine)
    last = dt.datetime.fromtimestamp(START_S + 11 * DAY_S, dt.UTC)
    with Session(engine) as session:
        soon = stale(session, hours=48, now=last + dt.timedelta(hours=47))
        late = stale(session, hours=48, now=last + dt.timedelta(hours=49))

    assert soon == []
    assert [(one.what, round(one.hours)) for one in late] == [("runner laptop", 49)]


def on(path):
    """The command on a database."""
    return lambda *arguments: CliRunner().invoke(main, ["--db", f"sqlite:///{path}", *arguments])


@pytest.fixture(scope="module")
def detected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detected")
    told, run = History(folder / "results").add(1.0, 12).add(1.2, 8), on(folder / "found.db")
    assert run("ingest", str(told.tree.root)).exit_code == 0
    assert run("detect").exit_code == 0
    return folder / "found.db"


@pytest.fixture
def call(detected, tmp_path):
    return on(shutil.copy(detected, tmp_path / "found.db"))


def test_a_webhook_hears_of_a_confirmed_alert_once(call, httpserver):
    httpserver.expect_request("/secret-path", method="POST").respond_with_data("ok")
    hook = ("alerts", "notify", "--webhook", httpserver.url_for("/secret-path"))
    assert "nothing new" in call(*hook).output
    assert call("alerts", "set", "1", "confirmed", "--author", ME).exit_code == 0

    first, second = call(*hook), call(*hook)

    assert "1 alert told" in first.output
    assert "secret" not in first.output
    assert "nothing new" in second.output
    ((request, _),) = httpserver.log
    sent = json.loads(request.data)
    assert sent["text"].startswith(f"1 case slower on laptop since {sha(12)[:12]}, cause unknown")
    assert sent["alerts"][0]["state"] == "confirmed"


def test_a_webhook_that_refuses_is_told_again(call, httpserver):
    httpserver.expect_ordered_request("/").respond_with_data("no", status=503)
    httpserver.expect_ordered_request("/").respond_with_data("ok")
    call("alerts", "set", "1", "confirmed", "--author", ME)
    hook = ("alerts", "notify", "--webhook", httpserver.url_for("/"))

    refused, taken = call(*hook), call(*hook)

    assert (refused.exit_code, taken.exit_code) == (1, 0)
    assert "expected status 2xx, got 503" in refused.output
    assert "1 alert told" in taken.output


def test_the_command_lists_shows_and_judges(call):
    call("alerts", "set", "1", "false positive", "--author", ME, "--note", "warm-up")

    open_ones, every = call("alerts", "list").output, call("alerts", "list", "--all").output
    shown = call("alerts", "show", "1").output
    strict = json.loads(call("alerts", "list", "--all", "--json").output)

    assert open_ones == "no alerts\n"
    assert "1 false positive: step.Step.time_step +20.0 %" in every
    assert f"false positive by {ME}: warm-up" in shown
    assert strict[0]["history"][1]["note"] == "warm-up"
    assert "precision: 0 %" in call("alerts", "precision").output.replace("0%", "0 %")


def test_an_unknown_alert_and_stale_data_have_their_status(call):
    unknown = call("alerts", "show", "99")
    old = call("alerts", "stale", "--hours", "0.001")

    assert (unknown.exit_code, old.exit_code) == (2, 5)
    assert "alert: expected the number of a stored one, got 99" in unknown.output
    assert "stale: runner laptop: newest 2026-" in old.output


def test_alerts_of_the_release_before_keep_their_history(empty_url):
    upgrade(empty_url, "0002")
    engine = create_engine(empty_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(
            text("PRAGMA foreign_keys = OFF")
            if engine.name == "sqlite"
            else text("SET session_replication_role = replica")
        )
        connection.execute(text("INSERT INTO alerts VALUES (1, 1, 'resolved', NULL, '2026-01-01')"))
        connection.execute(
            text("INSERT INTO alert_events VALUES (1, 1, NULL, 'resolved', 'n', '2026-01-01')")
        )

    def states():
        with engine.connect() as connection:
            rows = "SELECT state FROM alerts UNION ALL SELECT state FROM alert_events"
            return [one for (one,) in connection.execute(text(rows))]

    upgrade(empty_url)
    after = states()
    downgrade(empty_url, "0002")

    assert (after, states()) == (["fixed"] * 2, ["resolved"] * 2)
    engine.dispose()


def test_views_say_everything_in_strict_json(engine, told):
    told.add(1.2, 8).detect(engine)
    with Session(engine) as session:
        view = alert(session, listed(engine)[0].id)

    assert json.loads(json.dumps(view.to_dict(), allow_nan=False))["machine"] == "laptop"
