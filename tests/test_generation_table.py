"""Decoding by mode: rates are of the newest run, energies of the processes that watched."""

import json

import pytest

from benchmarks._generation_table import BENCHMARK, main, newest, table
from benchmarks._run_spread import SpreadError


def line(mode, median_s, *, run="run-2", joule=None, started_at=2.0, length=1.0):
    counters = {} if joule is None else {"energy_per_run_j": {"median": joule}}
    return {
        "benchmark": BENCHMARK,
        "params": ["'prose'", f"'{mode}'", "0.0", "'paged'"],
        "run_id": run,
        "started_at": started_at,
        "median_s": median_s,
        "new_tokens": 50,
        "commit_length": length,
        "counters": counters,
    }


LINES = [
    line("ar", 9.0, run="run-1", started_at=1.0),
    line("ar", 1.0, joule=100.0),
    line("ar", 1.2),  # a process that did not watch
    line("ddtree", 0.5, joule=60.0, length=2.5),
]


def test_modes_of_a_text_stand_beside_each_other():
    plain, tree = newest(LINES)

    assert (plain.mode, plain.tokens_per_s, plain.joule_per_token) == ("ar", 50 / 1.1, 2.0)
    assert (tree.mode, tree.tokens_per_s, tree.joule_per_token) == ("ddtree", 100.0, 1.2)
    assert tree.tokens_per_step == 2.5
    assert table([plain, tree])[3] == "| prose | 0 | paged | ddtree | 100.0 | 2.20 | 2.50 | 1.2 |"


def test_what_was_not_measured_is_no_number():
    (tree,) = newest([line("ddtree", 0.5)])

    assert table([tree])[2] == "| prose | 0 | paged | ddtree | 100.0 | - | 1.00 | - |"
    with pytest.raises(SpreadError, match="expected a run of generation"):
        newest([{**LINES[0], "new_tokens": None}])


def test_the_command_reads_sidecars(tmp_path, capsys):
    text = "\n".join(map(json.dumps, LINES)) + "\n"
    (tmp_path / "run.jsonl").write_text(text, encoding="utf-8")

    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == 4
    assert main([str(tmp_path / "other")]) == 2
