"""Old details go; what a change point, a baseline or a person rests on stays."""

import datetime as dt
import json

import pytest
from click.testing import CliRunner
from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from dashboard.cli import main
from db.detection import detect_all
from db.exclusions import Selection, exclude
from db.ingest import ingest
from db.models import Annotation, ChangePoint, Commit, Result, Run, Sample, User, Window
from db.queries import case_results, history
from db.retention import AROUND, BASELINE, prune
from tests.asv_trees import BENCHMARK, START_S, AsvTree, GitRepository, row

COMMITS, STEP = 120, 60
ALL_OLD = dt.datetime(2027, 1, 1, tzinfo=dt.UTC)
NONE_OLD = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)


def sha(number):
    return f"{number + 1:08x}" * 5


@pytest.fixture
def tree(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = AsvTree(tmp_path / "results")
    tree.benchmark()
    for number in range(COMMITS):
        value = (1.0 if number < STEP else 1.5) + 0.001 * (number % 3)
        samples = [[value - 0.001, value + 0.001]]
        date = (START_S + 60 * number) * 1000
        tree.results({BENCHMARK: row(value, samples=samples)}, sha(number), date=date)
    tree.line(commit=sha(20))
    tree.line(commit=sha(STEP))
    ingest(engine, [tree.root])
    detect_all(engine)
    return tree


def sampled(engine):
    """The numbers of the commits whose samples are there."""
    query = (
        select(Commit.sha)
        .join(Result, Result.commit_id == Commit.id)
        .join(Sample, Sample.result_id == Result.id)
        .distinct()
    )
    numbers = {sha(number): number for number in range(COMMITS)}
    with Session(engine) as session:
        return sorted(numbers[one] for one in session.scalars(query))


def points(engine):
    query = select(Commit.sha, ChangePoint.before, ChangePoint.after, ChangePoint.p_value)
    with Session(engine) as session:
        found = session.execute(query.join(Commit, Commit.id == ChangePoint.commit_id))
        return [tuple(one) for one in found]


def test_change_points_and_baselines_keep_their_samples_and_histories_every_point(engine, tree):
    before = points(engine)
    with Session(engine) as session:
        values = history(session, 1)["value"].tolist()

    report = prune(engine, ALL_OLD)

    around = range(STEP - AROUND, STEP + AROUND + 1)
    newest = range(COMMITS - BASELINE, COMMITS)
    assert sampled(engine) == [*around, *newest]
    assert (report.old, report.kept_whole) == (COMMITS, len(around) + len(newest))
    assert report.samples == 2 * (COMMITS - len(around) - len(newest))
    with Session(engine) as session:
        assert history(session, 1)["value"].tolist() == values
        assert len(case_results(session, sha(COMMITS - 1))[0].samples) == 2
    assert detect_all(engine).change_points == len(before) == 1
    assert points(engine) == before


def test_windows_keep_what_they_say_and_lose_their_samples(engine, tree):
    report = prune(engine, ALL_OLD)

    assert report.windows == 1
    with Session(engine) as session:
        kept = dict(session.execute(select(Window.claimed_commit, Window.samples_s)).all())
        assert kept == {sha(20): [], sha(STEP): [0.009, 0.011]}
        assert session.scalars(select(Window.median_s).distinct()).all() == [0.01]


def test_what_is_not_old_stays(engine, tree):
    assert prune(engine, NONE_OLD).samples == 0
    half = dt.datetime.fromtimestamp(START_S + 60 * 30, dt.UTC)

    prune(engine, half)

    assert sampled(engine) == list(range(30, COMMITS))


def test_what_somebody_excluded_or_annotated_stays(engine, tree):
    exclude(engine, Selection(sha(5)), author="ann", reason="fan")
    with engine.begin() as connection:
        user = {"email": "a@example.org", "name": "A", "role": "triager"}
        connection.execute(insert(User), user)
        commit_id = connection.scalar(select(Commit.id).where(Commit.sha == sha(7)))
        note = {"commit_id": commit_id, "user_id": 1, "text": "odd", "created_at": ALL_OLD}
        connection.execute(insert(Annotation), note)

    prune(engine, ALL_OLD)

    assert sampled(engine)[:3] == [5, 7, STEP - AROUND]


def test_a_second_time_and_a_second_reading_change_nothing(engine, tree):
    prune(engine, ALL_OLD)
    left = sampled(engine)

    again = prune(engine, ALL_OLD)
    report = ingest(engine, [tree.root])

    assert (again.samples, again.windows, again.results) == (0, 0, 0)
    assert (report.new_results, sampled(engine)) == (0, left)


def test_old_results_beside_the_main_branch_go_as_a_whole(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = GitRepository(tmp_path / "code")
    shas = [code.commit(f"main {number}", date=START_S + number) for number in range(3)]
    code.git("checkout", "--quiet", "-b", "topic")
    beside = code.commit("topic", date=START_S + 10)
    tree = AsvTree(tmp_path / "results")
    tree.benchmark()
    for number, one in enumerate([*shas, beside]):
        date = (START_S + number) * 1000
        tree.results({BENCHMARK: row(1.0 + number, samples=[[1.0, 2.0]])}, one, date=date)
    for number in range(BASELINE):
        tree.results({BENCHMARK: row(1.0)}, sha(number), date=(START_S + 1000 + number) * 1000)
    tree.line(commit=beside)
    ingest(engine, [tree.root], repository=code.root)

    report = prune(engine, dt.datetime.fromtimestamp(START_S + 100, dt.UTC))

    assert report.results == 1
    with Session(engine) as session:
        assert beside not in history(session, 1)["commit"].tolist()
        assert set(shas) <= set(history(session, 1)["commit"])
        assert session.scalar(select(func.count(Window.id))) == 0
        assert session.scalar(select(func.count(Run.id))) == 3 + BASELINE


def test_the_command_says_what_would_go_and_keeps_it(engine, tree, database_url):
    command = ["--db", database_url, "db", "prune", "--before", "2027-01-01"]

    told = CliRunner().invoke(main, [*command, "--dry-run"])

    assert "would go: " in told.output
    assert sampled(engine) == list(range(COMMITS))
    found = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)
    assert found["samples"] == 2 * (COMMITS - (2 * AROUND + 1) - BASELINE)
