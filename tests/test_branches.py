"""Commits beside the main branch know where they parted from it, and what to be held against."""

import pytest
from click.testing import CliRunner
from sqlalchemy import select
from sqlalchemy.orm import Session

from dashboard.cli import main
from db.baselines import baseline
from db.errors import UnknownCommitError
from db.exclusions import Selection, exclude
from db.ingest import ingest
from db.models import Commit
from db.queries import history
from tests.asv_trees import BENCHMARK, START_S, AsvTree, GitRepository, row


@pytest.fixture
def code(tmp_path, monkeypatch):
    """main: first, second, third, a merge of `done`; beside it `topic` and, from it, `deep/er`."""
    monkeypatch.chdir(tmp_path)
    repository = GitRepository(tmp_path / "code")
    shas = {"first": repository.commit("first"), "second": repository.commit("second")}
    repository.git("checkout", "--quiet", "-b", "done")
    shas["done"] = repository.commit("done")
    repository.git("checkout", "--quiet", "main")
    shas["third"] = repository.commit("third")
    repository.git("checkout", "--quiet", "-b", "topic")
    shas["topic"] = repository.commit("topic")
    shas["topic2"] = repository.commit("topic2")
    repository.git("checkout", "--quiet", "-b", "deep/er")
    shas["deeper"] = repository.commit("deeper")
    repository.git("checkout", "--quiet", "main")
    repository.git("merge", "--quiet", "--no-ff", "-s", "ours", "-m", "merged", "done")
    shas["merged"] = repository.git("rev-parse", "HEAD")
    return repository, shas


@pytest.fixture
def measure(engine, tmp_path, code):
    """Store results of the named commits, in the order of their names here."""
    repository, shas = code
    tree = AsvTree(tmp_path / "results")
    tree.benchmark()

    def measure(*names, root=repository.root):
        for number, name in enumerate(names):
            tree.results({BENCHMARK: row(1.0 + number)}, shas[name], date=START_S * 1000)
        ingest(engine, [tree.root], repository=root)

    return measure


def told(engine, shas):
    names = {sha: name for name, sha in shas.items()}
    with Session(engine) as session:
        rows = session.execute(select(Commit.sha, Commit.merge_base, Commit.side_branch)).all()
    return {names[one.sha]: (names.get(one.merge_base), one.side_branch) for one in rows}


def test_every_commit_has_its_merge_base_and_those_beside_main_a_branch(engine, code, measure):
    measure("first", "done", "topic", "topic2", "deeper", "merged")

    assert told(engine, code[1]) == {
        "first": ("first", None),
        "done": ("second", None),  # in main by now, though not on its first-parent chain
        "topic": ("third", "topic"),
        "topic2": ("third", "topic"),
        "deeper": ("third", "deep/er"),
        "merged": ("merged", None),
    }


def test_the_base_is_the_newest_measured_commit_of_main_that_is_held(engine, code, measure):
    _, shas = code
    measure("first", "second", "topic2", "merged")

    with Session(engine) as session:
        # The third was not measured; the merge was, but after they parted.
        assert baseline(session, shas["topic2"]) == shas["second"]
        assert baseline(session, shas["merged"]) == shas["second"]

    measure("first", "second", "third", "topic2", "merged")

    with Session(engine) as session:
        assert baseline(session, shas["topic2"]) == shas["third"]


def test_excluded_results_and_other_machines_are_no_base(engine, code, measure):
    _, shas = code
    measure("first", "second", "topic")
    exclude(engine, Selection(shas["second"]), author="ann", reason="fan")

    with Session(engine) as session:
        assert baseline(session, shas["topic"], "laptop") == shas["first"]
        with pytest.raises(UnknownCommitError, match="expected results of main up to"):
            baseline(session, shas["topic"], "another")


def test_a_shallow_clone_tells_no_base_and_keeps_the_one_that_is_known(
    engine, code, measure, tmp_path
):
    repository, shas = code
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.root}", str(shallow))
    measure("merged", root=shallow)
    with Session(engine) as session, pytest.raises(UnknownCommitError, match="not shallow"):
        baseline(session, shas["merged"])

    measure("merged", "topic")
    measure("merged", "topic", root=shallow)

    assert told(engine, shas)["topic"] == ("third", "topic")


def test_commits_beside_main_stay_out_of_its_history_and_late_ones_find_their_place(
    engine, code, measure
):
    _, shas = code
    measure("merged", "topic")
    measure("merged", "topic", "third")
    measure("merged", "topic", "third", "first")

    with Session(engine) as session:
        found = history(session, 1, main_only=True)
    assert found["commit"].tolist() == [shas["first"], shas["third"], shas["merged"]]


def test_compare_takes_the_merge_base_by_that_name(engine, database_url, code, measure):
    _, shas = code
    measure("first", "third", "topic", "merged")

    outcome = CliRunner().invoke(
        main, ["--db", database_url, "compare", "merge-base", shas["topic"], "--json"]
    )

    assert f'"base": "{shas["third"]}"' in outcome.output
