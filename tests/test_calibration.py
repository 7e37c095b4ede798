"""Cost tables: what may be measured, and that an adaptive engine does what its table says."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from engine.budget import CostTable, choose_nodes
from engine.calibration import measure_costs
from engine.cost import cost_origin
from engine.decoder import Engine
from engine.errors import ConfigError
from engine.presets import preset
from engine.sampling import Sampling
from tests.nano import (
    BLOCK,
    MODELS,
    TARGET,
    assert_is_the_targets_own,
    assert_nobody_holds_a_page,
    assert_state_equals_recomputation,
    make_engine,
    prompt,
)
from tests.steered import Steered, always

BUDGET = 24
PROMPTS = [prompt(n, seed=n) for n in (20, 90, 7)]
PEAKED = torch.linspace(24.0, -24.0, TARGET.config.vocab_size)  # a node deeper, a little less sure


def made_up(seconds_of_row, *, draft_s=1.0, most_rows=128, per_token_s=0.0, **config):
    """A table of a bucket for every number of rows, for an engine of `config`."""
    engine = make_engine(node_budget=BUDGET, **config)
    contexts = (0, 100)
    return CostTable(
        num_rows=tuple(range(1, most_rows + 1)),
        context_tokens=contexts,
        step_seconds=tuple(
            tuple(
                draft_s + seconds_of_row(n) + per_token_s * n * c for n in range(1, most_rows + 1)
            )
            for c in contexts
        ),
        sequence_seconds=(0.0, 0.0),
        origin=cost_origin(TARGET, MODELS.drafter, engine.config),
    )


def adaptive(table, drafter=MODELS.drafter, **config):
    config = {"node_budget": BUDGET, "budget_policy": "adaptive"} | config
    return make_engine(drafter, cost_table=table, **config)


def chosen_by_hand(engine, batch, table):
    """What the rule says of everything that the drafter proposes."""
    whole = make_engine(engine.drafter, budget_policy="shared", node_budget=BUDGET)
    trees = whole.build(batch, engine.draft(batch))
    costs = [(-tree.path_log_probs[1:].cummin(0).values).tolist() for tree in trees]
    mean = sum(s.committed_length for s in batch.sequences) / len(trees)
    return sum(choose_nodes(costs, BUDGET * len(trees), table, engine.budget.odds, mean))


TABLES = {
    "free": (lambda n: 1.0, {}),
    "dear": (lambda n: 100.0 * n, {}),
    "linear": (lambda n: 0.2 * n, {}),
    "stairs": (lambda n: 1.0 + 3.0 * (n // 16), {}),
    "context": (lambda n: 0.01 * n, {"per_token_s": 0.02}),
}


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("kind", TABLES)
def test_an_adaptive_step_verifies_what_its_table_pays_for(kind, layout):
    seconds, options = TABLES[kind]
    table = made_up(seconds, cache_layout=layout, **options)
    engine = adaptive(table, Steered(MODELS.drafter, always(PEAKED)), cache_layout=layout)
    batch = engine.prefill(PROMPTS)
    totals = []
    for _ in range(4):
        expected = chosen_by_hand(engine, batch, table)
        totals.append(sum(engine.step(batch).num_nodes))
        assert totals[-1] == expected

    assert_state_equals_recomputation(engine, batch)
    first = {"free": 3 * BUDGET, "dear": 0}
    assert totals[0] == first.get(kind, totals[0])
    assert 0 <= totals[-1] <= totals[0] <= 3 * BUDGET
    assert kind in first or 0 < totals[0] < 3 * BUDGET
    assert kind != "linear" or totals[-1] < totals[0]  # a drafter so sure and so wrong is found out


@pytest.mark.parametrize("mode", ["ddtree", "dflash"])
@pytest.mark.parametrize("kind", ["linear", "stairs"])
def test_an_adaptive_engine_says_what_the_target_would(kind, mode):
    table = made_up(TABLES[kind][0])
    engine, sampling = adaptive(table, mode=mode), Sampling(1.0)

    generations = engine.generate(PROMPTS, max_new_tokens=16, sampling=sampling, seed=[1, 2, 3])

    for text, seed, generation in zip(PROMPTS, (1, 2, 3), generations, strict=True):
        assert_is_the_targets_own(generation, text, sampling, seed)
    assert_nobody_holds_a_page(engine)


def test_fewer_sequences_find_their_own_optimum():
    table = made_up(TABLES["stairs"][0])
    engine = adaptive(table, Steered(MODELS.drafter, always(PEAKED)))
    batch = engine.prefill(PROMPTS)
    for going in ([0, 2], [1], [0]):
        expected = chosen_by_hand(engine, batch, table)
        assert sum(engine.step(batch).num_nodes) == expected
        batch.keep(going)


def test_a_table_too_small_for_the_batch_is_refused_and_nothing_is_lost():
    engine = adaptive(made_up(TABLES["free"][0], most_rows=2))

    with pytest.raises(ConfigError, match="num_rows: expected at most 2, got 3"):
        engine.generate(PROMPTS, max_new_tokens=4)

    assert_nobody_holds_a_page(engine)
    assert len(engine.generate(PROMPTS[:2], max_new_tokens=4)) == 2


def test_an_adaptive_engine_needs_a_table():
    with pytest.raises(ConfigError, match="cost_table: expected one, got None"):
        make_engine(budget_policy="adaptive")


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"page_size": 64}, "page_size 64"),
        ({"cache_layout": "hybrid"}, "cache_layout 'hybrid'"),
        ({"attention_backend": "triton_split"}, "attention_backend 'triton_split'"),
        ({"moe_backend": "triton"}, "moe_backend 'triton'"),
        ({"graphs": "buffers"}, "graphs 'buffers'"),
    ],
)
def test_a_table_measured_for_something_else_is_refused(changes, differs):
    with pytest.raises(ConfigError, match=f"cost table: expected one measured for {differs}"):
        adaptive(made_up(TABLES["free"][0]), **changes)


def test_a_table_of_another_precision_is_refused():
    models, table = preset("nano", seed=1), made_up(TABLES["free"][0])
    config = make_engine(node_budget=BUDGET, budget_policy="adaptive", cost_table=table).config

    with pytest.raises(ConfigError, match="measured for dtype 'float32', got one for 'float64'"):
        Engine(models.target, models.drafter, config, cost_table=table)


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("mode", ["ddtree", "dflash"])
def test_a_measured_table_survives_json_and_drives_an_engine(mode, layout):
    options = {"mode": mode, "cache_layout": layout, "node_budget": BUDGET, "prefix_reuse": True}
    measured = make_engine(**options)
    table = measure_costs(measured, num_rows=(1, 8, 25, 75), context_tokens=(16, 64), repetitions=2)
    read = CostTable.from_json(table.to_json())
    assert read == table
    engine = adaptive(read, **options)

    generations = engine.generate(PROMPTS, max_new_tokens=10)

    for text, generation in zip(PROMPTS, generations, strict=True):
        assert_is_the_targets_own(generation, text)
    assert_nobody_holds_a_page(measured)


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("mode", ["ddtree", "dflash"])
def test_every_bucket_is_measured_with_that_many_rows_of_trees_there_could_be(mode, layout):
    engine = make_engine(mode=mode, cache_layout=layout, node_budget=BUDGET, page_size=1)
    seen, verify = [], engine.verify

    def watched(batch, trees):
        seen.append((batch, tuple(tree.tree_size for tree in trees), trees))
        assert {engine.cache.length(seq) for seq in batch.seqs} == {9}
        return verify(batch, trees)

    engine.verify = watched
    measure_costs(engine, num_rows=(1, 30, 60), context_tokens=(9,), repetitions=1)

    largest = 1 + engine.most_nodes(1)
    for _, sizes, trees in seen:
        assert max(sizes) <= largest
        assert all(int(tree.depths.max()) < BLOCK for tree in trees)
        # Rows of one token would hit the same experts.
        assert all(len(tree.token_ids.unique()) > tree.tree_size // 4 for tree in trees)
    most_seqs = -(-60 // largest)
    passes = {(sum(sizes), len(sizes)) for _, sizes, _ in seen}
    # What a sequence costs besides its rows is told by roots alone, against one tree of as many.
    apart = min(most_seqs, largest)
    expected = {(60, most_seqs), (apart, apart), (apart, 1), (1, 1)}
    assert passes == expected | {(30, most_seqs if largest < 30 else 1)}
    assert_nobody_holds_a_page(engine)


def test_a_step_is_told_as_a_whole_and_what_rows_do_not_cost_is_the_sequences(monkeypatch):
    engine, clock = make_engine(node_budget=4), SimpleNamespace(now_s=0.0)
    clock.perf_counter = lambda: clock.now_s
    monkeypatch.setattr("engine.calibration.time", clock)

    def timed(run, seconds_of_rows, batch, *args):
        sizes = [tree.tree_size for tree in args[0]] if args else [0] * len(batch.sequences)
        clock.now_s += sum(map(seconds_of_rows, sizes))
        return run(batch, *args)

    for name, seconds in {
        "draft": lambda _: 3.0,
        "verify": lambda rows: 0.5 * rows,
        "commit": lambda _: 2.0,
    }.items():
        setattr(engine, name, partial(timed, getattr(engine, name), seconds))

    table = measure_costs(engine, num_rows=(1, 5, 10), context_tokens=(9,), repetitions=1)

    assert table.step_seconds == ((5.5, 7.5, 10.0),)  # two trees, as if their rows were one's
    assert table.sequence_seconds == (5.0,)


def test_buckets_take_turns():
    """A host that is slow for a while is slow for all of them."""
    engine, sizes = make_engine(node_budget=4), []
    verify = engine.verify
    engine.verify = lambda batch, trees: sizes.append(trees[0].tree_size) or verify(batch, trees)

    measure_costs(engine, num_rows=(1, 3, 5), context_tokens=(9,), repetitions=2)

    assert sizes[-12:] == [1, 3, 5] * 4


def test_trees_of_one_pass_read_pages_of_their_own():
    """Shared pages would be read once for all, which prompts that differ never do."""
    engine = make_engine(prefix_reuse=True, node_budget=4, page_size=1)
    tables, verify = [], engine.verify

    def watched(batch, trees):
        tables.append(engine.cache.page_table(batch.seqs)[:, :12])
        return verify(batch, trees)

    engine.verify = watched
    measure_costs(engine, num_rows=(20,), context_tokens=(12,), repetitions=1)

    assert tables[0].shape == (4, 12)
    assert len(set(tables[0].flatten().tolist())) == 4 * 12


def test_a_grid_to_the_last_token_of_the_context_can_be_measured():
    for layout in ("paged", "hybrid"):
        engine = make_engine(cache_layout=layout, node_budget=BUDGET, max_context=32, page_size=1)
        table = measure_costs(engine, num_rows=(25, 50), context_tokens=(31,), repetitions=1)
        assert table.context_tokens == (31,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rows": ()}, "num_rows: expected ascending integers from 1 on"),
        ({"num_rows": (0, 4)}, "num_rows: expected ascending integers from 1 on"),
        ({"num_rows": (8, 4)}, "num_rows: expected ascending integers from 1 on"),
        ({"num_rows": (1.0,)}, "num_rows: expected ascending integers from 1 on"),
        ({"context_tokens": ()}, "context_tokens: expected ascending integers from 0 on"),
        ({"context_tokens": (-1, 4)}, "context_tokens: expected ascending integers from 0 on"),
        ({"context_tokens": (4, 256)}, "context_tokens: expected at most 255, got 256"),
        ({"repetitions": 0}, "repetitions: expected an integer >= 1, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_time_is_spent(changes, message):
    engine = make_engine()

    with pytest.raises(ConfigError, match=message):
        measure_costs(
            engine, **({"num_rows": (1, 8), "context_tokens": (4,), "repetitions": 1} | changes)
        )

    assert engine.cache is None


def test_an_engine_that_does_not_draft_has_nothing_to_weigh():
    with pytest.raises(ConfigError, match="mode: expected one that drafts, got 'ar'"):
        measure_costs(make_engine(mode="ar"), num_rows=(1,), context_tokens=(4,))
