"""`python -m engine`: the same text in every mode, clean streams, one line for what is wrong."""

import dataclasses
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.__main__ import main
from engine.config import CACHE_LAYOUTS, MODES
from engine.presets import _DRAFTERS, _TARGETS, random_drafter, random_target
from engine.weights import save_drafter, save_target

ROOT = Path(__file__).parent.parent
SNOWMEN = "\N{SNOWMAN}" * 28  # three bytes each; the pair goes on with characters of three bytes


def run(capsys, *arguments):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def text_of(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--show", "text")
    assert code == 0
    return out


def command(*arguments, **streams):
    # A suite started in the background of a shell has interrupts ignored, and so would its children.
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "engine", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **streams,
    )


@pytest.fixture(scope="module")
def byte_pair(tmp_path_factory):
    """A random pair whose vocabulary is the bytes alone, without any special token."""
    folder = tmp_path_factory.mktemp("pair")
    config = dataclasses.replace(_TARGETS["nano"], vocab_size=256)
    target = random_target(config, device="cpu", dtype=torch.float32, seed=1)
    drafter = dataclasses.replace(_DRAFTERS["nano"], vocab_size=256, mask_token_id=255)
    save_target(target, folder / "target")
    save_drafter(random_drafter(drafter, target, seed=2), folder / "drafter")
    return folder


def test_a_prompt_is_decoded_with_its_trees_and_commit_lengths(capsys):
    code, out, err = run(capsys, "hello", "--max-new-tokens", "3")

    assert (code, err) == (0, "")
    assert "step 1: 16 nodes, commit length " in out
    assert "  * 'o'  p=1.000 node 0" in out
    assert out.splitlines()[-2].startswith("commit lengths: ")
    assert re.fullmatch(r"3 tokens in \d+\.\d\d s, \d+\.\d tokens/s", out.splitlines()[-1])


@pytest.mark.parametrize("sampling", [(), ("--temperature", "1", "--seed", "4", "--top-p", "0.9")])
def test_every_mode_and_layout_gives_the_same_text(capsys, sampling):
    texts = {
        text_of(
            capsys,
            *("def main(", "--max-new-tokens", "24", *sampling),
            *("--mode", mode, "--cache-layout", layout),
        )
        for mode in MODES
        for layout in CACHE_LAYOUTS
    }

    assert len(texts) == 1
    assert len(texts.pop()) == 24


def test_seed_and_filters_reach_the_noise(capsys):
    flags = ("Once upon a time", "--max-new-tokens", "24", "--temperature", "1")

    greedy = text_of(capsys, *flags[:3])
    texts = {
        text_of(capsys, *flags, *more)
        for more in (("--seed", "1"), ("--seed", "2"), ("--min-p", "0.5"))
    }

    assert len(texts | {greedy}) == 4
    assert text_of(capsys, *flags, "--top-k", "1") == greedy


def test_only_the_text_goes_to_standard_output_if_asked_for(capsys):
    code, out, err = run(capsys, "def main(", "--max-new-tokens", "20", "--show", "text")
    trees = run(capsys, "def main(", "--max-new-tokens", "20")[1]

    assert code == 0
    assert f"text: {out!r}" in trees.splitlines()
    assert re.fullmatch(
        r"\ncommit lengths: [\d ]+ \(mean [\d.]+\)\n20 tokens in [\d.]+ s, [\d.]+ tokens/s\n", err
    )


class Chunks(io.StringIO):
    """Standard output that remembers what was written at once."""

    def __init__(self):
        super().__init__()
        self.chunks = []

    def write(self, text):
        self.chunks.append(text)
        return super().write(text)


def test_characters_are_streamed_when_their_last_byte_has_come(monkeypatch):
    out = Chunks()
    monkeypatch.setattr(sys, "stdout", out)

    main([SNOWMEN, "--mode", "ar", "--max-new-tokens", "9", "--show", "text"])

    assert len(out.getvalue().encode()) == 9
    assert "\N{REPLACEMENT CHARACTER}" not in out.getvalue()
    # A byte a step, then the end: a character comes with every third one.
    assert [len(chunk) for chunk in out.chunks] == [0, 0, 1, 0, 0, 1, 0, 0, 1, 0]


def test_a_character_that_is_never_finished_is_shown_as_missing(capsys):
    out = text_of(capsys, SNOWMEN, "--mode", "ar", "--max-new-tokens", "4")

    assert len(out) == 2
    assert out[1] == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("mode", MODES)
def test_a_text_ends_where_the_target_says_so(capsys, mode):
    noise = ("--temperature", "100", "--seed", "49")  # any token may come; here the eighth ends it

    code, out, err = run(capsys, "hello", *noise, "--mode", mode, "--show", "text")

    assert code == 0
    assert out == bytes((219, 208, 170, 111, 119, 110, 214)).decode(errors="replace")
    assert "\n7 tokens in " in err


def test_a_regime_is_shown_in_every_step(capsys):
    code, out, _ = run(
        capsys, "hello", "--max-new-tokens", "16", "--regime", "8", "--page-size", "64"
    )

    assert code == 0
    assert out.splitlines()[-2] == "commit lengths: 8 8 (mean 8.00)"
    assert out.count("  * ") == 2 * 8  # the root and seven accepted nodes


@pytest.mark.parametrize(
    "flags",
    [("--regime", "3"), ("--regime", "8", "--mode", "dflash"), ("--page-size", "128")],
)
def test_the_way_does_not_change_the_text(capsys, flags):
    plain = ("hello", "--max-new-tokens", "9")

    assert text_of(capsys, *plain, *flags) == text_of(capsys, *plain)


def test_a_prompt_of_any_bytes_is_taken(capsys):
    assert run(capsys, "\udcff\N{SNOWMAN}", "--max-new-tokens", "1")[0] == 0


def test_a_prompt_may_come_from_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def main(")))

    assert text_of(capsys, "-", "--max-new-tokens", "12") == text_of(
        capsys, "def main(", "--max-new-tokens", "12"
    )


def test_a_checkpoint_over_bytes_is_decoded_like_the_shipped_one(capsys, byte_pair):
    target = ("--target", str(byte_pair / "target"), "--max-new-tokens", "20")
    drafter = ("--drafter", str(byte_pair / "drafter"))

    alone = text_of(capsys, "hello", *target, "--mode", "ar")
    together = text_of(capsys, "hello", *target, *drafter)

    assert together == alone
    assert alone != text_of(capsys, "hello", "--max-new-tokens", "20")


def test_a_target_of_other_tokens_is_refused(capsys, tmp_path):
    target = random_target(_TARGETS["nano"], device="cpu", dtype=torch.float32, seed=0)
    save_target(target, tmp_path)

    code, out, err = run(capsys, "hi", "--target", str(tmp_path), "--mode", "ar")

    assert (code, out) == (2, "")
    assert "target: expected a vocabulary of at least 256, got 23" in err


def test_a_drafter_of_another_target_is_refused(capsys, byte_pair):
    code, out, err = run(capsys, "hi", "--drafter", str(byte_pair / "drafter"))

    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--page-size", "7"], "page_size: expected one of (1, 16, 32, 64, 128), got 7"),
        (["hi", "--page-size", "x"], "--page-size: invalid int value"),
        (["hi", "--mode", "tree"], "mode: expected one of ddtree, dflash, ar, got 'tree'"),
        (["hi", "--cache-layout", "x"], "cache_layout: expected one of paged, hybrid, got 'x'"),
        (["hi", "--backend", "nope"], "attention_backend: expected one of reference, "),
        (["hi", "--moe-backend", "best"], "moe_backend: expected one of reference, triton, cuda"),
        (["hi", "--moe-backend", "triton"], "backend triton: expected CUDA tensors, got cpu ones"),
        (["hi", "--moe-backend", "triton", "--regime", "2"], "backend triton: expected CUDA"),
        (["hi", "--node-budget", "0"], "node_budget: expected an integer in 1..512, got 0"),
        (["hi", "--node-budget", "513"], "node_budget: expected an integer in 1..512, got 513"),
        (["hi", "--max-new-tokens", "0"], "max_new_tokens: expected an integer >= 1, got 0"),
        (["hi", "--temperature", "-1"], "temperature: expected"),
        (["hi", "--top-p", "2"], "top_p: expected"),
        (["hi", "--seed", str(2**63)], "seed: expected an integer in -9223372036854775808"),
        (["hi", "--regime", "9"], "commit_length: expected 1..8, got 9"),
        (["hi", "--regime", "8", "--node-budget", "6"], "node_budget: expected at least 7, got 6"),
        (["hi", "--regime", "2", "--temperature", "1"], "temperature: expected 0 with --regime"),
        (["hi", "--regime", "2", "--mode", "ar"], "mode: expected one with drafts for --regime"),
        (["hi", "--target", "nowhere"], "drafter: expected a folder beside --target, got none"),
        (["hi", "--target", "nowhere", "--mode", "ar"], "nowhere"),
        (["hi", "--drafter", "nowhere"], "nowhere"),
        (["hi", "--trace", "nowhere/steps.jsonl"], "No such file or directory: 'nowhere/steps"),
        (["hi", "--trace", "."], "Is a directory: '.'"),
        (["", "--max-new-tokens", "2"], "prompt: expected at least one byte, got none"),
        (["hi" * 65536], "prompt and new tokens: expected at most 131072, got 131072 + 64"),
        (["hi", "--max-new-tokens", "99999999"], "expected at most 131072, got 2 + 99999999"),
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
    process = command("hi", "--page-size", "7", text=True)
    out, err = process.communicate(timeout=180)

    assert process.returncode == 2
    assert err.startswith("python -m engine: page_size")
    assert out == ""


def test_an_interrupt_leaves_a_trace_of_whole_lines_and_no_traceback(tmp_path):
    trace = tmp_path / "steps.jsonl"
    process = command("a b c " * 8, "--max-new-tokens", "50000", "--trace", str(trace))
    while not process.stdout.readline().startswith(b"step 3:"):
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=180)

    assert (process.returncode, err) == (130, b"")
    written = trace.read_text(encoding="utf-8")
    head, *steps = map(json.loads, written.splitlines())
    assert written.endswith("\n")
    assert head["schema"] == 1
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert len(steps) >= 3


def test_output_that_nobody_reads_ends_the_command_quietly():
    process = command("a b c " * 8, "--max-new-tokens", "50000")
    process.stdout.readline()
    process.stdout.close()

    assert (process.wait(timeout=180), process.stderr.read()) == (141, b"")
    process.stderr.close()
