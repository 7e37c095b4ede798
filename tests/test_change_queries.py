"""What changed with a finding, from what is stored, where people read it: compare, comment, alerts."""

import json
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner

from dashboard.cli import main
from tests.asv_trees import BENCHMARK, START_S, AsvTree, row
from tests.daily_history import DAY_S, sha

ROOT = Path(__file__).parent.parent
OLD, NEW = "edfbe52e", "85d3d67e"
DAYS, STEP = 18, 9


def on(path):
    return lambda *arguments: CliRunner().invoke(main, ["--db", f"sqlite:///{path}", *arguments])


@pytest.fixture(scope="module")
def h200(tmp_path_factory):
    """Two commits of one H200: the second packs rows and reads each of them once."""
    run = on(tmp_path_factory.mktemp("h200") / "recorded.db")
    assert run("ingest", str(ROOT / "benchmarks" / "recorded" / "h200")).exit_code == 0
    return run


def test_a_recorded_improvement_is_one_of_bandwidth_and_of_nothing_around_it(h200):
    found = json.loads(h200("compare", OLD, NEW, "--machine", "h200", "--json").stdout)

    changes = {one["name"]: one for one in found["findings"][0]["changes"]}
    assert changes["change_of_bandwidth"]["statement"] == (
        "the bandwidth changed: 112 [106, 119] → 929 [839, 1,040] GB/s, 8.26 [7.32, 9.32] times"
    )
    assert changes["change_of_t0"]["status"] == "untested"
    assert changes["change_of_work"]["statement"].endswith("128 → 260")
    alarms = {name for name, one in changes.items() if one["is_alarm"]}
    assert alarms == {"change_of_bandwidth", "change_of_work"}
    assert changes["change_of_clock"]["status"] == "supported"


def test_a_terminal_and_a_comment_say_the_same_of_it(h200):
    shown = h200("compare", OLD, NEW, "--machine", "h200").stdout
    comment = unescape(h200("compare", OLD, NEW, "--machine", "h200", "--markdown").stdout)

    said = "the bandwidth changed: 112"
    assert said in shown
    assert "T" + said[1:] in comment
    assert "Not it: dependencies, driver and limits, another device, clocks" in comment
    assert (
        comment.index("3 cases faster by about")
        < comment.index(said[1:])
        < comment.index("| case |")
    )


def history(root, *, slow, day_of, requirements=None):
    """Daily results that step to `slow` times; `day_of` gives what else a window says."""
    tree = AsvTree(root).benchmark(BENCHMARK)
    for day in range(DAYS):
        started = START_S + day * DAY_S
        value = 0.010 * (1 + day % 3 / 1000) * (slow if day >= STEP else 1.0)
        declared = {} if requirements is None else requirements(day)
        rows = {BENCHMARK: row(value, started_at=started * 1000)}
        tree.results(rows, sha(day), date=started * 1000, **declared)
        seen = {"started_at": started + 1.0, "ended_at": started + 2.0}
        tree.line(
            window_id=f"{day:032x}",
            run_id=f"run-{day}",
            commit=sha(day),
            median_s=value,
            samples_s=[value] * 2,
            **seen,
            **day_of(day),
        )
    return tree


@pytest.fixture
def alerted(tmp_path):
    """Ingest a history, look for its changes, and show the one alert."""

    def show(**what):
        tree, run = history(tmp_path / "results", **what), on(tmp_path / "found.db")
        assert run("ingest", str(tree.root)).exit_code == 0
        assert run("detect").exit_code == 0
        found = json.loads(run("alerts", "show", "1", "--json").stdout)
        told = ("alerts", "notify", "--webhook", "http://localhost/", "--dry-run")
        return found, run("alerts", "show", "1").stdout, run(*told).stdout

    return show


def clock_of(day):
    clock = 1980.0 * (0.9 if day >= STEP else 1.0)
    seen = {"median": clock, "min": clock, "max": clock, "n": 5, "unit": "MHz"}
    return {"counters": {"sm_clock_mhz": seen}}


def test_an_alert_of_a_clock_says_how_far_it_fell(alerted):
    found, shown, notice = alerted(slow=1 / 0.9, day_of=clock_of)

    assert (found["cause"], found["commit"]) == ("clock", sha(STEP))
    assert found["changes"][0]["name"] == "change_of_clock"
    assert "The SM clock changed by as much as the time: 1,980 → 1,782 MHz. Not it:" in notice
    assert "the SM clock changed by as much as the time: 1,980 → 1,782 MHz" in shown


def test_an_alert_of_a_dependency_says_which_though_its_series_begins_there(alerted):
    def declared(day):
        torch = "2.12.0" if day >= STEP else "2.11.0"
        return {"requirements": {"torch": torch}, "environment": f"venv-torch{torch}"}

    found, shown, _ = alerted(slow=1.2, day_of=lambda _: {}, requirements=declared)

    assert (found["cause"], found["changes"][0]["name"]) == ("dependency", "change_of_dependency")
    assert "torch 2.11.0 → python 3.11, torch 2.12.0" in shown


def test_an_alert_of_the_code_says_what_did_not_move(alerted):
    found, shown, _ = alerted(slow=1.2, day_of=lambda _: {})

    assert found["cause"] == "code"
    assert {one["is_alarm"] for one in found["changes"]} == {False}
    assert "what it runs with is as before" in shown


@pytest.mark.parametrize(
    ("of_head", "cause"),
    [
        ({"device": {"runtime": "torch 2.12.0"}}, "dependency"),
        ({"device": {"driver": "600.1"}}, "environment"),
        ({"counters": clock_of(STEP)["counters"]}, "clock"),
        ({}, "code"),
    ],
)
def test_two_commits_differ_by_what_moved_with_them(tmp_path, of_head, cause):
    """A comparison alone sees that environments differ; telemetry says in what."""
    tree, run = AsvTree(tmp_path / "results").benchmark(BENCHMARK), on(tmp_path / "two.db")
    started = START_S + DAY_S
    sides = {sha(0): (0.010, clock_of(0)), sha(1): (0.010 / 0.9, {**clock_of(0), **of_head})}
    for commit, (value, seen) in sides.items():
        samples = [value * (1 + step / 2000) for step in range(6)]
        rows = {BENCHMARK: row(value, started_at=started * 1000, samples=[samples])}
        tree.results(rows, commit, date=started * 1000)
        for process in range(3):
            tree.line(
                commit=commit,
                run_id=commit[:4],
                pid=process + 1,
                process_number=process,
                median_s=samples[process],
                samples_s=samples,
                started_at=started + 1.0 + process,
                ended_at=started + 1.5 + process,
                **seen,
            )
        started += DAY_S
    assert run("ingest", str(tree.root)).exit_code == 0

    found = json.loads(run("compare", sha(0), sha(1), "--json").stdout)["findings"]

    assert [one["cause"] for one in found] == [cause]
    assert "changed" in found[0]["summary"] or cause == "code"
