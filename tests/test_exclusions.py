"""What somebody left out takes no part, says who and why, and comes back."""

import json

import pytest
from click.testing import CliRunner
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from dashboard.cli import main
from db.columns import AlertState
from db.detection import detect_all
from db.errors import UnknownCommitError
from db.exclusions import ExclusionError, Selection, exclude, exclusions, include
from db.ingest import ingest
from db.models import Alert, Result
from db.queries import (
    case_results,
    change_points,
    data_version,
    evidence,
    history,
    overview,
    series,
)
from tests.asv_trees import BENCHMARK, START_S, AsvTree, row

OTHER = "step.Step.time_other"


def sha(number):
    return f"{number + 1:08x}" * 5


@pytest.fixture
def tree(engine, tmp_path, monkeypatch):
    """24 commits; the last ten read twice as slow."""
    monkeypatch.chdir(tmp_path)
    tree = AsvTree(tmp_path / "results")
    tree.benchmark().benchmark(OTHER)
    for number in range(24):
        value = (1.0 if number < 14 else 2.0) + 0.001 * (number % 3)
        date = (START_S + 60 * number) * 1000
        tree.results({BENCHMARK: row(value), OTHER: row(1.0)}, sha(number), date=date)
        tree.line(commit=sha(number))
    ingest(engine, [tree.root])
    return tree


def counted(engine):
    with Session(engine) as session:
        frame = series(session)
        return {
            name: len(history(session, series_id))
            for name, series_id in zip(frame["benchmark"], frame["series_id"], strict=True)
        }


def test_excluded_results_are_in_no_history_comparison_noise_or_evidence(engine, tree):
    made = exclude(engine, Selection(sha(3)[:8]), author="ann", reason="fan was broken")

    assert (made.results, made.what) == (2, sha(3)[:12])
    assert counted(engine) == {BENCHMARK: 23, OTHER: 23}
    with Session(engine) as session:
        assert sha(3) not in history(session, 1, include_dirty=True)["commit"].tolist()
        assert case_results(session, sha(3), include_dirty=True) == []
        assert not [one for one in evidence(session) if sha(3)[:8] in repr(one)]
        assert [one for one in evidence(session) if sha(4)[:8] in repr(one)]


def test_nothing_is_deleted_and_reading_the_files_again_does_not_bring_it_back(engine, tree):
    exclude(engine, Selection(sha(3)), author="ann", reason="fan was broken")

    report = ingest(engine, [tree.root])

    assert (report.new_results, report.unchanged) == (0, 48)
    assert counted(engine)[BENCHMARK] == 23
    with Session(engine) as session:
        assert session.scalar(select(func.count(Result.id))) == 48


def test_an_exclusion_is_lifted_and_both_stay_on_record(engine, tree):
    made = exclude(engine, Selection(sha(3)), author="ann", reason="fan was broken")

    assert include(engine, made.id, author="bob") == 2

    assert counted(engine)[BENCHMARK] == 24
    with Session(engine) as session:
        [one] = exclusions(session)
        assert (one.author, one.reason, one.lifted_by) == ("ann", "fan was broken", "bob")
        assert one.lifted_at > one.created_at
    with pytest.raises(ExclusionError, match="expected an exclusion that holds"):
        include(engine, made.id, author="bob")


def test_only_what_is_named_is_left_out(engine, tree):
    exclude(engine, Selection(sha(3), benchmark="*time_other"), author="ann", reason="why")

    assert counted(engine) == {BENCHMARK: 24, OTHER: 23}


def test_a_change_that_rests_on_excluded_results_goes_with_them(engine, tree):
    detect_all(engine)
    with Session(engine) as session:
        before = data_version(session)
        [found] = overview(session).findings
        assert len(change_points(session, found.series_id)) == 1

    for number in range(14, 24):
        exclude(engine, Selection(sha(number)), author="ann", reason="another card")
    detect_all(engine)

    with Session(engine) as session:
        assert overview(session).findings == ()
        assert change_points(session, found.series_id).empty
        assert session.scalars(select(Alert.state)).all() == [AlertState.WITHDRAWN]
        assert data_version(session) != before


@pytest.mark.parametrize(
    ("selection", "author", "reason", "message"),
    [
        (Selection(sha(3)), " ", "why", "by: expected a text"),
        (Selection(sha(3)), "a" * 201, "why", "by: expected at most 200"),
        (Selection(sha(3)), "ann", "", "reason: expected a text"),
        (Selection(sha(3), machine="other"), "ann", "why", "expected results of .* on other"),
        (Selection(sha(3), benchmark="nope.*"), "ann", "why", "expected results of .* of nope"),
    ],
)
def test_nobody_excludes_nothing_for_no_reason(engine, tree, selection, author, reason, message):
    with pytest.raises(ExclusionError, match=message):
        exclude(engine, selection, author=author, reason=reason)

    assert counted(engine) == {BENCHMARK: 24, OTHER: 24}


def test_an_unknown_commit_is_refused(engine, tree):
    with pytest.raises(UnknownCommitError):
        exclude(engine, Selection("f" * 40), author="ann", reason="why")


def test_the_commands_exclude_list_and_include(tree, database_url):
    def run(*words):
        return CliRunner().invoke(main, ["--db", database_url, "db", *words])

    made = run("exclude", sha(3)[:8], "--by", "ann", "--reason", "fan was broken")
    listed = json.loads(run("excluded", "--json").output)
    lifted = run("include", "1", "--by", "bob")

    assert made.output.startswith("exclusion 1: 2 results of")
    assert (listed[0]["author"], listed[0]["reason"]) == ("ann", "fan was broken")
    assert "2 results count again" in lifted.output
    assert "by ann, lifted by bob: fan was broken" in run("excluded").output
    assert run("include", "1", "--by", "bob").exit_code == 2
