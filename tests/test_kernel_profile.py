"""What a profiler says of one launch, without a GPU, and that each figure is there with one."""

import json
import os
from dataclasses import asdict

import pytest
import torch

from benchmarks._peer_cells import PeerCell
from tests.kernel_profile import METRICS, ProfileError, parsed, profiled, table
from tests.kernel_times import main

CELL = "1x2-c5-b1-p1-shuffled"
NAMES = ["ID", "Process ID", "Kernel Name", "CC", "device__attribute_display_name", *METRICS]
STALLS = {"long_scoreboard": "4.40", "selected": "1", "wait": "1.35", "barrier": "1,000.5",
          "gmma": "0.06", "membar": "0", "mio_throttle": "n/a", "imc_miss": "0.2"}  # fmt: skip
UNITS = ["", "", "", "", "", "register/thread", "byte/block", "Kbyte/block", "%", "%", "byte",
         "byte", "%", "%", "inst", "inst", "inst"]  # fmt: skip
FIRST = ["0", "7", "tree_attention", "9.0", "NVIDIA H200", "168", "0", "229.376",
         "12.49", "12.5", "75,497,472", "1,000,000", "81.25", "45.83", "(!) n/a", "12",
         "9.8"]  # fmt: skip
SECOND = ["1", "7", "merge", "9.0", "NVIDIA H200", *["1"] * len(METRICS)]


def lines_of_csv():
    """What `ncu` writes for two launches, only the first of which has stalls."""
    stalls = [f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS]
    rows = [NAMES + stalls, UNITS + ["inst"] * len(STALLS), FIRST + list(STALLS.values()),
            SECOND + ["n/a"] * len(STALLS)]  # fmt: skip
    text = "\n".join(",".join(f'"{word}"' for word in row) for row in rows)
    return f"==PROF== Connected to process 7 (/usr/bin/python3.11)\n{text}\n==PROF== Disconnected\n"


def test_launches_are_read_in_base_units_and_what_is_not_counted_is_left_out():
    first, second = parsed(lines_of_csv())

    assert (first.kernel, second.kernel) == ("tree_attention", "merge")
    assert first.values["launch__shared_mem_per_block_dynamic"] == 229376.0
    assert first.values["dram__bytes_read.sum"] == 75497472.0
    assert "smsp__sass_inst_executed_op_local_ld.sum" not in first.values
    assert "device__attribute_display_name" not in first.values
    assert second.stalls == []


def test_the_five_longest_stalls_are_told_and_no_cycle_of_issue():
    assert parsed(lines_of_csv())[0].stalls == [
        "barrier 1000.50", "long_scoreboard 4.40", "wait 1.35", "imc_miss 0.20", "gmma 0.06"
    ]  # fmt: skip


def test_the_table_has_a_column_for_each_launch():
    lines = table(parsed(lines_of_csv())).splitlines()

    assert lines[0] == "|  | tree_attention | merge |"
    assert "| registers a thread | 168 | 1 |" in lines
    assert "| occupancy / at most, % | 12.5 / 12.5 | 1.0 / 1.0 |" in lines
    assert "| DRAM read / written, MB | 75.50 / 1.00 | 0.00 / 0.00 |" in lines
    assert "| local loads / stores, instructions | - / 12 | 1 / 1 |" in lines
    assert "| stall 1, cycles of these | barrier 1000.50 | - |" in lines


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts a program of that name first on the path; it keeps its words and logs a text."""

    def make(text, status=0):
        (tmp_path / "said").write_text(text, encoding="utf-8")
        (tmp_path / "ncu").write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\n'
            f'while [ "$1" != --log-file ]; do shift; done\n'
            f'cp {tmp_path}/said "$2"\nexit {status}\n',
            encoding="utf-8",
        )
        (tmp_path / "ncu").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "words"

    return make


def test_one_launch_is_profiled_from_the_command(ncu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = ncu(lines_of_csv())

    assert main(["--profile", "--cells", CELL, "--implementations", "triton_split"]) == 0

    assert "| registers a thread | 168 | 1 |" in capsys.readouterr().out
    said = words.read_text(encoding="utf-8").splitlines()
    assert said[said.index("--profile-from-start") + 1] == "off"
    assert said[-3:-1] == ["tests.kernel_worker", "launch"]
    cell = asdict(PeerCell(1, 2, 5, 1, 1, "shuffled"))
    plan = {"op": "tree_attention", "cell": cell, "name": "triton_split", "is_fp8": False}
    assert json.loads(said[-1]) == plan


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n==PROF== x\n", 0, "ERR_NVGPUCTRPERM"),
        ("==WARNING== No kernels were profiled.\n", 0, "No kernels were profiled"),
        (lines_of_csv() + "==ERROR== The application returned an error code\n", 1, "error code"),
        ("", 1, "nothing"),
    ],
)
def test_what_ncu_refuses_is_told_in_its_words(ncu, tmp_path, text, status, message):
    ncu(text, status)

    with pytest.raises(ProfileError, match=f"ncu: expected launches, got .*{message}"):
        profiled(["true"], tmp_path / "log.csv")


def test_without_ncu_there_is_one_clear_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main(["--profile", "--cells", CELL]) == 2
    error = "ncu: expected Nsight Compute on the path, found none (for --profile)\n"
    assert capsys.readouterr().err == error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_figure_of_a_launch_is_counted_on_a_gpu(capsys):
    assert main(["--profile"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if " - " in line] == []
