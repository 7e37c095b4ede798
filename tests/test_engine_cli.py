import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.__main__ import main

ROOT = Path(__file__).parent.parent


def run(capsys, *arguments):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_a_prompt_is_decoded_with_its_trees_and_commit_lengths(capsys):
    code, out, err = run(capsys, "hello", "--max-new-tokens", "3")

    assert (code, err) == (0, "")
    assert "step 1: 16 nodes, commit length " in out
    assert "  * 'o'  p=1.000 node 0" in out
    assert out.splitlines()[-2].startswith("commit lengths: ")
    assert re.fullmatch(r"3 tokens in \d+\.\d\d s, \d+\.\d tokens/s", out.splitlines()[-1])


def test_a_regime_is_shown_in_every_step(capsys):
    code, out, _ = run(
        capsys, "hello", "--max-new-tokens", "16", "--regime", "8", "--page-size", "64"
    )

    assert code == 0
    assert out.splitlines()[-2] == "commit lengths: 8 8 (mean 8.00)"
    assert out.count("  * ") == 2 * 8  # the root and seven accepted nodes


def test_the_regime_does_not_change_the_text(capsys):
    texts = {
        next(
            line
            for line in run(capsys, "hello", "--max-new-tokens", "9", *more)[1].splitlines()
            if line.startswith("text:")
        )
        for more in ((), ("--regime", "3"), ("--page-size", "1", "--node-budget", "40"))
    }

    assert len(texts) == 1


def test_a_prompt_of_any_bytes_is_taken(capsys):
    assert run(capsys, "\udcff\N{SNOWMAN}", "--max-new-tokens", "1")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--page-size", "7"], "page_size: expected one of (1, 16, 32, 64, 128), got 7"),
        (["hi", "--page-size", "x"], "--page-size: invalid int value"),
        (["hi", "--backend", "nope"], "attention_backend: expected one of reference, "),
        (["hi", "--node-budget", "0"], "node_budget: expected an integer in 1..512, got 0"),
        (["hi", "--node-budget", "513"], "node_budget: expected an integer in 1..512, got 513"),
        (["hi", "--max-new-tokens", "0"], "max_new_tokens: expected at least 1, got 0"),
        (["hi", "--temperature", "-1"], "temperature: expected"),
        (["hi", "--seed", str(2**63)], "seed: expected an integer in -9223372036854775808"),
        (["hi", "--regime", "9"], "commit_length: expected 1..8, got 9"),
        (["hi", "--regime", "8", "--node-budget", "6"], "node_budget: expected at least 7, got 6"),
        (["hi", "--regime", "2", "--temperature", "1"], "temperature: expected 0 with --regime"),
        (["", "--max-new-tokens", "2"], "prompt: expected at least one token"),
        (["hi" * 2048], "prompt: expected at most"),
        (["hi", "--bogus"], "unrecognized arguments: --bogus"),
        ([], "the following arguments are required: PROMPT"),
    ],
)
def test_a_usage_error_is_one_clear_line_and_exit_code_two(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)

    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_the_module_runs_as_a_command():
    outcome = subprocess.run(
        [sys.executable, "-m", "engine", "hi", "--page-size", "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert outcome.returncode == 2
    assert outcome.stderr.startswith("python -m engine: page_size")
    assert outcome.stdout == ""
