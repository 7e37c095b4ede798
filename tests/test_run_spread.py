"""Two runs of the same code: what lies how far apart, and what a naive threshold would flag."""

import json

import pytest

from benchmarks._run_spread import SpreadError, main, newest_pair


def line(run, case, median, *, commit="a" * 40, at=0.0):
    return {
        "run_id": run, "commit": commit, "benchmark": "step.Step.time_step", "params": [case],
        "median_s": median, "started_at": at,
    }  # fmt: skip


def two_runs():
    first = {"1": (0.010, 0.012), "2": (0.020, 0.020), "3": (0.5, 0.5)}
    second = {"1": (0.0111, 0.0111), "2": (0.0194, 0.0196), "3": (0.53, 0.56), "4": (1.0, 1.0)}
    return [
        line(run, case, median, at=at)
        for at, (run, cases) in enumerate((("old", first), ("new", second)))
        for case, medians in cases.items()
        for median in medians
    ]


def test_cases_of_both_runs_are_compared_by_the_median_of_their_processes():
    found = newest_pair(two_runs())

    assert found.runs == ("old", "new")
    assert [case.params for case in found.cases] == [("1",), ("2",), ("3",)]
    assert [case.relative for case in found.cases] == pytest.approx([0.1 / 11, -0.025, 0.09])
    assert found.median_rel == pytest.approx(0.025)
    assert (found.worst.params, found.num_flagged) == (("3",), 1)


def test_other_commits_and_older_runs_are_left_out():
    older = [line("older", "1", 9.0, at=-1.0), line("other", "1", 9.0, commit="b" * 40, at=5.0)]

    assert newest_pair([*older, *two_runs()]).runs == ("old", "new")


def test_one_run_is_no_pair():
    with pytest.raises(SpreadError, match="expected two of one commit"):
        newest_pair(two_runs()[:3])


def test_the_command_reads_sidecars(tmp_path, capsys):
    text = "".join(json.dumps(one) + "\n" for one in two_runs())
    (tmp_path / "run.jsonl").write_text(text, encoding="utf-8")

    assert main([str(tmp_path)]) == 0
    assert "median 2.50%, worst +9.00%" in capsys.readouterr().out
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["flagged"] == 1
    assert main([str(tmp_path / "nowhere")]) == 2
