"""What nodes promised is held against what became of them."""

import pytest
import torch

from engine.budget import Budget
from engine.config import EngineConfig
from engine.draft_tree import Acceptance, build_from_log_probs
from engine.node_pool import Odds
from tests.budgets import chosen_of, table_of, told


def test_a_place_that_never_keeps_its_promise_is_paid_for_no_more():
    table, gains = table_of([1, 5, 9], [1.0, 1.0, 1.5]), [0.9, 0.8, 0.7, 0.6] + [0.4] * 4

    before = chosen_of(gains, 1, table)
    odds = told(Odds(), gains, [1, 2, 3, 4], times=30)

    assert before == 8
    assert chosen_of(gains, 1, table, odds=odds) == 4
    assert odds.ratios()[:2] == pytest.approx([1.1, 1.2], abs=0.1)


def test_what_is_not_tried_for_long_is_believed_again():
    gains = [0.9] + [0.4] * 7
    odds = told(Odds(), gains, [1], times=50)
    low = odds.ratios()[3]

    told(odds, gains[:1], [1], times=200)

    assert low < 0.2
    assert odds.ratios()[3] > 0.8


def test_places_are_what_lies_between_two_ends_of_buckets():
    odds = told(Odds(), [0.5] * 16, [1, 2, 4, 8, 16])

    assert odds.promised[:6] == [0.5, 0.5, 1.0, 2.0, 4.0, 0.0]
    assert odds.accepted[:6] == [1.0] * 5 + [0.0]


def test_a_policy_that_believes_nobody_learns_nothing():
    tree = build_from_log_probs(
        torch.tensor([[-0.5]]), torch.tensor([[4]]), root_token=7, node_budget=1
    )
    outcome = Acceptance(torch.tensor([1], dtype=torch.int32), 0)
    budgets = [Budget(EngineConfig(budget_policy=name), None) for name in ("fixed", "adaptive")]

    for budget in budgets:
        budget.tell([tree], [outcome])

    assert [sum(budget.odds.accepted) for budget in budgets] == [0.0, 1.0]
