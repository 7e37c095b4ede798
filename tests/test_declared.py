"""Benchmarks that a commit's suites declare, read without running them."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from dashboard.asv_errors import RequestError
from dashboard.declared import declared, deleted, with_deleted
from db.cases import Verdict
from tests.asv_trees import GitRepository
from tests.compared import REGRESSION, case, comparison
from tests.engine_repository import make_repository, plain

ROOT = Path(__file__).parent.parent
BASES = """
class Timed:
    def time_one(self): ...
class Private(Timed):
    def track_two(self): ...
    def helper(self): ...
"""
SUITES = """
from benchmarks import _base
from benchmarks._base import Private
class Public(Private):
    time_again = Private.track_two
class Generic(_base.Timed[int]): ...
class _Hidden:
    def time_hidden(self): ...
class Round(Round):
    def mem_round(self): ...
def time_alone(): ...
def setup(): ...
"""


@pytest.fixture
def repository(tmp_path):
    found = GitRepository(tmp_path / "code")
    (found.root / "benchmarks").mkdir()
    return found


def committed(repository, **texts):
    for name, text in texts.items():
        (repository.root / "benchmarks" / f"{name}.py").write_bytes(text.encode("latin-1"))
    return repository.commit("suites")


@pytest.mark.exhaustive
def test_our_suites_declare_what_python_finds_in_them(tmp_path):
    (commit,) = make_repository(tmp_path / "project", [plain()])

    found = set()
    for path in sorted((ROOT / "benchmarks").glob("[!_]*.py")):
        module = importlib.import_module(f"benchmarks.{path.stem}")
        for name, one in inspect.getmembers(module, inspect.isclass):
            if one.__module__ == module.__name__ and not name.startswith("_"):
                methods = [
                    each for each in dir(one) if re.match("time_|track_|mem_|peakmem_", each)
                ]
                found |= {f"{path.stem}.{name}.{method}" for method in methods}
    assert len(found) > 20
    assert declared(tmp_path / "project", commit) == found


def test_inherited_and_renamed_methods_count_and_private_classes_do_not(repository):
    commit = committed(repository, _base=BASES, suite=SUITES)

    assert declared(repository.root, commit) == {
        "suite.Public.time_again",
        "suite.Public.time_one",
        "suite.Public.track_two",
        "suite.Generic.time_one",
        "suite.Round.mem_round",
        "suite.time_alone",
    }


def test_what_is_deleted_is_named_and_what_is_new_is_not(repository):
    base = committed(repository, _base=BASES, suite=SUITES)
    same = repository.commit("engine", code="else")
    head = committed(repository, suite=SUITES.replace("time_alone", "time_other"))

    assert deleted(repository.root, base, same) == frozenset()
    assert deleted(repository.root, base, head) == {"suite.time_alone"}


@pytest.mark.parametrize(
    "text",
    ["def (", "x = 1\x00", "# \xff", "(" * 5000, "x = " + "-" * 100_000 + "1", "raise SystemExit"],
)
def test_a_suite_that_is_no_python_is_refused_and_never_run(repository, text):
    base = committed(repository, suite=SUITES)
    head = committed(repository, suite=text)

    if text.startswith("raise"):
        assert deleted(repository.root, base, head) == declared(repository.root, base)
        return
    with pytest.raises(RequestError, match="expected Python at"):
        deleted(repository.root, base, head)


def test_a_commit_that_is_not_there_is_refused(repository):
    base = committed(repository, suite=SUITES)

    with pytest.raises(RequestError, match="expected the commits"):
        deleted(repository.root, base, "f" * 40)


def test_a_deleted_benchmark_stands_beside_what_was_measured():
    steady = case(Verdict.NO_CHANGE, benchmark="a.B.time_c")

    found = with_deleted(comparison(steady), {"a.B.time_c", "a.B.time_d"})

    assert [one.key.name for one in found.cases] == ["a.B.time_d", steady.key.name]
    assert (found.verdict, found.counts[Verdict.REMOVED]) == (Verdict.REMOVED, 1)
    assert with_deleted(comparison(REGRESSION), ()).verdict is Verdict.REGRESSION
