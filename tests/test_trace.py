"""A trace says enough to follow every step again, and to run it again."""

import io
import itertools
import json
import math
import time

import pytest
import torch

from engine.__main__ import main
from engine.config import EngineConfig
from engine.decoder import Engine
from engine.draft_tree import build_from_log_probs
from engine.observer import StageClock
from engine.presets import preset
from engine.sampling import Sampling
from engine.trace import StepRecord, TraceHead, TraceWriter
from engine.tree_text import SHOWN_NODES, TextStream, quoted, tree_lines

PROMPT = "def main("
NEW_TOKENS = 21
HEAD = TraceHead(EngineConfig(), Sampling(), 0, ((1, 2),))


def traced(tmp_path, capsys, *flags):
    """Run the command; return the head, the steps and the text."""
    path = tmp_path / "steps.jsonl"
    arguments = (PROMPT, "--max-new-tokens", str(NEW_TOKENS), "--trace", str(path), *flags)
    assert main([*arguments, "--show", "text"]) == 0
    head, *steps = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return head, steps, capsys.readouterr().out


def record_of(appended, log_probs=((-0.1, -3.0), (-0.2, -0.5)), budget=4):
    """A step whose tree has both tokens at both depths."""
    rows = torch.tensor(log_probs)
    tokens = torch.tensor([[65, 66], [67, 68]])
    tree = build_from_log_probs(rows, tokens, root_token=64, node_budget=budget)
    return StepRecord(1, 0, 5, tree, appended, (-0.5,) * len(appended), None)


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("mode", ["ddtree", "dflash", "ar"])
def test_a_trace_can_be_followed_step_by_step(tmp_path, capsys, mode, temperature):
    head, steps, text = traced(tmp_path, capsys, "--mode", mode, "--temperature", temperature)

    assert head["config"]["mode"] == mode
    assert head["config"]["max_context"] == len(PROMPT) + NEW_TOKENS  # not a limit of its own
    assert head["prompts"] == [list(PROMPT.encode())]
    root, position = head["prompts"][0][-1], len(PROMPT) - 1
    for number, step in enumerate(steps, start=1):
        tokens, parents, path = step["token_ids"], step["parents"], [0, *step["accepted"]]
        assert (step["step"], step["sequence"]) == (number, 0)
        assert (step["position"], tokens[0]) == (position, root)
        assert [parents[child] for child in path] == [-1, *path[:-1]]
        assert [tokens[node] for node in path[1:]] == step["appended"][:-1]
        assert [step["depths"][node] for node in path] == list(range(len(path)))
        assert len(step["logprobs"]) == len(step["appended"]) == len(path)
        assert len(step["path_log_probs"]) == len(tokens)
        assert step["stage_seconds"].keys() == {"draft", "build", "verify", "commit"}
        root, position = step["appended"][-1], position + len(step["appended"])
    appended = itertools.chain.from_iterable(step["appended"] for step in steps)
    assert bytes(list(appended)[:NEW_TOKENS]).decode() == text


def test_a_traces_logprobs_are_the_targets_own(tmp_path, capsys):
    _, steps, _ = traced(tmp_path, capsys, "--temperature", "0.7")

    appended = [token for step in steps for token in step["appended"]]
    logits = preset("tiny").target.logits([*PROMPT.encode(), *appended])[len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(appended)[:, None])[:, 0]
    logprobs = [value for step in steps for value in step["logprobs"]]
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-3)


def test_the_head_of_a_trace_is_enough_to_run_it_again(tmp_path, capsys):
    head, steps, _ = traced(
        tmp_path, capsys, "--temperature", "0.9", "--top-k", "40", "--seed", "5"
    )
    models = preset("tiny")

    engine = Engine(models.target, models.drafter, EngineConfig(**head["config"]))
    batch = engine.prefill(
        head["prompts"], sampling=Sampling(**head["sampling"]), seed=head["seed"]
    )

    for step in steps:
        assert engine.step(batch).token_ids == (tuple(step["appended"]),)


def test_the_accepted_path_is_found_by_its_tokens():
    record = record_of((65, 68, 99))

    accepted = record.accepted

    assert [int(record.tree.token_ids[node]) for node in accepted] == [65, 68]
    assert int(record.tree.parents[accepted[1]]) == accepted[0]
    assert record_of((99,)).accepted == ()


def test_a_number_that_json_lacks_is_refused():
    record = StepRecord(1, 0, 5, record_of((99,)).tree, (99,), (math.nan,), None)
    writer = TraceWriter(io.BytesIO(), HEAD)

    with pytest.raises(ValueError, match="JSON"):
        writer.write(record)


class Trickle(io.BytesIO):
    """A pipe that takes a few bytes at a time."""

    def write(self, data):
        return super().write(data[:7])


def test_a_line_is_written_whole_even_if_the_file_takes_it_in_parts():
    files = [io.BytesIO(), Trickle()]
    for file in files:
        TraceWriter(file, HEAD).write(record_of((65, 68, 99)))

    assert files[0].getvalue() == files[1].getvalue()
    assert files[0].getvalue().count(b"\n") == 2


def test_a_clock_gives_each_stage_its_own_time():
    clock = StageClock(torch.device("cpu"))
    for stage, seconds in (("draft", 0.2), ("build", 0.0)):
        clock.start(stage)
        time.sleep(seconds)
        clock.stop(stage)

    assert clock.seconds().keys() == {"draft", "build"}
    assert clock.seconds()["draft"] >= 0.2 > clock.seconds()["build"]


def test_text_is_the_same_wherever_steps_cut_it():
    text = "\xe9t\xe9 \N{SNOWMAN} \N{GRINNING FACE}"
    data = list(text.encode())
    for size in range(1, len(data)):
        stream = TextStream()
        parts = [stream.feed(data[start : start + size]) for start in range(0, len(data), size)]

        assert "".join(parts) + stream.close() == text


def test_bytes_that_are_no_character_are_marked_in_the_stream():
    stream = TextStream()

    assert stream.feed([0xFF, 65, 256, 0xE2, 0x98]) == "\N{REPLACEMENT CHARACTER}A"
    assert stream.close() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (b"a b", "'a b'"),
        ("\xe9".encode(), "'\xe9'"),
        (b"\xc3", r"'\xc3'"),
        (b"\n\t\0", r"'\n\t\x00'"),
        (b"\\n", r"'\\n'"),
        ((65, 256, 259, 66), "'A<256><259>B'"),
        ((), "''"),
    ],
)
def test_tokens_are_shown_as_what_they_stand_for(tokens, shown):
    assert quoted(list(tokens)) == shown


def test_a_tree_is_drawn_with_children_below_their_parents():
    assert tree_lines(record_of((65, 68, 99))) == [
        "step 1: 4 nodes, commit length 3",
        "  * '@'  p=1.000 node 0",
        "  *   'A'  p=0.905 node 1",
        "        'C'  p=0.741 node 2",
        "  *     'D'  p=0.549 node 3",
        "      'B'  p=0.050 node 4",
        "  appended 'ADc'",
    ]


def test_a_large_tree_is_drawn_in_part_but_with_its_whole_path():
    width = 40
    rows = torch.arange(width, dtype=torch.float32).neg()[None]
    tokens = torch.arange(65, 65 + width)[None]
    tree = build_from_log_probs(rows, tokens, root_token=64, node_budget=width)
    lines = tree_lines(StepRecord(1, 0, 5, tree, (100, 99), (-0.5, -0.5), None))

    assert "  *   'd'  p=0.000 node 36" in lines
    assert len(lines) == 1 + (1 + SHOWN_NODES + 1) + 2
    assert f"    ... {width - SHOWN_NODES - 1} more" in lines
