"""Prompts start from pages of earlier ones that began alike, and nobody can tell from the text."""

import dataclasses

import pytest
import torch

from engine.config import MODES, EngineConfig
from engine.decoder import Engine
from engine.errors import OutOfPagesError
from engine.presets import random_drafter
from engine.sampling import Sampling
from engine.target import Target
from tests.nano import (
    BLOCK,
    MODELS,
    POISON,
    TARGET,
    VOCAB,
    assert_is_the_targets_own,
    assert_nobody_holds_a_page,
    assert_state_equals_recomputation,
    make_engine,
    pages_in_use,
    planted,
    prompt,
)


class CountingTarget(Target):
    """A target that writes down how many rows each pass has."""

    def __init__(self):
        super().__init__(TARGET.config, TARGET.tensors)
        self.num_rows = []

    def forward(self, rows, tap_ids):
        self.num_rows.append(len(rows.token_ids))
        return super().forward(rows, tap_ids)


def reusing(drafter=MODELS.drafter, **changes):
    return make_engine(drafter, prefix_reuse=True, **changes)


def counting(**changes):
    config = EngineConfig(prefix_reuse=True, max_context=256, **changes)
    return Engine(CountingTarget(), MODELS.drafter, config, page_fill=POISON)


def prefilled_rows(engine, text):
    """Rows that a prefill of `text` runs through the target; its pages are given back."""
    engine.target.num_rows.clear()
    batch = engine.prefill([text])
    count = sum(engine.target.num_rows)
    assert_state_equals_recomputation(engine, batch)
    engine.release(batch)
    return count


@pytest.mark.parametrize(
    ("mode", "layout", "drafter_context"),
    [
        ("ar", "paged", None),
        ("dflash", "paged", None),
        ("dflash", "hybrid", 4),
        ("ddtree", "hybrid", None),
        ("ddtree", "paged", 1),
        ("ddtree", "paged", 30),
    ],
)
def test_texts_are_the_same_with_and_without_reuse(mode, layout, drafter_context):
    options = {"mode": mode, "cache_layout": layout, "drafter_context": drafter_context}
    engine, plain = reusing(**options), make_engine(**options)
    text, sampling = prompt(37, seed=3), Sampling(1.0)

    for turn in range(3):  # a conversation: the reply and something new
        prompts = [text, prompt(20, seed=turn), text]
        sampled = {"sampling": sampling, "seed": [turn, 1, 9]}
        got = engine.generate(prompts, max_new_tokens=12, **sampled)
        expected = plain.generate(prompts, max_new_tokens=12, **sampled)

        assert [g.token_ids for g in got] == [g.token_ids for g in expected]
        assert [g.commit_lengths for g in got] == [g.commit_lengths for g in expected]
        for words, seed, generation in zip(prompts, (turn, 1, 9), got, strict=True):
            assert_is_the_targets_own(generation, words, sampling, seed)
        assert_nobody_holds_a_page(engine)
        text = [*text, *got[0].token_ids, *prompt(5, seed=turn)]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 18, 31, 32, 33, 34, 50])
def test_a_prompt_again_runs_only_rows_behind_its_whole_pages(length):
    engine, text = counting(page_size=16), prompt(length)

    first, again = prefilled_rows(engine, text), prefilled_rows(engine, text)

    assert first == length - 1
    assert again == (length - 1) % 16
    assert engine.cache.num_indexed_pages == (length - 1) // 16


@pytest.mark.parametrize(("length", "reused"), [(31, 16), (32, 16), (33, 32), (34, 32)])
def test_the_root_of_a_prompt_never_comes_from_a_page(length, reused):
    """An earlier text went on from here: the row of the last token is known, and left alone."""
    engine, text = counting(page_size=16), prompt(50)
    prefilled_rows(engine, text)

    assert prefilled_rows(engine, text[:length]) == length - 1 - reused


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_a_second_prompt_shares_the_pages_it_has_in_common(page_size):
    engine = counting(page_size=page_size, prefill_chunk=48)
    common = prompt(130)
    first = engine.prefill([[*common, 1, 2, 3]])
    before = pages_in_use(engine)
    engine.target.num_rows.clear()

    second = engine.prefill([[*common, 4, 5, 6]])

    shared = 130 // page_size
    assert sum(engine.target.num_rows) == 132 - shared * page_size
    assert pages_in_use(engine) - before == -(-132 // page_size) - shared
    tables = engine.cache.page_table([*first.seqs, *second.seqs])
    assert torch.equal(tables[0, :shared], tables[1, :shared])
    engine.cache.check_integrity()
    assert_state_equals_recomputation(engine, second)
    assert_state_equals_recomputation(engine, first)


def test_equal_prompts_of_one_batch_share_their_pages():
    engine = counting(page_size=16)
    text = prompt(50)

    batch = engine.prefill([text] * 4)

    assert sum(engine.target.num_rows) == 49 + 3 * 1
    assert pages_in_use(engine) == 3 + 4
    for _ in range(3):
        engine.step(batch)
        engine.cache.check_integrity()
    assert_state_equals_recomputation(engine, batch)
    assert len({tuple(s.token_ids) for s in batch.sequences}) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_reply_is_part_of_the_next_prompt(mode):
    engine = counting(page_size=1, mode=mode)
    text = prompt(20)
    reply = engine.generate([text], max_new_tokens=24)[0]
    known = 20 + 24 - 1 if mode == "ar" else 20 - 1 + sum(reply.commit_lengths[:-1])

    rows = prefilled_rows(engine, [*text, *reply.token_ids, 7])

    assert known > 40
    assert rows == 44 - known  # all but the last step's, whose rows have no features yet


def test_a_released_batch_leaves_its_texts_for_later_prompts():
    engine = counting(page_size=1)
    batch = engine.prefill([prompt(9)])
    for _ in range(3):
        engine.step(batch)
    text, known = list(batch.sequences[0].token_ids), batch.context.lengths[0]
    assert known > 8
    engine.release(batch)

    assert prefilled_rows(engine, text) == len(text) - 1 - known
    assert_nobody_holds_a_page(engine)


@pytest.mark.parametrize("mode", MODES)
def test_rows_behind_a_stop_token_are_not_exposed(mode):
    text = prompt(10, seed=6)
    engine = reusing(planted([text], BLOCK), mode=mode, page_size=1)
    full = make_engine(planted([text], BLOCK)).generate([text], max_new_tokens=30)[0].token_ids
    stop = next(token for token in full[8:] if token not in full[:8])
    kept = full[: full.index(stop) + 1]

    engine.generate([text], max_new_tokens=30, stop_token_ids=[stop])
    batch = engine.prefill([[*text, *full]])

    assert engine.cache.num_indexed_pages == 9 + 30  # the prompt's own, now
    assert_state_equals_recomputation(engine, batch)
    engine.release(batch)
    engine.cache.clear_prefixes()
    engine.generate([text], max_new_tokens=30, stop_token_ids=[stop])
    assert 9 < engine.cache.num_indexed_pages < len(text) + len(kept)


def test_only_the_tokens_asked_for_are_published():
    engine = reusing(planted([prompt(10)], 4), page_size=1)
    batch = engine.prefill([prompt(10)])
    for _ in range(3):
        engine.step(batch)
    assert (batch.context.lengths, batch.sequences[0].committed_length) == ([17], 21)

    batch.publish(0, 12)
    assert engine.cache.num_indexed_pages == 12
    batch.publish(0, 21)
    assert engine.cache.num_indexed_pages == 17


@pytest.mark.parametrize("num_pages", [8, 9, 12])
def test_a_small_pool_forgets_old_prompts_and_goes_on(num_pages):
    engine = reusing(page_size=16, num_pages=num_pages, max_context=96)
    most = 0

    for turn in range(8):
        text = prompt(20 + 5 * (turn % 5), seed=turn // 2)
        generation = engine.generate([text], max_new_tokens=12)[0]

        assert_is_the_targets_own(generation, text)
        assert_nobody_holds_a_page(engine)
        most = max(most, engine.cache.num_indexed_pages)

    assert 4 <= most <= num_pages


def test_pages_of_a_live_batch_are_never_evicted():
    engine = reusing(page_size=16, num_pages=12, max_context=96)
    text = prompt(50)
    live = engine.prefill([text])
    for turn in range(6):
        engine.generate([prompt(40, seed=1 + turn)], max_new_tokens=10)
        engine.step(live)
        engine.cache.check_integrity()

    assert_state_equals_recomputation(engine, live)


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
def test_a_rewind_into_a_shared_page_leaves_it_to_the_others(layout):
    text = prompt(20)
    engine = reusing(planted([text], 5), page_size=16, cache_layout=layout)
    batch = engine.prefill([text])
    engine.step(batch)
    snapshot = engine.snapshot(batch)
    steps = [engine.step(batch) for _ in range(3)]
    batch.complete_context(engine.drafter)
    batch.publish(0, batch.sequences[0].committed_length)
    whole = batch.sequences[0].token_ids[:]
    other = reader_of(engine, whole)  # of a page that holds rows behind the snapshot

    engine.rewind(batch, snapshot)
    engine.cache.check_integrity()
    again = [engine.step(batch) for _ in range(3)]

    assert again == steps
    engine.cache.check_integrity()
    assert_state_equals_recomputation(engine, batch)
    assert torch.equal(engine.cache.gather(1, other.seq), other.rows)
    assert torch.equal(engine.cache.gather_features(other.seq, 0, other.length), other.features)


@dataclasses.dataclass
class Reader:
    """A sequence of the cache that only holds what others published, and what it read there."""

    seq: int
    length: int
    rows: torch.Tensor
    features: torch.Tensor


def reader_of(engine, token_ids):
    cache, seq = engine.cache, 1000
    length = cache.begin(seq, token_ids)
    assert length == 32
    return Reader(seq, length, cache.gather(1, seq), cache.gather_features(seq, 0, length))


@pytest.mark.parametrize("mode", MODES)
def test_a_prefill_without_pages_gives_all_back(mode):
    engine = reusing(mode=mode, page_size=16, num_pages=4)

    with pytest.raises(OutOfPagesError):
        engine.prefill([prompt(40), prompt(40, seed=2)])

    assert_nobody_holds_a_page(engine)
    assert engine.cache.num_indexed_pages > 0  # of the prompt that came through


@pytest.mark.parametrize("layout", ["paged", "hybrid"])
@pytest.mark.parametrize("mode", MODES)
def test_a_generation_that_runs_out_of_pages_gives_all_back(mode, layout):
    engine = reusing(mode=mode, page_size=16, num_pages=3, cache_layout=layout)

    with pytest.raises(OutOfPagesError):
        engine.generate([prompt(17)], max_new_tokens=100)

    assert_nobody_holds_a_page(engine)
    assert engine.generate([prompt(5)], max_new_tokens=3)[0].token_ids


@pytest.mark.parametrize("drafter_context", [1, 3, 20])
def test_a_bounded_drafter_makes_only_the_rows_it_sees_again(drafter_context):
    """All layers are full and bounded: with one key, not a single row is made again."""
    config = dataclasses.replace(
        MODELS.drafter.config, layer_types=("full_attention",) * 2, sliding_window=None
    )
    drafter = random_drafter(config, TARGET, seed=3)
    made = []

    class Watched:
        def __init__(self):
            self.config, self.new_context = drafter.config, drafter.new_context
            self.extend, self.draft = drafter.extend, drafter.draft

        def extend_features(self, context, features, counts):
            made.append(sum(counts))
            drafter.extend_features(context, features, counts)

    options = {"drafter_context": drafter_context, "page_size": 16}
    engine, plain = reusing(Watched(), **options), make_engine(drafter, **options)
    text = prompt(49)
    engine.release(engine.prefill([text]))

    batch = engine.prefill([text])

    assert made == [drafter_context - 1]  # all 48 rows lie in shared pages
    expected = plain.draft(plain.prefill([text]))
    torch.testing.assert_close(engine.draft(batch), expected, rtol=0, atol=1e-5)
    for _ in range(5):
        engine.step(batch)
    assert (
        batch.sequences[0].token_ids[49:]
        == list(plain.generate([text], max_new_tokens=40)[0].token_ids)[
            : len(batch.sequences[0].new_token_ids)
        ]
    )


def test_batches_that_share_pages_take_turns():
    engine = reusing(page_size=16, max_context=128)
    common = prompt(40)
    first = engine.prefill([common, [*common, 3]], sampling=Sampling(1.0), seed=4)
    engine.step(first)
    second = engine.prefill([[*common, 9], prompt(50, seed=8)], sampling=Sampling(1.0), seed=5)
    for _ in range(3):
        engine.step(second)
        engine.step(first)
        engine.cache.check_integrity()
    first.keep([1])
    engine.step(first)
    engine.release(second)

    assert_state_equals_recomputation(engine, first)
    engine.release(first)
    assert_nobody_holds_a_page(engine)
    engine.cache.clear_prefixes()
    assert engine.cache.num_free_pages == engine.cache.shape.num_pages


def test_a_step_after_reuse_can_be_taken_back():
    engine = reusing(page_size=16)
    text = prompt(60)
    engine.release(engine.prefill([text]))
    batch = engine.prefill([text, [*text[:40], VOCAB - 1]])
    snapshot = engine.snapshot(batch)
    steps = [engine.step(batch) for _ in range(4)]

    engine.rewind(batch, snapshot)

    assert [engine.step(batch) for _ in range(4)] == steps
    engine.cache.check_integrity()
    assert_state_equals_recomputation(engine, batch)
