"""The adaptive budget: a measured cost table, and the number of nodes it pays for."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.budget import CostTable, choose_nodes, tree_budget
from engine.draft_tree import build_draft_trees, build_from_log_probs
from engine.errors import ConfigError
from engine.node_pool import Odds
from tests.budgets import ORIGIN, built, chosen_of, step_time_s, table_of


def published_tree():
    marginals = [(0.6, 0.3, 0.1), (0.7, 0.2, 0.1), (0.5, 0.4, 0.1)]
    return build_from_log_probs(
        torch.tensor([[math.log(p) for p in row] for row in marginals]),
        torch.arange(3).repeat(3, 1),
        root_token=7,
        node_budget=39,
    )


def test_the_caddtree_example_takes_nine_nodes():
    table = table_of(range(1, 41), [40.0 + 2 * n for n in range(40)], same_s=7.0)
    gains = published_tree().path_log_probs[1:].exp().tolist()

    chosen = chosen_of(gains, 1, table, 100)

    rates = {n: (1 + sum(gains[:n])) / (47 + 2 * n) for n in (8, 9, 10)}
    assert chosen == 9
    assert rates == pytest.approx({8: 0.04973016, 9: 0.04973846, 10: 0.04950746}, abs=5e-9)


def test_a_bucket_behind_the_first_drop_can_be_the_best():
    # 1 + 0.9 n tokens: bucket 4 costs so much that it loses to 2, bucket 16 makes up for it.
    table = table_of([2, 4, 16], [1.0, 4.0, 4.5])

    rates = [(1 + 0.9 * n) / (1 + cost) for n, cost in [(1, 1.0), (3, 4.0), (15, 4.5)]]
    assert rates[1] < rates[0] < rates[2]
    assert chosen_of([0.9] * 40, 1, table, 0) == 15


def test_the_chosen_bucket_is_filled():
    table = table_of([8, 16, 32], [1.0, 5.0, 25.0])

    assert chosen_of([0.01] * 100, 1, table, 0) == 7
    assert chosen_of([0.01] * 100, 3, table, 0) == 5
    assert chosen_of([0.01] * 100, 8, table, 0) == 0


def test_the_end_of_the_list_is_compared_too():
    table = table_of([2, 32], [1.0, 1.1])

    assert chosen_of([1.0] * 9, 1, table, 0) == 9
    assert chosen_of([], 1, table, 0) == 0


def test_equal_rates_go_to_fewer_nodes():
    table = table_of([2, 4, 8], [1.0, 3.0, 7.0])

    assert chosen_of([1.0] * 7, 1, table, 0) == 1  # 2 / 2, 4 / 4, 8 / 8
    assert chosen_of([0.5], 1, table_of([1, 2], [0.0, 0.5]), 0) == 0  # 1 / 1, 1.5 / 1.5


def test_no_more_rows_are_taken_than_were_measured():
    table = table_of([2, 8], [1.0, 1.0])

    assert chosen_of([1.0] * 100, 3, table, 0) == 5
    with pytest.raises(ConfigError, match="num_rows: expected at most 8, got 9"):
        chosen_of([1.0] * 100, 9, table, 0)


costs = st.lists(st.integers(1, 60), min_size=1, max_size=6, unique=True).flatmap(
    lambda rows: st.tuples(
        st.just(sorted(rows)),
        st.lists(st.integers(1, 50), min_size=len(rows), max_size=len(rows)),
    )
)


@settings(deadline=None, max_examples=150)
@given(
    costs=costs,
    gains=st.lists(st.integers(1, 100), max_size=70),
    num_seqs=st.integers(1, 8),
)
def test_no_number_of_nodes_promises_a_higher_rate(costs, gains, num_seqs):
    num_rows, seconds = costs
    num_rows[-1] += num_seqs
    gains = [gain / 100 for gain in sorted(gains, reverse=True)]
    table = table_of(num_rows, map(float, seconds))

    chosen = chosen_of(gains, num_seqs, table, 0)

    def rate(num_nodes):
        return (num_seqs + sum(gains[:num_nodes])) / step_time_s(table, num_seqs + num_nodes)

    possible = range(min(len(gains), num_rows[-1] - num_seqs) + 1)
    assert chosen in possible
    assert rate(chosen) == pytest.approx(max(map(rate, possible)), rel=1e-12)


CONTEXTS = CostTable(
    num_rows=(1, 16, 64),
    context_tokens=(100, 300, 1300),
    step_seconds=((1.5, 2.5, 4.5), (2.7, 4.7, 8.7), (14.7, 26.7, 50.7)),
    sequence_seconds=(0.25, 0.5, 1.5),
    origin=ORIGIN,
)


@pytest.mark.parametrize(
    ("num_rows", "context", "time_s"),
    [
        (1, 100, 0.5 + 1.0),
        (2, 100, 0.5 + 2.0),
        (16, 100, 0.5 + 2.0),
        (17, 100, 0.5 + 4.0),
        (16, 200, 0.6 + 3.0),
        (16, 300, 0.7 + 4.0),
        (16, 800, 1.7 + 14.0),
        (64, 1300, 2.7 + 48.0),
        (64, 2300, 4.7 + 88.0),
        (1, 0, 0.4 + 0.5),
        (1, 150.5, 0.5505 + 1.2525),
    ],
)
def test_rows_cost_their_bucket_and_context_is_linear_between_and_beyond(num_rows, context, time_s):
    assert step_time_s(CONTEXTS, num_rows, context) == pytest.approx(time_s, rel=1e-12)


def test_every_further_sequence_adds_its_own():
    times_s = [step_time_s(CONTEXTS, 16, context=200, num_seqs=n) for n in (1, 2, 5)]

    assert times_s == pytest.approx([3.6, 3.6 + 0.375, 3.6 + 4 * 0.375])


def test_a_longer_context_pays_for_another_number_of_nodes():
    gains = [0.5] * 63

    chosen = [chosen_of(gains, 1, CONTEXTS, context) for context in (0, 1300)]

    rates = {
        context: {n: (1 + 0.5 * n) / step_time_s(CONTEXTS, 1 + n, context) for n in (0, 15, 63)}
        for context in (0, 1300)
    }
    assert chosen == [max(rates[context], key=rates[context].get) for context in (0, 1300)]


def test_a_bucket_whose_larger_neighbour_costs_less_is_never_chosen():
    """A measured bump is no noise: smoothed away, it would make its neighbours dear."""
    table = table_of([1, 5, 9, 17], [1.0, 1.1, 1.6, 1.3])

    assert table.step_seconds == ((2.0, 2.1, 2.6, 2.3),)
    for confidence in (0.01, 0.1, 0.3, 0.6, 0.9):
        assert chosen_of([confidence / (1 + n) for n in range(16)], 1, table) != 8


def test_more_context_never_costs_less():
    by_rows, by_context = ((2.0, 3.0), (1.0, 4.0), (5.0, 5.0)), (1.0, 0.5, 0.75)

    table = CostTable((1, 2), (0, 10, 20), by_rows, by_context, ORIGIN)

    assert table.step_seconds == ((2.0, 3.0), (2.0, 4.0), (5.0, 5.0))
    assert table.sequence_seconds == (1.0, 1.0, 1.0)
    assert table.step_times_s(1, 10**6)[0] > 0


def test_a_table_survives_being_written_and_read():
    noisy = table_of([1, 3, 9], [0.1, 0.30000000000000004, 0.2], same_s=1e-300)

    for table in (CONTEXTS, noisy):
        assert CostTable.from_json(table.to_json()) == table


def changed(**fields):
    record = json.loads(CONTEXTS.to_json())
    return json.dumps({key: value for key, value in (record | fields).items() if value != "gone"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cost table: expected JSON"),
        ("[]", "cost table: expected .*, got list"),
        ("[" * 50_000, "cost table: expected JSON"),
        (changed(num_rows=[1, 16, 2**40]), "num_rows: expected ascending .* at most 2147483647"),
        (changed(step_seconds=[[1.0, 2.0, 10**400]] * 3), "step_seconds: .*got 1000"),
        (changed(step_seconds=[[1e308, 1e308, 1e307]] * 3), "step_seconds: .*got 1e.308"),
        (changed(origin="gone"), r"cost table: expected .*'origin'.*, got"),
        (changed(more=1), "cost table: expected .*'more'"),
        (changed(format="cost-table/4"), "format"),
        (changed(format="gone"), "cost table: expected .*'format'"),
        (changed(format="cost-table/2", step_seconds="gone", sequence_seconds="gone"),
         "expected the format 'cost-table/3', got 'cost-table/2' .measure it anew"),
        (changed(num_rows=7), "num_rows: expected a list"),
        (changed(num_rows=[1, 16, 16]), "num_rows: expected ascending"),
        (changed(num_rows=[1, 16, 64.0]), "num_rows: expected ascending"),
        (changed(num_rows=[0, 16, 64]), "num_rows: expected ascending integers from 1"),
        (changed(num_rows=["1", "2", "3"]), "num_rows: expected ascending"),
        (changed(num_rows=[]), "num_rows: expected ascending"),
        (changed(context_tokens=[-1, 300, 1300]), "context_tokens: expected ascending"),
        (changed(context_tokens=[100, 300]), "step_seconds: expected 2, got 3"),
        (changed(step_seconds=[1.0, 2.0, 3.0]), "step_seconds of a context: expected a list"),
        (changed(step_seconds=[[1.0, 2.0, 3.0]]), "step_seconds: expected 3, got 1"),
        (changed(step_seconds=[[1.0, 2.0]] * 3), "step_seconds of a context: expected 3"),
        (changed(step_seconds=[[1.0, 2.0, math.nan]] * 3), "step_seconds: .*got nan"),
        (changed(step_seconds=[[1.0, 2.0, math.inf]] * 3), "step_seconds: .*got inf"),
        (changed(step_seconds=[[1.0, 2.0, 0.0]] * 3), r"step_seconds: .* > 0, got 0\.0"),
        (changed(step_seconds=[[1.0, 2.0, "3"]] * 3), "step_seconds: .*got '3'"),
        (changed(sequence_seconds=[0.5, True, 1.0]), "sequence_seconds: .*got True"),
        (changed(sequence_seconds=[0.5, -1.0, 1.0]), r"sequence_seconds: .* >= 0, got -1\.0"),
        (changed(sequence_seconds=[0.5]), "sequence_seconds: expected 3, got 1"),
        (changed(step_seconds=[[0.1] * 3, [0.9] * 3, [1.7] * 3]),
         "context_tokens: expected a shorter one than 100"),
        (changed(origin=[]), "origin: expected"),
        (changed(origin={"device_name": "x"}), "origin: expected"),
        (changed(origin=dataclasses.asdict(ORIGIN) | {"page_size": "16"}), "origin.page_size"),
        (changed(origin=dataclasses.asdict(ORIGIN) | {"page_size": True}), "origin.page_size"),
        (changed(origin=dataclasses.asdict(ORIGIN) | {"dtype": None}), "origin.dtype"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        CostTable.from_json(text)


def test_a_table_of_another_machine_is_refused_by_what_differs():
    CONTEXTS.check_origin(ORIGIN)

    with pytest.raises(ConfigError, match="measured for page_size 64, got one for 16"):
        CONTEXTS.check_origin(dataclasses.replace(ORIGIN, page_size=64))


@pytest.fixture(scope="module")
def draft_logits():
    chooser = torch.Generator().manual_seed(0)
    return torch.stack([torch.randn(7, 100, generator=chooser) * scale for scale in (0.5, 2, 8)])


def sizes_of(trees):
    return [tree.num_nodes for tree in trees]


def test_a_fixed_budget_is_each_sequences_own(draft_logits):
    assert sizes_of(built(draft_logits, "fixed", 16)) == [16, 16, 16]
    assert sizes_of(built(draft_logits[:1, :1, :3], "fixed", 16)) == [3]


def test_a_shared_budget_is_spent_where_nodes_are_likeliest(draft_logits):
    sizes = sizes_of(built(draft_logits, "shared", 16))

    assert sum(sizes) == 48
    assert len(set(sizes)) == 3


def test_an_adaptive_budget_is_shared_up_to_what_pays(draft_logits):
    shared = built(draft_logits, "shared", 16)
    cheap, dear = table_of([3, 80], [1.0, 1.0]), table_of([3, 12, 80], [1.0, 1.1, 500.0])

    generous, thrifty = (built(draft_logits, "adaptive", 16, table) for table in (cheap, dear))

    assert sizes_of(generous) == sizes_of(shared)
    assert sum(sizes_of(thrifty)) == 12 - 3
    assert all(less <= more for less, more in zip(sizes_of(thrifty), sizes_of(shared), strict=True))


@pytest.mark.parametrize(
    ("policy", "num_nodes"), [("fixed", 16), ("shared", 128), ("adaptive", 128)]
)
def test_trees_are_built_as_large_as_one_sequence_may_get(policy, num_nodes):
    assert tree_budget(policy, 16, 8) == num_nodes
    assert tree_budget(policy, 300, 8) == (300 if policy == "fixed" else 512)


def test_more_seconds_for_verifying_never_buy_more_nodes():
    gains = published_tree().path_log_probs[1:].exp().tolist()

    chosen = [
        chosen_of(gains, 1, table_of(range(1, 41), [40 + slope * n for n in range(40)]), 0)
        for slope in (0.0, 0.5, 1.0, 2.0, 4.0, 100.0)
    ]

    assert chosen[0] == 39
    assert chosen[-1] == 0
    assert all(less <= more for more, less in itertools.pairwise(chosen))


def chosen_by_tensors(trees, node_budget, table, odds):
    """The rule in tensors: whole trees, a pool sorted by weight, and every bucket's end tried."""
    weights = torch.cat([tree.path_log_probs[1:].cummin(0).values for tree in trees])
    pooled, order = weights.sort(descending=True, stable=True)
    sizes = torch.tensor([tree.num_nodes for tree in trees])
    owners = torch.arange(len(trees)).repeat_interleave(sizes)[order]
    places = torch.cat([torch.arange(tree.num_nodes) for tree in trees])[order]
    ratios = torch.tensor(odds.ratios()).double()[[place.bit_length() for place in places.tolist()]]
    gains = (pooled.exp() * ratios)[: node_budget * len(trees)].tolist()
    most = min(len(gains), table.num_rows[-1] - len(trees))
    tokens = list(itertools.accumulate(gains[:most], initial=float(len(trees))))
    ends = {n - len(trees) for n in table.num_rows if len(trees) <= n < len(trees) + most}
    chosen = max(
        sorted({*ends, most}),
        key=lambda n: tokens[n] / step_time_s(table, len(trees) + n, 3.0, len(trees)),
    )
    counts = torch.bincount(owners[:chosen], minlength=len(trees)).tolist()
    return [tree.prefix(count) for tree, count in zip(trees, counts, strict=True)]


@pytest.mark.parametrize("num_seqs", [1, 2, 5])
@pytest.mark.parametrize("seed", range(25))
def test_a_search_that_stops_early_chooses_the_trees_of_one_over_everything(num_seqs, seed):
    chooser = torch.Generator().manual_seed(100 * num_seqs + seed)
    logits = torch.randn(num_seqs, 7, 90, generator=chooser) * 2 ** (seed % 5 - 1)
    if seed % 3 == 0:
        logits = logits.round()  # many ties
    num_rows = [num_seqs + n for n in (0, 1, 2, 4, 8, 16, 32, 64, 320)]
    slope = 2.0 ** -(seed % 9)
    bump = torch.rand(9, generator=chooser) * (seed % 2) + 1.0
    table = table_of(
        num_rows, [b + slope * n for b, n in zip(bump.tolist(), num_rows, strict=True)], same_s=2.0
    )
    odds = Odds()
    if seed % 4:
        odds.accepted = (torch.rand(11, generator=chooser) * 20).tolist()
        odds.promised = (torch.rand(11, generator=chooser) * 20).tolist()

    found = built(logits, "adaptive", 64, table, odds)

    whole = build_draft_trees(logits, [7] * num_seqs, 64 * num_seqs)
    for tree, expected in zip(found, chosen_by_tensors(whole, 64, table, odds), strict=True):
        for field in dataclasses.fields(tree):
            assert torch.equal(getattr(tree, field.name), getattr(expected, field.name))


def test_no_more_nodes_are_searched_than_may_pay():
    """Behind a node that promises 1 % nothing can be worth the second bucket."""
    taken = []
    costs = (taken.append(gain) or -math.log(gain) for gain in [0.9, 0.8, 0.01] + [0.005] * 60)
    table = table_of([1, 4, 64], [1.0, 1.1, 9.0])

    assert choose_nodes([costs], 63, table, Odds(), 0.0) == [3]
    assert len(taken) == 3
