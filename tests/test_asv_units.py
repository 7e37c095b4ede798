"""A run is cut into calls of asv, remembers what it has finished, and says how long the rest takes."""

import re

import pytest

from dashboard.asv_commits import code_digest, remove_stale_worktrees
from dashboard.asv_journal import Durations, Journal, keep_results
from dashboard.asv_progress import Progress, duration_text
from dashboard.asv_units import MOST_CASES, selected, units_of, whole
from dashboard.locks import held
from tests.asv_trees import SHA, AsvTree, GitRepository, row

UNKNOWN = "time left unknown, none of it was measured here before"
COMMAND = {"profile": "quick"}
BENCHMARKS = {
    "a.Long.time_it": {"params": [[str(n) for n in range(15)], ["'x'", "'y'"]]},
    "b.Cached.time_it": {"params": [["1", "2"]], "setup_cache_key": "b:7"},
    "b.Empty.time_it": {"params": [["1"], []], "setup_cache_key": "b:7"},
    "b.Other.time_it": {"params": [[str(n) for n in range(20)]], "setup_cache_key": "b:7"},
    "c.Plain.time_it": {"params": []},
    "c.Plain.time_it_too": {"params": [], "setup_cache_key": None},
}


def labels(units):
    return [unit.label for unit in units]


def test_a_benchmark_is_a_call_and_those_of_one_cache_stay_together():
    units = units_of(BENCHMARKS, None)

    assert labels(units) == [
        *(f"a.Long.time_it, part {number}/3" for number in (1, 2, 3)),
        "b.Cached.time_it and 1 of its cache",
        "c.Plain.time_it",
        "c.Plain.time_it_too",
    ]
    assert [len(unit.cases) for unit in units] == [10, 10, 10, 22, 1, 1]
    assert max(len(unit.cases) for unit in units if len(unit.benchmarks) == 1) <= MOST_CASES
    assert len({unit.key for unit in units}) == len(units)


@pytest.mark.parametrize("bench", [None, "^b", r"\('?1", "time_it$", "(?i)PLAIN", "y"])
def test_the_calls_select_together_what_asv_would_and_nothing_twice(bench):
    """asv searches each pattern in the name of each case."""
    cases = [case for found in selected(BENCHMARKS, None).values() for case in found]
    wanted = [case for case in cases if bench is None or re.search(bench, case)]

    chosen = [
        case
        for unit in units_of(BENCHMARKS, bench)
        for case in cases
        if any(re.search(pattern, case) for pattern in unit.patterns)
    ]

    assert sorted(chosen) == sorted(wanted)


def test_a_regular_expression_that_selects_nothing_makes_no_call():
    assert units_of(BENCHMARKS, "nothing") == []


@pytest.fixture
def folder(tmp_path):
    return tmp_path / ".asv"


@pytest.fixture
def tree(folder):
    return AsvTree(folder / "results")


def unit_named(label):
    return next(unit for unit in units_of(BENCHMARKS, None) if unit.label == label)


def test_the_same_command_finds_what_was_finished_and_another_does_not(folder, tree):
    done, begun = unit_named("c.Plain.time_it"), unit_named("c.Plain.time_it_too")
    journal = Journal.open(folder, COMMAND, tree.root)
    journal.end(journal.begin(SHA, done, "run-1"), 2.0, ["c.Plain.time_it"])
    journal.begin(SHA, begun, "run-1")

    again = Journal.open(folder, COMMAND, tree.root)
    other = Journal.open(folder, {"profile": "full"}, tree.root)

    assert again.has(SHA, done)
    assert not again.has(SHA, begun)
    assert not again.has("b" * 40, done)
    assert [entry.failed for entry in again.of_commit(SHA)] == [("c.Plain.time_it",)]
    assert not other.has(SHA, done)
    again.forget()
    assert not Journal.open(folder, COMMAND, tree.root).has(SHA, done)


@pytest.mark.parametrize(("age_ms", "is_finished"), [(-1000, False), (1000, True)])
def test_what_asv_wrote_before_the_run_could_say_so_is_finished(folder, tree, age_ms, is_finished):
    unit = unit_named("c.Plain.time_it")
    entry = Journal.open(folder, COMMAND, tree.root).begin(SHA, unit, "run-1")
    tree.results({unit.benchmarks[0]: row([None], started_at=entry.started_ms + age_ms)})

    journal = Journal.open(folder, COMMAND, tree.root)

    assert journal.has(SHA, unit) == is_finished
    assert [one.failed for one in journal.of_commit(SHA)] == [unit.benchmarks] * is_finished


def test_a_torn_result_file_is_put_back(folder, tree):
    path = tree.results({"c.Plain.time_it": row()})
    whole_text = path.read_text()
    keep_results(folder, tree.root, SHA)
    path.write_text(whole_text[:50])
    new = path.with_name(f"{SHA[:8]}-other.json")
    new.write_text("{")

    Journal.open(folder, COMMAND, tree.root)

    assert path.read_text() == whole_text
    assert not new.exists()


def test_a_whole_result_file_is_left_alone(folder, tree):
    path = tree.results({"c.Plain.time_it": row(0.1)})
    keep_results(folder, tree.root, SHA)
    tree.results({"c.Plain.time_it": row(0.2)})
    newer = path.read_text()

    Journal.open(folder, COMMAND, tree.root)

    assert path.read_text() == newer


def progress_of(folder, **more):
    told = []
    arguments = {"num_commits": 1, "time_limit_s": None, "echo": told.append} | more
    return Progress(Durations.open(folder, "quick"), **arguments), told


def test_the_rest_is_estimated_from_what_was_measured_before(folder):
    units = units_of(BENCHMARKS, "^[ac]")
    progress, told = progress_of(folder)
    progress.tell(0, SHA, units, 0)
    progress.measured(units[0], 100.0)

    later, told_later = progress_of(folder, num_commits=3)
    later.tell(1, SHA, units, 1)

    assert told == [
        f"[1/5] a.Long.time_it, part 1/3 (10 cases); {UNKNOWN}",
    ]
    # 10 s a case: 22 cases of this commit, 32 of the next one
    assert told_later == [
        "[commit 2/3 aaaaaaaa, 2/5] a.Long.time_it, part 2/3 (10 cases); about 9 min left"
    ]


def test_nothing_begins_that_would_not_end_in_time_but_the_first(folder):
    units = units_of(BENCHMARKS, "^[ac]")
    clock = iter([0.0, 30.0, 50.0])
    progress, _ = progress_of(folder, time_limit_s=45.0, now_s=lambda: next(clock))

    assert progress.has_time_for(units[0])
    progress.measured(units[-1], 10.0)
    assert progress.has_time_for(units[-2])
    assert not progress.has_time_for(units[-2])


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (89, "89 s"), (100, "2 min"), (5400, "1 h 30 min")]
)
def test_a_duration_reads_as_one_says_it(seconds, text):
    assert duration_text(seconds) == text


def test_an_undivided_call_selects_what_the_user_does():
    assert whole(None).patterns == ()
    assert whole("^step").patterns == ("^step",)
    assert whole("^step").key != whole(None).key


def test_code_that_changed_is_another_command(tmp_path):
    repository = GitRepository(tmp_path)
    repository.commit("one")
    before = code_digest(tmp_path, with_engine=True)
    without = code_digest(tmp_path, with_engine=False)
    (tmp_path / "notes.txt").write_text("no code", encoding="utf-8")
    assert code_digest(tmp_path, with_engine=True) == before

    (tmp_path / "engine" / "new.py").write_text("", encoding="utf-8")

    assert code_digest(tmp_path, with_engine=True) != before
    assert code_digest(tmp_path, with_engine=False) == without


def test_worktrees_of_killed_runs_are_removed_and_others_stay(tmp_path):
    repository = GitRepository(tmp_path / "checkout")
    repository.commit("one")
    stale, own = repository.root / ".asv" / "worktrees" / "abc", tmp_path / "own"
    for path in (stale, own):
        repository.git("worktree", "add", "--quiet", "--detach", str(path))

    assert remove_stale_worktrees(repository.root) == 1

    assert not stale.exists()
    assert own.exists()
    assert len(repository.git("worktree", "list").splitlines()) == 2


def test_a_lock_is_free_again_at_the_end(tmp_path):
    told = []
    for _ in range(2):
        with held(tmp_path / "lock", "the device cpu", told.append):
            assert "process " in (tmp_path / "lock").read_text()
    assert told == []
