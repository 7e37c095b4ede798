"""Floors of suites count the experts that rows chose, heard once outside the samples."""

import operator

import pytest
import torch

from benchmarks._experts_hit import hit_by_layer, mean_hit, step_choices
from benchmarks._identity import SuiteError
from benchmarks.generation import Generation
from benchmarks.prefill import Prefill, RankChunk
from benchmarks.step import RankStep, Step
from engine import StepShape, preset, step_bytes
from engine.moe import chosen_experts
from tests.ranks import SMALL


class SmallRankStep(RankStep):
    version = "1"
    rank = SMALL
    moe_backend = "reference"
    graphs = "buffers"


class SmallChunk(RankChunk):
    version = "1"
    rank = SMALL
    moe_backend = "reference"


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    for module in ("_suite", "_step_case", "generation", "prefill", "step"):
        monkeypatch.setattr(f"benchmarks.{module}.DEVICE", "cpu")


def floor_of(suite, num_rows, hit):
    target = suite.engine.target
    shape = StepShape(suite.context_tokens, num_rows, itemsize=target.dtype.itemsize)
    return step_bytes(target, suite.engine.drafter, shape, experts_hit=hit).bytes


@pytest.mark.parametrize(
    ("suite", "params", "num_rows"),
    [
        (Step(), (64, 16, 4, "reference"), 17),
        (SmallRankStep(), (64, 16, "paged", 8, "reference"), 9),
    ],
)
def test_the_bytes_of_a_step_hold_what_its_rows_chose(suite, params, num_rows):
    suite.build(*params)
    suite.reset()
    with chosen_experts() as chosen:
        suite.engine.step(suite.batch)
    before = [ids.clone() for ids in chosen]
    hits = [len(set(ids.flatten().tolist())) for ids in before]

    facts = suite.facts()

    assert {len(ids) for ids in before} == {num_rows}
    assert facts.bytes == floor_of(suite, num_rows, sum(hits) / len(hits))
    assert facts.bytes < floor_of(suite, num_rows, None)  # as if they had chosen independently


def test_what_a_replayed_step_chooses_is_heard_from_one_that_is_launched():
    suite = SmallRankStep()
    suite.build(64, 16, "paged", 8, "reference")
    suite.reset()
    with chosen_experts() as chosen:
        suite.engine.step(suite.batch)
    heard, replay = [ids.tolist() for ids in chosen], suite.engine._run_pass

    suite.engine._run_pass = None
    launched = step_choices(suite.engine, suite.batch, suite.snapshot)
    suite.engine._run_pass = replay

    assert [ids.tolist() for ids in launched] == heard
    suite.reset()
    assert suite.engine.step(suite.batch).commit_lengths == (8,)  # and nothing was disturbed


def test_prompts_and_texts_count_what_their_passes_hit(monkeypatch):
    monkeypatch.setattr("benchmarks.generation.NEW_TOKENS", 3)
    chunk, prompt, text = SmallChunk(), Prefill(), Generation()
    chunk.build(100, 16, "reference")
    prompt.build(100, 16, "reference")
    text.build("prose", "ar", 0.0, "paged")
    suites, heard = (chunk, prompt, text), []

    def one(*given):
        heard.append(mean_hit(*given))
        return 1.0

    counted = [suite.facts().bytes for suite in suites]
    for module in ("prefill", "generation"):
        monkeypatch.setattr(f"benchmarks.{module}.mean_hit", one)
    fewer = [suite.facts().bytes for suite in suites]

    assert heard[0] == 16  # all, for 512 tokens
    assert 3 < heard[1] <= 12
    assert heard[2:] == [3.0] * 3  # a pass of one row, of each new token
    assert all(map(operator.lt, fewer, counted))


def test_layers_of_several_passes_are_told_apart():
    config = preset("tiny").target.config
    layers = config.num_hidden_layers - config.first_k_dense_replace
    one, other = torch.tensor([[0, 1], [1, -1]]), torch.tensor([[1, 2]])

    assert hit_by_layer([one] * layers, config) == (2,) * layers
    assert hit_by_layer([one] * layers + [other] * layers, config) == (3,) * layers
    for chosen in ([], [one] * (layers + 1)):
        with pytest.raises(SuiteError, match=f"choices of {layers} layers a pass, got"):
            hit_by_layer(chosen, config)
