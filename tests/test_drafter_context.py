"""What the drafter's context keeps, forgets, and lets a block see."""

import dataclasses
import random

import pytest
import torch

from engine.config import DrafterConfig
from engine.context_rows import PAGE_ROWS, REWIND_ROWS, Sight
from engine.drafter import DraftRequest, TapRows
from engine.drafter_context import DrafterContext
from engine.errors import CacheError, ConfigError
from engine.kernels.attend_window.reference import seen_keys
from engine.presets import preset, random_drafter
from tests.drafts import NANO, random_taps, request
from tests.kimi import KIMI_DRAFTER

BLOCK = NANO.drafter.config.block_size
WINDOW = NANO.drafter.config.sliding_window
RING = WINDOW - 1 + REWIND_ROWS
SLIDING = random_drafter(
    dataclasses.replace(NANO.drafter.config, layer_types=("sliding_attention",) * 2),
    NANO.target,
    seed=3,
)


def extended(drafter, *texts, max_context=None):
    context = drafter.new_context(len(texts), max_context=max_context)
    drafter.extend(context, TapRows(torch.cat(texts), tuple(map(len, texts))))
    return context


def draft(drafter, context):
    return drafter.draft(context, request(*range(context.num_seqs)))


def blank(lengths, **changes):
    """A context of those lengths whose rows are zeros."""
    config = dataclasses.replace(NANO.drafter.config, **changes)
    context = DrafterContext(config, len(lengths), dtype=torch.float32, device=torch.device("cpu"))
    context.reserve(max(lengths))
    context.advance(lengths)
    return context


def positions_of_keys(context, sight, n, length):
    """The position of every key a block of sequence n is given, by the definition of a slot."""
    held = [
        max((p for p in range(slot, length, sight.ring or length + 1)), default=None)
        for slot in range(context.num_slots(sight))
    ]
    return [*range(length, length + BLOCK), *held]


@pytest.mark.parametrize("window", [1, 3, BLOCK, 2 * BLOCK])
@pytest.mark.parametrize("kind", ["two-way", "causal", "bounded"])
def test_every_element_of_the_mask_is_that_of_the_definition(kind, window):
    """Source: sgl-project/SpecForge tests/test_utils/test_dflash_mask.py for the causal form."""
    rules = {
        "two-way": (Sight(window, window), lambda q, k: abs(q - k) < window),
        "causal": (Sight(window, 1), lambda q, k: k <= q and k >= q - (window - 1)),
        "bounded": (Sight(window, None), lambda q, k: k > q - window),
    }
    sight, sees = rules[kind]
    ring = sight.ring
    lengths = [0, 1, window, ring - 1, ring, ring + 1, 2 * ring + 5]
    context = blank(lengths)

    mask = seen_keys(
        torch.tensor(lengths),
        block_size=BLOCK,
        num_slots=context.num_slots(sight),
        ring=ring,
        behind=sight.behind,
        ahead=sight.ahead or BLOCK,
    )

    for n, length in enumerate(lengths):
        keys = positions_of_keys(context, sight, n, length)
        for row, q in enumerate(range(length, length + BLOCK)):
            expected = [k is not None and sees(q, k) for k in keys]
            assert mask[n, row].tolist() == expected
            # Each position the row may see is there, and there once.
            reachable = [k for k in range(length + BLOCK) if sees(q, k)]
            assert sorted(k for k, seen in zip(keys, expected, strict=True) if seen) == reachable


def test_the_layers_of_a_drafter_see_what_their_types_say():
    config = KIMI_DRAFTER
    causal = dataclasses.replace(config, is_block_causal=True)

    def sights(config: DrafterConfig, max_context=None):
        return {Sight.of_layer(config, i, max_context) for i in range(config.num_hidden_layers)}

    assert sights(config) == {Sight(2048, 2048), Sight()}
    assert sights(causal) == {Sight(2048, 1), Sight()}  # full layers never are causal
    assert sights(config, 12288) == {Sight(2048, 2048), Sight(12288, None)}


def test_the_rows_of_sliding_layers_do_not_grow_with_the_context():
    def row_counts(length, max_context):
        context = NANO.drafter.new_context(1, max_context=max_context)
        NANO.drafter.extend(context, TapRows(random_taps(length), (length,)))
        draft(NANO.drafter, context)
        row_bytes = 2 * 8 * 8  # value and key of one head
        counts = tuple(
            rows.untyped_storage().nbytes() // row_bytes - PAGE_ROWS for rows in context.rows.layers
        )
        assert [rows.shape[2] for rows in context.values] == list(counts)
        return counts

    assert row_counts(1, None) == (64, 64)
    assert row_counts(1000, None) == (RING, 1024)
    assert row_counts(20_000, None) == (RING, 32_768)
    assert row_counts(20_000, 40) == (RING, 40 - 1 + REWIND_ROWS)


def test_a_long_extension_projects_and_writes_only_rows_that_are_kept():
    context = blank([10, 3], layer_types=("sliding_attention",) * 2)

    rows = context.place((5 * RING, 2), Sight(WINDOW, WINDOW))

    kept = [*range(10 + 4 * RING, 10 + 5 * RING), 3, 4]
    assert rows.positions.tolist() == kept
    assert rows.source.tolist() == [*range(4 * RING, 5 * RING), 5 * RING, 5 * RING + 1]
    assert rows.seqs.tolist() == [0] * RING + [1] * 2
    assert rows.slots.tolist() == [position % RING for position in kept]
    assert context.place((RING, 2), Sight(WINDOW, WINDOW)).source is None
    assert context.place((5 * RING, 2), Sight()).source is None


@pytest.mark.parametrize("max_context", [None, 20])
def test_a_context_grown_in_pieces_equals_one_made_at_once(max_context):
    source, drafter, text = random.Random(1), NANO.drafter, random_taps(500)
    pieces, length = drafter.new_context(1, max_context=max_context), 0
    while length < 500:
        count = min(source.choice((0, 1, 3, BLOCK, 100)), 500 - length)
        drafter.extend(pieces, TapRows(text[length : length + count], (count,)))
        draft(drafter, pieces)  # its own rows must not stay
        length += count

    whole = extended(drafter, text, max_context=max_context)

    assert pieces.lengths == whole.lengths == [500]
    for kept in ("keys", "values"):
        for layer, sight in enumerate(whole.sights):
            used = whole.num_slots(sight)
            grown, made = (getattr(c, kept)[layer][:, :, :used] for c in (pieces, whole))
            torch.testing.assert_close(grown, made, rtol=0, atol=1e-13)


def test_a_draft_leaves_every_context_row_as_it_was():
    context = extended(NANO.drafter, random_taps(100), random_taps(7))
    before = [rows.clone() for rows in (*context.keys, *context.values)]

    draft(NANO.drafter, context)

    assert all(map(torch.equal, before, (*context.keys, *context.values)))
    assert context.lengths == [100, 7]


def test_rows_outside_every_window_are_never_read():
    context = extended(SLIDING, random_taps(300))
    expected = draft(SLIDING, context)
    seen = {position % RING for position in range(300 - WINDOW + 1, 300)}
    for rows in (*context.keys, *context.values):
        for slot in set(range(RING)) - seen:
            rows[:, :, slot] = 1e6

    assert torch.equal(draft(SLIDING, context), expected)


def test_contexts_of_very_different_lengths_draft_as_if_alone():
    texts = [random_taps(n, seed=n) for n in (0, 3000, 1, RING, 129)]
    context = extended(NANO.drafter, *texts)

    together = draft(NANO.drafter, context)

    for n, text in enumerate(texts):
        alone = extended(NANO.drafter, text)
        request = DraftRequest((n,), (0,), (n,))
        expected = NANO.drafter.draft(alone, request)[0]
        torch.testing.assert_close(together[n], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [RING - 1, RING + 1, 500])
def test_a_rewind_within_the_spare_rows_is_exact(length):
    text = random_taps(length + 200)
    context = extended(SLIDING, text[:length])
    expected = draft(SLIDING, context)

    SLIDING.extend(context, TapRows(text[length : length + REWIND_ROWS], (REWIND_ROWS,)))
    draft(SLIDING, context)
    context.rewind([length])

    assert context.lengths == [length]
    torch.testing.assert_close(draft(SLIDING, context), expected, rtol=0, atol=0)


def test_rewinds_are_counted_from_the_greatest_length_so_far():
    context = extended(SLIDING, random_taps(300))
    context.rewind([250])
    SLIDING.extend(context, TapRows(random_taps(10), (10,)))

    context.rewind([236])

    with pytest.raises(CacheError, match=rf"at least \[236\], got \[235\] .*{REWIND_ROWS} rows"):
        context.rewind([235])
    assert context.lengths == [236]


def test_a_context_no_ring_has_lost_a_row_of_goes_back_to_nothing():
    for drafter, length in ((SLIDING, RING), (NANO.drafter, RING)):
        context = extended(drafter, random_taps(length))
        context.rewind([0])
        torch.testing.assert_close(
            draft(drafter, context), draft(drafter, drafter.new_context(1)), rtol=0, atol=0
        )


@pytest.mark.parametrize("lengths", [[4], [-1], [2, 2]])
def test_a_context_goes_back_and_never_forward(lengths):
    context = extended(NANO.drafter, random_taps(5))
    context.rewind([3])

    with pytest.raises(CacheError, match=r"expected at most \[3\]"):
        context.rewind(lengths)

    assert context.lengths == [3]


@pytest.mark.parametrize("position", [1, 3, 5, RING, 777])
def test_a_context_that_starts_late_drafts_as_a_whole_one(position):
    text = random_taps(position + 3 * RING)
    whole, late = extended(SLIDING, text[:position]), SLIDING.new_context(1)
    first = late.first_needed(position)
    late.start_at(0, first)
    assert first == max(0, position - WINDOW + 1)

    SLIDING.extend(late, TapRows(text[first:position], (position - first,)))

    for start, end in ((position, position + 1), (position + 1, len(text))):
        torch.testing.assert_close(draft(SLIDING, late), draft(SLIDING, whole), rtol=0, atol=1e-13)
        for context in (whole, late):
            SLIDING.extend(context, TapRows(text[start:end], (end - start,)))
    torch.testing.assert_close(draft(SLIDING, late), draft(SLIDING, whole), rtol=0, atol=1e-13)


def test_a_bounded_full_layer_lets_a_context_start_late():
    text = random_taps(400)
    whole = extended(NANO.drafter, text, max_context=50)
    late = NANO.drafter.new_context(1, max_context=50)
    assert late.first_needed(400) == 400 - 50 + 1
    late.start_at(0, 351)

    NANO.drafter.extend(late, TapRows(text[351:], (49,)))

    expected = draft(NANO.drafter, whole)
    torch.testing.assert_close(draft(NANO.drafter, late), expected, rtol=0, atol=1e-13)


def test_a_late_start_is_refused_where_the_absent_rows_are_seen():
    full, begun = NANO.drafter.new_context(1), extended(SLIDING, random_taps(2))

    with pytest.raises(CacheError, match="sees every row"):
        full.start_at(0, 1)
    with pytest.raises(CacheError, match="expected an empty sequence"):
        begun.start_at(0, 1)
    with pytest.raises(CacheError, match="a position >= 0"):
        SLIDING.new_context(1).start_at(0, -1)

    full.start_at(0, 0)
    assert full.first_needed(1000) == 0


def test_a_block_is_not_drafted_over_rows_that_are_absent():
    context = SLIDING.new_context(2)
    context.start_at(1, 100)
    SLIDING.extend(context, TapRows(random_taps(WINDOW + 2), (4, WINDOW - 2)))

    with pytest.raises(CacheError, match=r"sequence 1: expected rows from 99 on, got rows 100\.\."):
        draft(SLIDING, context)

    SLIDING.extend(context, TapRows(random_taps(1), (0, 1)))
    draft(SLIDING, context)
    context.rewind([4, 100 + WINDOW - 1])  # where it is
    with pytest.raises(CacheError, match="expected at least"):
        context.rewind([4, 100 + WINDOW - 2])


def test_a_selection_keeps_what_each_sequence_may_go_back_to():
    context = extended(SLIDING, random_taps(10), random_taps(300), random_taps(20))

    context.select([1, 0])

    with pytest.raises(CacheError, match=r"at least \[236, 0\]"):
        context.rewind([235, 0])
    context.rewind([236, 0])


@pytest.mark.parametrize("max_context", [0, -3])
def test_a_context_of_no_keys_is_refused(max_context):
    with pytest.raises(ConfigError, match=f"max_context: expected at least 1, got {max_context}"):
        NANO.drafter.new_context(1, max_context=max_context)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_never_waits_for_the_device():
    drafter = preset("nano", device="cuda", dtype=torch.bfloat16).drafter
    text = torch.randn(800, drafter.fc.shape[1], device="cuda").bfloat16()
    context = drafter.new_context(2)
    request = DraftRequest((1, 2), (0, 0), (0, 1))
    mode = torch.cuda.get_sync_debug_mode()

    torch.cuda.set_sync_debug_mode("error")
    try:
        drafter.extend(context, TapRows(text[:600], (500, 100)))
        drafter.extend(context, TapRows(text[600:605], (0, 5)))
        drafter.draft(context, request)
        context.rewind([440, 100])
        context.select([1, 0])
        logits = drafter.draft(context, request)
    finally:
        torch.cuda.set_sync_debug_mode(mode)

    assert logits.isfinite().all()
