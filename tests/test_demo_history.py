"""The demo history is made without a checkout of its own, the same everywhere, and kept whole."""

import importlib.util
import itertools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import _demo_history as demo
from benchmarks._demo_history import PLAN, DemoError, Edit, edited, keep, make
from tests.asv_trees import AsvTree, row

ROOT = Path(__file__).parent.parent
SMALL = (
    Edit("a slower line", (("a.txt", "fast", "slow"),)),
    Edit("two changes of a file", (("a.txt", "slow", "fast"), ("a.txt", "", "end\n"))),
)


def git(folder, *words):
    outcome = subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.org", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return outcome.stdout.strip()


def read_lines(path):
    return (ROOT / path).read_text("utf-8").splitlines()


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    (root / "a.txt").write_text("fast\n", encoding="utf-8")
    git(root, "init", "--quiet", ".")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "base")
    return root


def test_the_plan_fits_this_checkout():
    texts = {}

    def read(path):
        return texts.get(path) or (ROOT / path).read_text("utf-8")

    for edit in PLAN:
        texts |= edited(edit, read)

    subjects = [edit.subject for edit in PLAN]
    assert len(subjects) == len(set(subjects)) >= 24
    for slow, mended in ((demo.SLOW_SPLIT, demo.MENDED_SPLIT), (demo.SLOW_WALK, demo.MENDED_WALK)):
        places = [0, subjects.index(slow), subjects.index(mended), len(subjects)]
        assert min(after - before for before, after in itertools.pairwise(places)) >= 8
    assert texts[demo.TREES] == (ROOT / demo.TREES).read_text("utf-8")


def test_while_it_is_slow_a_long_context_is_one_programs(tmp_path):
    (edit,) = [one for one in PLAN if one.subject == demo.SLOW_SPLIT]
    texts = edited(edit, lambda path: (ROOT / path).read_text("utf-8"))
    (tmp_path / "slow_split.py").write_text(texts[demo.SPLIT], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("slow_split", tmp_path / "slow_split.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.choose_num_splits(SimpleNamespace(capacity=65536)) == 1
    assert texts[demo.SPLIT].splitlines()[:190] == read_lines(demo.SPLIT)[:190]  # kernels stay


def test_what_is_there_twice_or_not_at_all_is_no_place_for_a_change():
    edit = Edit("e", (("a.txt", "x", "y"),))
    with pytest.raises(DemoError, match=r"a\.txt: expected 'x' once, got it 2 times"):
        edited(edit, lambda _: "x x")


def test_a_branch_is_the_same_wherever_it_is_made_and_touches_no_checkout(repository, tmp_path):
    made = make(repository, "HEAD", SMALL, "demo")
    other = tmp_path / "other"
    git(tmp_path, "clone", "--quiet", str(repository), str(other))

    assert make(other, "HEAD", SMALL, "again") == made == make(repository, "HEAD", SMALL, "demo")
    assert git(repository, "log", "--reverse", "--format=%s", made).splitlines() == [
        "a slower line",
        "two changes of a file",
    ]
    assert git(repository, "show", "demo:a.txt") == "fast\nend"
    assert git(repository, "status", "--porcelain") == ""
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_what_is_kept_is_of_the_range_and_names_no_path(repository, tmp_path):
    commits = make(repository, "HEAD", (*SMALL, SMALL[0]), "demo")
    shas = git(repository, "rev-list", "--reverse", commits).split()[:2]  # the last is not measured
    tree = AsvTree(repository / ".asv" / "results", machine="demo").benchmark()
    python = "existing-py_home_me_python"
    for sha in (*shas, git(repository, "rev-parse", "HEAD")):
        tree.results(
            {"step.Step.time_step": row()}, sha, environment=python, python="/home/me/python"
        )
        tree.line(commit=sha, machine="demo", started_at=float(sha in shas))
    to = tmp_path / "kept"
    count = keep(repository, commits, "demo", to)

    assert count == 2
    order = (to / "commits.tsv").read_text("utf-8").splitlines()
    assert [line.split("\t")[2] for line in order] == [edit.subject for edit in SMALL]
    files = sorted(path.name for path in (to / "demo").glob("*-*.json"))
    assert files == sorted(f"{sha[:8]}-existing-py_usr_bin_python3.json" for sha in shas)
    told = (to / "telemetry" / "demo.jsonl").read_text("utf-8").splitlines()
    assert {json.loads(one)["commit"] for one in told} == set(shas)
    assert not [path for path in to.rglob("*.json*") if "/home/me" in path.read_text("utf-8")]


def test_nothing_measured_is_nothing_to_keep(repository, tmp_path):
    commits = make(repository, "HEAD", SMALL, "demo")
    AsvTree(repository / ".asv" / "results", machine="demo")
    with pytest.raises(DemoError, match="expected some of"):
        keep(repository, commits, "demo", tmp_path / "kept")
