"""The overview's tables: what matters as text, the whole of it once somebody opens it."""

import json

import pytest

from tests import pages_database as demo
from tests.test_pages import opened, unfolded, words

HEALTH = "overview.machines"
COMMITS = "overview.commits"
NUM_LISTED = demo.NUM_COMMITS + 1  # with the one that was recorded elsewhere
GAP, JOINED = "\N{NO-BREAK SPACE}", "-\N{WORD JOINER}"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    address = f"sqlite:///{tmp_path_factory.mktemp('overview')}/demo.db"
    demo.build(address)
    return address


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory):
    """A database in which no commit has a subject, and one machine has measured nothing."""
    address = f"sqlite:///{tmp_path_factory.mktemp('unnamed')}/demo.db"
    demo.build(address)
    demo.rewrite(
        address,
        "UPDATE commits SET subject = NULL",
        "INSERT INTO machines (name) VALUES ('idle')",
    )
    return address


@pytest.fixture
def show(url, monkeypatch):
    """Open the overview and let the test open what is folded in it."""

    def show_page(database=url):
        monkeypatch.setenv("DDTREE_BENCH_DB", database)
        return opened("overview", database)

    return show_page


def cells(app):
    """Give the titles and the rows of each table that is text; what joins a text is taken out."""
    tables = [one.value.splitlines() for one in app.markdown if "\n| ---" in one.value]
    return [
        [plain(line).strip("| ").split(" | ") for line in (lines[0], *lines[2:])]
        for lines in tables
    ]


def plain(line):
    return line.replace("\\", "").replace(JOINED, "-").replace(GAP, " ")


def labels(app):
    return [one.label for one in app.expander]


def test_no_table_is_loaded_before_somebody_opens_it(show):
    app = show()

    assert not app.exception
    assert len(cells(app)) == 2
    assert not app.dataframe


def test_the_machines_are_told_with_their_health(show):
    titles, *rows = cells(show())[0]

    assert titles == [
        *("Machine", "Last result", "Noise (%)", "Throttled (%)", "Series", "Stale"),
        "Newest commit",
    ]
    told = {name: rest for name, *rest in rows}
    assert list(told) == [demo.HISTORY_MACHINE, demo.REPRODUCTION, demo.INCIDENT]
    # Every result of the demo has quartiles 0.5 % below and 0.6 % above it.
    assert told[demo.HISTORY_MACHINE] == [
        *("2026-05-28 20:26 UTC", "0.55", "–", "3", "1", "2026-03-18")  # noqa: RUF001
    ]
    assert told[demo.REPRODUCTION][2:5] == ["0", "8", "0"]


def test_a_machine_that_measured_nothing_has_dashes_and_changes_no_other_row(show, unnamed):
    rows = cells(show(unnamed))[0]

    rows.remove(["idle", *["–"] * 6])  # noqa: RUF001
    assert rows == cells(show())[0]


def test_what_the_heads_of_the_machines_mean_is_said_below_and_in_the_whole_table(show):
    app = show()
    said = words(app)
    whole = unfolded(app, HEALTH).dataframe[0]

    heads = json.loads(whole.proto.columns)
    for column, help_text in (
        ("noise_pct", "Half the quartiles' distance, of its newest results"),
        ("throttled_pct", "newest windows of telemetry in which a clock was held down"),
        ("stale", "without a result on the machine's newest commit"),
    ):
        assert help_text in heads[column]["help"]
        assert help_text.replace("the machine's", "their machine's") in said


def test_the_whole_table_of_machines_has_numbers_to_sort(show):
    machines = unfolded(show(), HEALTH).dataframe[0].value.set_index("machine")

    assert machines.loc[demo.HISTORY_MACHINE, "stale"] == 1
    assert machines.loc[demo.INCIDENT, "stale"] == 0
    assert machines.loc[demo.HISTORY_MACHINE, "noise_pct"] == pytest.approx(0.55)
    assert machines.loc[demo.REPRODUCTION, "throttled_pct"] == 0
    assert machines.loc[demo.HISTORY_MACHINE, "last_result"].year == 2026


def test_the_newest_commits_are_told_and_all_of_them_are_in_the_whole_table(show):
    app = show()
    titles, *rows = cells(app)[1]

    assert titles == ["Commit", "Date", "Subject"]
    assert len(rows) == 10
    newest = demo.sha(demo.NUM_COMMITS - 1)[:10]
    assert rows[0] == [f"`{newest}`", "2026-03-18", "engine: change number 59 [x] *y*"]
    assert f"All {NUM_LISTED}, as a table to sort, search and keep" in labels(app)
    whole = unfolded(app, COMMITS).dataframe[0].value
    assert len(whole) == NUM_LISTED
    assert whole["subject"].iloc[0] == "engine: change number 59 [x] *y*"


@pytest.mark.parametrize("is_named", [True, False])
def test_a_column_of_subjects_is_shown_only_where_a_commit_has_one(
    show, url, unnamed, monkeypatch, is_named
):
    monkeypatch.setattr("dashboard.overview_page.MOST_LINES", 1)
    app = show(url if is_named else unnamed)

    titles, *rows = cells(app)[1]
    assert ("Subject" in titles) is is_named
    assert {len(row) for row in rows} == {len(titles)}
    for key in (COMMITS, f"overview.findings.{demo.sha(demo.STEP_AT)}"):
        unfolded(app, key)
    assert len(app.dataframe) == 2
    for table in app.dataframe:
        assert ("subject" in table.value) is is_named


def test_findings_that_no_line_has_are_in_tables_that_are_loaded_once_opened(show, monkeypatch):
    monkeypatch.setattr("dashboard.overview_page.MOST_LINES", 1)
    monkeypatch.setattr("dashboard.overview_page.MOST_GROUPS", 1)
    app = show()

    assert labels(app)[:2] == ["1 more at this commit", "Findings at 1 more commit"]
    assert not app.dataframe
    (more,) = unfolded(app, f"overview.findings.{demo.sha(demo.STEP_AT)}").dataframe
    assert more.value["change"].tolist() == ["+8.9 %"]
    assert more.value["params"].tolist() == ["context=1024, page_size=1"]
    rest = unfolded(app, "overview.findings.rest").dataframe[-1].value
    assert rest["cause"].tolist() == ["dependency"]
    assert rest["commit"].tolist() == [demo.sha(15)[:10]]
