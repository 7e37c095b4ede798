"""The table of adaptive against fixed budgets: its regimes know their odds, its lines say who won."""

import json
import math
import statistics

import pytest
import torch

from benchmarks import _budget_table
from benchmarks._budget_regimes import (
    NUM_RANKS,
    expected_commits,
    planted_regime,
    rank_probs,
)
from benchmarks._budget_table import ADAPTIVE, Row
from engine import STAGES, Engine, EngineConfig
from engine.presets import preset, random_rank
from tests.ranks import SMALL

NAME = "kimi-k2.6-tp8-rank-4-layers"
STEPS = 80


@pytest.fixture(scope="module")
def models():
    return random_rank(SMALL, device="cpu", dtype=torch.float32, seed=0)


def test_a_calibrated_drafter_says_how_often_each_candidate_is_right(models):
    regime = planted_regime(models, 40, 0.6, steps=1, most_nodes=8)
    engine = Engine(regime.target, regime.drafter, EngineConfig(max_context=regime.max_context))
    (batch,) = regime.begin(engine)

    probs = engine.draft(batch)[0].softmax(-1)

    best = probs.topk(NUM_RANKS + 1).values
    assert best[:, :NUM_RANKS].double() == pytest.approx(
        torch.tensor(rank_probs(0.6)).double().expand(SMALL.drafter.horizon, -1), rel=1e-4
    )
    assert float(best[:, NUM_RANKS].max()) < 1e-20
    said = regime.target.continuation(40, SMALL.drafter.horizon)
    assert (probs[range(len(said)), said] > 1e-4).all()


@pytest.mark.parametrize(("confidence", "budget", "graphs"), [(0.6, 1, "off"), (0.3, 8, "buffers")])
def test_steps_commit_what_the_drafter_expects(confidence, budget, graphs):
    regime = planted_regime(preset("nano"), 16, confidence, steps=STEPS, most_nodes=8)
    config = EngineConfig(node_budget=budget, max_context=regime.max_context, graphs=graphs)
    engine = Engine(regime.target, regime.drafter, config)
    (batch,) = regime.begin(engine)
    results = [engine.step(batch) for _ in range(STEPS)]

    lengths = [result.commit_lengths[0] for result in results]

    expected = regime.worth(results[0])
    assert {regime.worth(result) for result in results} == {expected}
    assert abs(statistics.fmean(lengths) - expected) < 3 * statistics.stdev(lengths) / math.sqrt(
        120
    )


def test_what_trees_commit_in_the_mean_is_the_root_and_its_nodes_odds():
    first, second = rank_probs(0.6)[:2]

    commits = expected_commits(0.6, 7, 3)

    assert commits == pytest.approx([1.0, 1 + first, 1 + first + first**2,
                                     1 + first + first**2 + max(first**3, second)])  # fmt: skip


def row_of(fixed, adaptive):
    times = {"4": (3.0, 3.0, 3.0), "8": fixed, ADAPTIVE: adaptive}
    ones, stages = dict.fromkeys(times, 1.0), dict.fromkeys(times, dict.fromkeys(STAGES, 0.001))
    return Row("code T=0", times, ones, ones, ones, stages, {1: 0.002, 5: 0.0025}, (1.0, 0.25))


def test_the_ratio_is_that_of_the_runs_of_a_round():
    row = row_of(fixed=(1.0, 2.0, 10.0), adaptive=(1.1, 2.0, 9.0))

    assert row.best == "8"
    assert row.ratio == 1.0
    head, *budgets, costs, odds = row.lines()
    assert head == (
        "code T=0: best fixed 8 0.5 tokens/s, adaptive 0.5 (1.0 nodes), "
        "time ratio 1.000 (0.950 to 1.050)"
    )
    assert [line.split()[0] for line in budgets] == ["4", "8", ADAPTIVE]
    assert costs == "  weighed by ms of a step, by rows: 1 2.000  5 2.500"
    assert odds.endswith(": 1.00 0.25")


def test_a_regime_in_which_the_adaptive_budget_is_slower_says_so():
    assert next(row_of((1.0, 1.0), (1.04, 1.04)).lines()).endswith("SLOWER")
    assert not next(row_of((1.0, 1.0), (1.02, 1.02)).lines()).endswith("SLOWER")


def test_every_regime_has_a_line_and_is_kept(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(_budget_table, "DEVICE", "cpu")
    monkeypatch.setitem(_budget_table.RANKS, NAME, SMALL)
    file = tmp_path / "budgets.json"
    texts = ["--texts", "predictable", "--windows", "1", "--new-tokens", "10"]
    ranks = ["--contexts", "40", "--confidences", "0.9", "--steps", "2"]
    few = ["--budgets", "1", "6", "--rounds", "1", "--repetitions", "1", "--graphs", "buffers"]
    backends = ["--attention-backend", "reference", "--moe-backend", "reference"]

    _budget_table.main([*texts, *ranks, *few, *backends, "--json", str(file)])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "best fixed" in line] == [
        "predictable T=0", "context 40 confidence 0.9",
    ]  # fmt: skip
    assert lines[-1].endswith(" of 2 regimes")
    kept = json.loads(file.read_text())
    for row in kept["rows"]:
        assert set(row["token_times_s"]) == {"1", "6", ADAPTIVE}
        assert all(len(times) == 1 for times in row["token_times_s"].values())
        assert row["commit_lengths"]["1"] <= row["commit_lengths"]["6"]
        assert row["num_nodes"]["6"] == 6.0
        assert list(row["costs_s"]) == ["1", "2", "3", "5", "7"]
        assert len(row["odds"]) == 4
        assert row["promised"]["1"] <= row["promised"]["6"]
        assert 0.0 <= row["num_nodes"][ADAPTIVE] <= 6.0
    assert kept["device"]["kind"] == "cpu"
