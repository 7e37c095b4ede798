"""The regret of the adaptive budget where drafts, outcomes and costs are known."""

import random

import pytest
import torch

from benchmarks import _budget_replay
from benchmarks._budget_regimes import NUM_RANKS, rank_probs
from benchmarks._budget_replay import STEP_MS, Position, adaptive, fixed, off_by, record, regret
from benchmarks._budget_replay import table_of as table
from engine import Engine, EngineConfig, Sampling, build_from_log_probs, preset
from engine.node_pool import Odds

HORIZON, MOST = 7, 64
STEEP_MS = {1: 1.7, 2: 1.8, 3: 1.9, 5: 2.1, 9: 2.4, 17: 2.9, 33: 3.6, 65: 5.0}


def planted(said, true, seed=0, count=1000):
    """Drafts that say one probability of their best candidates, where another one is right."""
    log_probs = torch.tensor(rank_probs(said)).log().expand(HORIZON, -1).contiguous()
    ids = torch.arange(NUM_RANKS).expand(HORIZON, -1).contiguous()
    tree = build_from_log_probs(log_probs, ids, root_token=0, node_budget=MOST)
    nodes = list(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
    source, positions = random.Random(seed), []
    for _ in range(count):
        accepted, at = [], 0
        for token in source.choices(range(NUM_RANKS), rank_probs(true), k=HORIZON):
            if (at, token) not in nodes[1:]:
                break
            at = nodes.index((at, token), 1)
            accepted.append(at)
        positions.append(Position(tuple(tree.path_log_probs.tolist()[1:]), tuple(accepted)))
    return positions


DRAFTERS = {
    "right and vague": (0.3, 0.3),
    "right": (0.6, 0.6),
    "right and sure": (0.9, 0.9),
    "boastful": (0.9, 0.5),
    "modest": (0.5, 0.9),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def texts(request):
    return [planted(*DRAFTERS[request.param])]


def test_an_adaptive_budget_loses_three_percent_at_most(texts):
    assert regret(texts, STEP_MS, STEP_MS, runs=2)[0] < 1.03
    assert regret(texts, off_by(STEP_MS, 0.2, "all"), STEP_MS, runs=2)[0] < 1.03


@pytest.mark.parametrize("name", ["right and vague", "right", "right and sure", "modest"])
def test_so_it_does_where_rows_are_dear(name):
    assert regret([planted(*DRAFTERS[name])], STEEP_MS, STEEP_MS, runs=2)[0] < 1.03


def test_a_table_that_is_off_loses_no_more_than_it_is_off():
    texts = [planted(0.6, 0.6)]

    for seed in range(3):
        assert regret(texts, off_by(STEP_MS, 0.03, f"seed {seed}"), STEP_MS, runs=2)[0] < 1.06
        assert regret(texts, off_by(STEP_MS, 0.2, f"seed {seed}"), STEP_MS, runs=2)[0] < 1.5


class Deaf(Odds):
    """Believes the drafter whatever happens."""

    def tell(self, trees, outcomes):
        """Learn nothing."""


def test_a_boastful_drafter_that_is_believed_costs_more_than_one_that_is_known():
    texts = [planted(*DRAFTERS["boastful"])]

    known, believed = (
        adaptive(texts, table(STEEP_MS), STEEP_MS, odds, runs=2) for odds in (Odds(), Deaf())
    )

    assert believed.token_ms > 1.02 * known.token_ms


def test_a_table_that_smooths_a_bump_away_loses_what_it_hides():
    """Pooled with the cheaper buckets behind it, a dear one makes all of them cost the same."""
    pooled = {rows: ms if rows < 9 else 2.26 for rows, ms in STEP_MS.items()}
    texts = [planted(0.99, 0.99)]

    hidden, seen = (regret(texts, told, STEP_MS, runs=2)[0] for told in (pooled, STEP_MS))
    assert hidden > 1.02 * seen


def test_a_replayed_step_commits_what_the_engines_does():
    models, prompt, sampling = preset("nano"), list(range(20)), Sampling(temperature=1.0)
    positions = record(models, prompt, 12, 9, temperature=1.0)
    engine = Engine(models.target, models.drafter, EngineConfig(node_budget=6, max_context=64))
    batch = engine.prefill([prompt], sampling=sampling)
    lengths = []
    while sum(lengths) < len(positions):
        lengths += engine.step(batch).commit_lengths

    replayed = fixed([positions], 6, STEP_MS)

    assert (replayed.steps, replayed.tokens) == (len(lengths), sum(lengths))
    assert len(set(lengths)) > 1


def test_every_regime_has_a_line(capsys, monkeypatch):
    nano = preset("nano")
    monkeypatch.setattr(_budget_replay, "preset", lambda *_, **__: nano)
    monkeypatch.setattr(_budget_replay, "sample_text", lambda _: bytes(range(23)) * 20)

    _budget_replay.main(["--texts", "code", "--windows", "1", "--new-tokens", "4"])

    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["code T=0", "code T=1"]
