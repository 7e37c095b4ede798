"""Drafts in buffers that stay: the drafts as ever, and nothing of one of them in the next.

The slow twin on a CPU: the same run over the same buffers, its results in the tensors of the first
run as a graph leaves them. `test_pass_graphs` steps whole engines that way.
"""

import dataclasses

import pytest
import torch

from engine.context_rows import PAGE_ROWS
from engine.draft_graphs import MOST_BUCKETS, Bucket
from engine.drafter import TapRows
from engine.errors import EngineError
from engine.planted import PlantedDrafter
from engine.presets import random_drafter
from tests.nano import (
    BLOCK,
    MODELS,
    TARGET,
    assert_state_equals_recomputation,
    make_engine,
    planted,
    prompt,
)
from tests.test_pass_graphs import both, in_fixed_outputs, poison
from tests.test_waits import Paper

WIDTH = MODELS.drafter.fc.shape[1]
BUFFERS = ("taps", "lengths", "counts", "roots")


def pairs_of_batches(engines, prompts):
    return [engine.prefill(prompts) for engine in engines]


def pend(batch, counts, seed):
    """Let a batch's sequences have so many random taps that their context lacks."""
    draws = torch.Generator().manual_seed(seed)
    taps = torch.randn(sum(counts), WIDTH, dtype=torch.float64, generator=draws)
    batch.pending = TapRows(taps, counts)


def drafter_of(**changes):
    config = dataclasses.replace(MODELS.drafter.config, **changes)
    return random_drafter(config, TARGET, seed=4)


KINDS = {
    "one-key-head": {},
    "two-key-heads": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "causal": {"is_block_causal": True},
    "sliding-only": {"layer_types": ("sliding_attention",) * 2},
    "long-blocks": {"block_size": 40},
}


@pytest.mark.parametrize("knob", [None, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_in_poisoned_buffers_equal_drafts_without_any(kind, knob):
    drafter = drafter_of(**KINDS[kind])
    plain, kept = both(drafter, drafter_context=knob, max_context=512)
    batches = pairs_of_batches((plain, kept), [prompt(n, seed=n) for n in (1, 40, 90)])
    S = drafter.config.block_size

    for turn, counts in enumerate([(0, 0, 0), (1, S, 3), (S, 1, 0), (2, 2, 2), (S, S, S)] * 3):
        for batch in batches:
            pend(batch, counts, seed=turn)
        poison(kept)
        expected, got = (e.draft(b) for e, b in zip((plain, kept), batches, strict=True))

        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        assert batches[1].context.lengths == batches[0].context.lengths
        assert batches[1].pending is None

    for held in ("keys", "values"):
        for layer, sight in enumerate(batches[0].context.sights):
            used = batches[0].context.num_slots(sight)
            one, other = (getattr(batch.context, held)[layer][:, :, :used] for batch in batches)
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_context_rows_are_the_same_whatever_is_in_the_places_of_none():
    _, kept = both()
    batch = kept.prefill([prompt(70), prompt(20)])
    kept.draft(batch)
    before = [rows.clone() for rows in (*batch.context.keys, *batch.context.values)]

    poison(kept)
    kept.draft(batch)

    assert all(map(torch.equal, before, (*batch.context.keys, *batch.context.values)))


@pytest.mark.parametrize("left_out", BUFFERS)
def test_a_buffer_that_kept_what_it_held_would_be_seen(left_out, monkeypatch):
    plain, kept = both()
    batches = pairs_of_batches((plain, kept), [prompt(20, seed=1), prompt(30, seed=2)])
    kept.draft(batches[1])
    column = {"lengths": 0, "counts": 1, "roots": 2}

    def load(bucket, pending, numbers):
        if left_out != "taps":
            bucket.inputs.taps[: len(pending.taps)].copy_(pending.taps)
        for name, number in column.items():
            if name != left_out:
                bucket.numbers.held[:, number] = numbers[:, number]

    for batch in batches:
        pend(batch, (3, BLOCK), seed=5)
    poison(kept)
    monkeypatch.setattr(Bucket, "load", load)

    try:
        got = kept.draft(batches[1])
    except (IndexError, RuntimeError, EngineError):
        return
    assert not torch.allclose(got, plain.draft(batches[0]), atol=1e-3)


def test_a_context_that_grows_or_shrinks_is_another_bucket():
    _, kept = both(max_context=512)
    batch = kept.prefill([prompt(50), prompt(PAGE_ROWS - 2)])
    for _ in range(4):
        kept.draft(batch)
    assert len(kept._run_draft.buckets) == 1

    pend(batch, (0, 5), seed=0)
    kept.draft(batch)  # beyond the first page
    assert len(kept._run_draft.buckets) == 2
    batch.keep([1])
    for _ in range(2):
        kept.step(batch)
    assert len(kept._run_draft.buckets) == 3
    assert batch.context.rows.capacity == 2 * PAGE_ROWS


def test_few_buckets_keep_the_rows_of_contexts_that_are_gone():
    _, kept = both()

    for number in range(MOST_BUCKETS + 3):
        batch = kept.prefill([prompt(5, seed=number)])
        kept.step(batch)
        kept.release(batch)

    assert len(kept._run_draft.buckets) == MOST_BUCKETS


def test_batches_that_take_turns_draft_over_their_own_rows():
    plain, kept = both()
    texts = [[prompt(20, seed=1)], [prompt(33, seed=2)]]
    pairs = [pairs_of_batches((plain, kept), own) for own in texts]

    for _ in range(4):
        for expected, got in pairs:
            poison(kept)
            assert kept.step(got) == plain.step(expected)

    assert_state_equals_recomputation(kept, pairs[0][1])
    assert_state_equals_recomputation(kept, pairs[1][1])


def test_a_step_after_a_rewind_is_the_same_step():
    _, kept = both()
    batch = kept.prefill([prompt(60), prompt(9)])
    kept.step(batch)
    start = kept.snapshot(batch)

    first = [kept.step(batch) for _ in range(3)]
    kept.rewind(batch, start)

    assert [kept.step(batch) for _ in range(3)] == first


def test_more_new_rows_than_a_block_has_go_before_it():
    plain, kept = both()
    batches = pairs_of_batches((plain, kept), [prompt(20)])
    for batch in batches:
        pend(batch, (BLOCK + 3,), seed=1)

    expected, got = (e.draft(b) for e, b in zip((plain, kept), batches, strict=True))

    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert batches[1].context.lengths == [19 + BLOCK + 3]


def test_features_of_a_step_are_kept_for_later_prompts():
    texts = [prompt(40, seed=1), prompt(41, seed=2)]
    engines = both(prefix_reuse=True, page_size=16, max_context=160)
    grown = [engine.generate(texts, max_new_tokens=40) for engine in engines]
    longer = [[*text, *one.token_ids[:30]] for text, one in zip(texts, grown[0], strict=True)]

    plain, kept = (engine.draft(engine.prefill(longer)) for engine in engines)

    assert grown[0] == grown[1]
    torch.testing.assert_close(kept, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("commit_length", [1, 3, BLOCK])
def test_planted_drafts_are_steered_within_the_run(commit_length):
    prompts = [prompt(20), prompt(7)]
    plain, kept = both(planted(prompts, commit_length), node_budget=BLOCK)
    batches = pairs_of_batches((plain, kept), prompts)

    for _ in range(3):
        poison(kept)
        assert kept.step(batches[1]) == plain.step(batches[0])
        assert batches[1].sequences[0].commit_lengths[-1] == commit_length


def test_one_capture_serves_all_steps_of_a_batch():
    engine = make_engine(graphs="buffers")
    captured = []

    def capture(run):
        captured.append(run)
        return in_fixed_outputs(run)

    engine._run_draft._capture = capture
    batch = engine.prefill([prompt(5)])
    for _ in range(3):
        engine.step(batch)

    assert len(captured) == 1


class StrictPaper(Paper):
    """Paper that also counts tensors made from what the host knows."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ == "lift_fresh":
            self.waits["lift_fresh"] += 1
        return super().__torch_dispatch__(operation, types, args, kwargs)


@pytest.mark.parametrize("commit_length", [None, 1, BLOCK])
def test_a_run_waits_for_nothing_and_brings_nothing_up(commit_length):
    """A graph can capture neither. Layers that see everything are their kernel's business."""
    plain = drafter_of(layer_types=("sliding_attention",) * 2)
    drafter = plain
    if commit_length is not None:
        drafter = PlantedDrafter(plain, [[1] * 40, [2] * 40], commit_length)
    _, kept = both(drafter)
    batch = kept.prefill([prompt(20), prompt(7)])
    kept.draft(batch)
    (bucket,) = kept._run_draft.buckets.values()
    inputs = (bucket.inputs.taps, bucket.numbers.held, *batch.context.rows.layers)

    with StrictPaper([*plain.tensors.values(), *TARGET.tensors.values(), *inputs]) as paper:
        drafter.complete_and_draft(batch.context.rows, bucket.inputs)
        assert not paper.waits
        torch.tensor([1])

    assert paper.waits == {"lift_fresh": 1}
