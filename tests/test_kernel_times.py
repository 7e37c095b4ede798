"""Kernels of several checkouts timed in turns, without a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks._peer_cells import PeerCell
from dashboard.asv_errors import AsvFailedError, AsvRunError, RequestError
from engine.kernels import OPS
from tests import kernel_worker
from tests.engine_repository import git
from tests.kernel_cells import DEFAULT_CELLS, cells_of
from tests.kernel_table import HERE, Race, Timing
from tests.kernel_times import ROOT, examined, main, parser, race

CELL = "1x2-c5-b1-p1-shuffled"
SLEEP_S = 0.05
REFERENCE = Path("engine") / "kernels" / "tree_attention" / "reference.py"
DEFINED = "\ndef run(problem: Problem) -> None:\n"


@pytest.fixture(scope="module")
def slower(tmp_path_factory):
    """A second checkout, whose reference waits before it begins."""
    folder = tmp_path_factory.mktemp("checkouts") / "slower"
    git(ROOT, "worktree", "add", "--quiet", "--detach", folder, "HEAD")
    text = (folder / REFERENCE).read_text(encoding="utf-8")
    before, _, after = text.partition(DEFINED)
    docstring, rest = after.split("\n", 1)
    slept = f"{docstring}\n    __import__('time').sleep({SLEEP_S})\n{rest}"
    (folder / REFERENCE).write_text(f"{before}{DEFINED}{slept}", encoding="utf-8")
    yield folder
    git(ROOT, "worktree", "remove", "--force", folder)


@pytest.fixture(scope="module")
def command(slower, tmp_path_factory):
    """The command, called once for all; gives how it ended and its file."""
    folder = tmp_path_factory.mktemp("times")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kernel_times", "--against", slower, "--cells", CELL,
         "--implementations", "reference", "nobody", "--rounds", "3", "--samples", "2",
         "--json", folder / "times.json"],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return ended, json.loads((folder / "times.json").read_text(encoding="utf-8"))


def test_each_checkout_runs_its_own_engine(command, slower):
    _, found = command
    one = found["races"][0]
    least_s = {name: min(map(min, one["timings"][name]["turns_s"])) for name in one["timings"]}

    assert least_s[str(slower)] > SLEEP_S > least_s[HERE]
    assert one["differences"][str(slower)]["high"] < 0.0


def test_every_round_has_its_samples_of_every_checkout(command):
    _, found = command

    for timing in found["races"][0]["timings"].values():
        assert [len(turn) for turn in timing["turns_s"]] == [2, 2, 2]
        assert timing["error_rel"] < 1e-5


def test_an_engine_that_is_not_its_commits_is_called_dirty(command, slower):
    ended, found = command
    commit = git(ROOT, "rev-parse", "HEAD")
    (other,) = (one for one in found["checkouts"] if one["name"] == str(slower))

    assert other["commit"] == commit
    assert other["is_dirty"]
    assert f"{slower}: {commit[:12]}, dirty" in ended.stdout


def test_the_table_says_what_was_measured_where_and_with_what(command):
    ended, found = command

    assert found["device"]["name"] in ended.stdout
    assert "torch 2." in ended.stdout
    assert "NVRTC 13." in ended.stdout
    assert "on a CPU, which say nothing of a kernel" in ended.stdout
    assert f"| {CELL} | reference | {HERE} |" in ended.stdout
    assert found["races"][0]["floor"]["floor_s"] > 0.0


def test_who_cannot_be_timed_is_named_and_the_command_fails(command):
    ended, _ = command

    assert f"not timed: {CELL}, nobody, {HERE}: nobody: KeyError: 'nobody'" in ended.stdout
    assert ended.returncode == 1


class Diary:
    """A process that writes down when it was asked."""

    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def ask(self, do, **told):
        self.asked.append((self.name, do))
        timed = {"samples_s": {"x": [1e-6]}, "validity": {"x": []}}
        return {"open": {"x": {"error_rel": 0.0}}, "floor": {"floor_s": 1e-6}, "take": timed}[do]


def test_who_begins_a_round_alternates():
    asked = []
    sides = {name: Diary(name, asked) for name in (HERE, "other")}
    words = ["--implementations", "x", "--rounds", "4"]

    race(sides, CELL, {}, parser().parse_args(words))

    assert [name for name, do in asked if do == "take"] == [HERE, "other", "other", HERE] * 2


@pytest.mark.parametrize("do", ["open", "take"])
def test_the_checkout_whose_process_ends_is_named(do):
    class Ending(Diary):
        def ask(self, asked, **told):
            if asked == do:
                raise AsvFailedError("its last words")
            return super().ask(asked, **told)

    sides = {HERE: Diary(HERE, []), "other": Ending("other", [])}

    with pytest.raises(AsvRunError, match=r"^other: its last words$"):
        race(sides, CELL, {}, parser().parse_args(["--implementations", "x"]))


def test_a_difference_is_that_of_turns_of_one_round():
    """Both drift to twice the time; within a round one takes a tenth more, but for noise."""
    drift, noise = [1.0, 1.3, 1.6, 2.0], [1.001, 0.999, 1.0, 1.0]
    there = [[one] * 2 + [9.0 * one] for one in drift]  # an outlier each, which no median minds
    here = [[1.1 * one * less] * 3 for one, less in zip(drift, noise, strict=True)]
    timings = {HERE: Timing(here, 0.0, []), "other": Timing(there, 0.0, [])}

    found = Race(CELL, "x", timings, {}, {}).difference("other")

    assert found.relative_change == pytest.approx(0.1, abs=1e-5)
    assert 0.097 < found.low < 0.1 < found.high < 0.103


def test_cells_are_named_as_the_suites_of_peers_name_them():
    uneven = PeerCell(8, 9, 16384, 32, 64, "shuffled", uneven=True)
    own = PeerCell(3, 5, 77, 2, 16, "in_order")

    found = cells_of("tree_attention", ["^8x9-.*-uneven-p64", own.label])

    assert found == {cell.label: asdict(cell) for cell in (uneven, own)}
    for op, texts in DEFAULT_CELLS.items():
        assert list(cells_of(op, texts)) == texts


@pytest.mark.parametrize(
    ("op", "texts", "is_fp8", "message"),
    [
        ("tree_attention", ["8x9@64k"], False, "expected a label or a part of one, got '8x9@64k'"),
        ("tree_attention", ["08x9-c1-b1-p1-shuffled"], False, "as 8x9-c1-b1-p1-shuffled, got 08"),
        ("tree_attention", ["("], False, "expected a regular expression"),
        ("tree_attention", ["8x9-c1-b1-p1-in_order"], True, "whose pages are shuffled"),
        ("grouped_experts", ["0"], False, "expected numbers of tokens, got '0'"),
        ("grouped_experts", ["9"], True, "one without cached rows"),
    ],
)
def test_what_is_no_cell_is_refused(op, texts, is_fp8, message):
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        cells_of(op, texts, is_fp8=is_fp8)


def test_a_folder_without_an_engine_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert main(["--cells", CELL, "--against", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("checkout: expected a folder with an engine, got ")


def test_a_process_with_another_engine_is_refused(tmp_path):
    with pytest.raises(
        AsvRunError, match=r"other: expected the engine of .*other/engine, got .*main"
    ):
        examined("other", tmp_path / "other", {"folder": "/main/engine"})


@pytest.mark.parametrize(
    ("op", "cell", "is_fp8"),
    [
        ("tree_attention", asdict(PeerCell(2, 9, 70, 2, 16, "shuffled")), True),
        ("tree_attention", asdict(PeerCell(2, 9, 70, 2, 16, "in_order")), False),
        ("grouped_experts", 3, False),
    ],
)
def test_a_wrong_result_is_not_timed(op, cell, is_fp8, monkeypatch):
    right = OPS[op].implementations["reference"]

    def wrong(**arguments):
        found = right(**arguments)
        (found[0] if isinstance(found, tuple) else found)[0, 0] *= 1.01
        return found

    both = {"reference": right, "wrong": wrong}
    monkeypatch.setitem(kernel_worker.OPS, op, replace(OPS[op], implementations=both))
    kernels = kernel_worker.Kernels()

    known = kernels.do_open(op, cell, list(both), is_fp8)

    assert known["reference"]["error_rel"] < 1e-5
    assert known["wrong"]["absent"].startswith("wrong: wrong result: expected rows within 1e-05")
    assert list(kernels.do_take(2)["samples_s"]) == ["reference"]


def test_fp8_rows_have_fewer_bytes_in_the_floor():
    cell = asdict(PeerCell(2, 9, 70, 2, 16, "shuffled"))
    plain, fp8 = (kernel_worker.attention(cell, is_fp8=one).cost for one in (False, True))

    assert plain.kv_bytes - fp8.kv_bytes == 2 * (70 + 9) * (576 * 4 - 656)


def test_results_of_both_ops_are_held_to_their_own_tolerance():
    """`check` is that of tree attention."""
    for dtype in (torch.float32, torch.bfloat16):
        allowed = {OPS[op].tolerance(dtype).output_rel for op in kernel_worker.PROBLEMS}
        assert len(allowed) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("words", [[], ["--fp8"], ["--op", "grouped_experts"]])
def test_equal_code_takes_equal_time_on_a_gpu(words, tmp_path, capsys):
    file = tmp_path / "times.json"

    assert main([*words, "--against", str(ROOT), "--json", str(file)]) == 0

    found = json.loads(file.read_text(encoding="utf-8"))
    shift = found["races"][0]["differences"][str(ROOT)]
    assert abs(shift["relative_change"]) < 0.03
    assert "graph replays between events" in capsys.readouterr().out
