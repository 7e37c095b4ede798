"""Pages that later prompts start from: what is found, kept, copied and evicted.

Rows and features say which tokens they stand for, so a page handed to the wrong prompt shows.
"""

import itertools
import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import OutOfPagesError
from engine.kv_cache import CacheShape, LatentCache
from engine.prefix_index import PrefixIndex

LAYERS, DIM, FEATURES = 2, 3, 2
PAGE_SIZES = [1, 16, 32, 64, 128]


class Values:
    """A number for every run of tokens: what the row of its last token must hold."""

    def __init__(self):
        self.numbers = {}

    def rows(self, tokens, start=0):
        """Return [len(tokens) - start, 1] of the rows behind `start`."""
        ends = range(start + 1, len(tokens) + 1)
        found = [self.numbers.setdefault(tuple(tokens[:end]), len(self.numbers)) for end in ends]
        return torch.tensor(found, dtype=torch.float32)[:, None]


def cache_of(page_size=16, num_pages=16, **options):
    shape = CacheShape(LAYERS, num_pages, page_size, DIM, FEATURES)
    return LatentCache(shape, **({"fill": math.nan, "reuse_prefixes": True} | options))


def write(cache, seq, tokens, values, start):
    """Write rows and features of tokens[start:] behind the committed ones."""
    length = cache.length(seq)
    slots = cache.slots(seq, range(length, length + len(tokens) - start))
    rows = values.rows(tokens, start)
    for layer in range(LAYERS):
        cache.write(layer, slots, (rows + 1e6 * layer).expand(-1, DIM).contiguous())
    cache.write_features(slots, -rows.expand(-1, FEATURES).contiguous())


def run(cache, seq, tokens, values):
    """Begin `seq`, compute what is missing, publish; return the rows it did not compute."""
    start = cache.begin(seq, tokens)
    cache.reserve(seq, len(tokens) - start)
    write(cache, seq, tokens, values, start)
    cache.advance(seq, len(tokens) - start)
    cache.publish(seq, tokens)
    return start


def assert_holds(cache, seq, tokens, values):
    rows = values.rows(tokens)
    assert cache.length(seq) == len(tokens)
    for layer in range(LAYERS):
        assert torch.equal(cache.gather(layer, seq), (rows + 1e6 * layer).expand(-1, DIM))
    assert torch.equal(cache.gather_features(seq, 0, len(tokens)), -rows.expand(-1, FEATURES))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("published", [-1, 0, 1])
@pytest.mark.parametrize("asked", [-1, 0, 1])
def test_a_prompt_starts_with_the_whole_pages_it_shares(page_size, published, asked):
    cache, values = cache_of(page_size, 1024 // page_size), Values()
    tokens = list(range(2 * page_size + 1))
    run(cache, 1, tokens[: 2 * page_size + published], values)

    start = run(cache, 2, tokens[: 2 * page_size + asked], values)

    assert start == (2 * page_size + min(published, asked)) // page_size * page_size
    assert_holds(cache, 2, tokens[: 2 * page_size + asked], values)
    pages_shared = start // page_size
    first, second = cache.page_table([1, 2]).tolist()
    assert first[:pages_shared] == second[:pages_shared]
    cache.check_integrity()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_one_other_token_anywhere_ends_what_is_shared(page_size):
    cache, values = cache_of(page_size, 1024 // page_size), Values()
    tokens = list(range(3 * page_size))
    run(cache, 0, tokens, values)

    for seq, place in enumerate((0, page_size - 1, page_size, 3 * page_size - 1), start=1):
        other = [*tokens[:place], 999, *tokens[place + 1 :]]
        assert cache.begin(seq, other) == place // page_size * page_size


def test_equal_pages_behind_different_beginnings_are_different():
    cache, values = cache_of(), Values()
    a, b, c = [1] * 16, [2] * 16, [3] * 16
    run(cache, 1, [*a, *c], values)

    assert run(cache, 2, [*b, *c], values) == 0
    assert cache.begin(3, [*c, *a]) == 0
    assert_holds(cache, 2, [*b, *c], values)
    assert cache.num_indexed_pages == 4


def test_tokens_of_equal_hash_are_told_apart():
    cache, values = cache_of(), Values()
    assert hash((-1,) * 16) == hash((-2,) * 16)
    run(cache, 1, [-1] * 16, values)

    assert cache.begin(2, [-2] * 16) == 0


def test_rows_behind_the_kept_tokens_are_not_handed_on():
    """A path was cut at a stop token: its last rows are committed, but their tokens were dropped."""
    cache, values = cache_of(), Values()
    tokens = list(range(48))
    cache.reserve(1, 48)
    write(cache, 1, tokens, values, 0)
    cache.advance(1, 48)

    cache.publish(1, tokens[:33])

    assert cache.begin(2, tokens) == 32


def test_reserved_rows_are_not_handed_on():
    cache = cache_of()
    cache.reserve(1, 48)
    cache.advance(1, 31)

    cache.publish(1, range(48))

    assert cache.begin(2, range(48)) == 16


def test_nothing_is_shared_without_reuse():
    cache, values = cache_of(reuse_prefixes=False), Values()
    run(cache, 1, range(40), values)

    assert run(cache, 2, range(40), values) == 0
    assert cache.num_indexed_pages == 0
    cache.check_integrity()


def test_published_pages_outlive_their_sequence():
    cache, values = cache_of(num_pages=4), Values()
    run(cache, 1, range(40), values)

    cache.release(1)

    assert cache.num_free_pages == 2
    assert run(cache, 2, range(40), values) == 32
    assert_holds(cache, 2, range(40), values)
    cache.check_integrity()


def test_sequences_that_compute_the_same_pages_keep_their_own():
    cache, values = cache_of(), Values()
    for seq in (1, 2):
        cache.reserve(seq, 32)
        write(cache, seq, range(32), values, 0)
        cache.advance(seq, 32)
    cache.publish(1, range(16))

    cache.publish(2, range(32))

    cache.check_integrity()
    first, second = cache.page_table([1, 2]).tolist()
    assert cache.begin(3, range(32)) == 32
    assert cache.page_table([3]).tolist() == [[first[0], second[1]]]


@pytest.mark.parametrize("page_size", PAGE_SIZES[1:])
@pytest.mark.parametrize("left", [1, 15])
def test_going_back_into_a_shared_page_copies_it(page_size, left):
    cache, values = cache_of(page_size, 8), Values()
    tokens = list(range(2 * page_size))
    run(cache, 1, tokens, values)
    cache.begin(2, tokens)
    length = page_size + left

    cache.truncate(2, length)

    cache.check_integrity()
    assert_holds(cache, 2, tokens[:length], values)
    behind = cache.slots(2, range(length, 2 * page_size))
    assert cache.pages.flatten(1, 2)[:, behind].isnan().all()
    other = [*tokens[:length], *range(500, 500 + page_size - left)]
    write(cache, 2, other, values, length)
    cache.advance(2, page_size - left)
    assert_holds(cache, 2, other, values)
    assert_holds(cache, 1, tokens, values)
    assert cache.begin(3, tokens) == 2 * page_size
    assert_holds(cache, 3, tokens, values)


def test_a_sequence_that_goes_back_into_its_own_published_page_copies_it():
    cache, values = cache_of(), Values()
    run(cache, 1, range(32), values)

    cache.truncate(1, 20)

    assert cache.begin(2, range(32)) == 32
    assert_holds(cache, 2, range(32), values)
    assert_holds(cache, 1, range(20), values)
    cache.check_integrity()


def test_going_back_to_the_edge_of_a_page_copies_nothing():
    cache, values = cache_of(num_pages=2), Values()
    run(cache, 1, range(32), values)

    cache.truncate(1, 16)

    assert cache.num_free_pages == 0
    cache.check_integrity()


def test_a_page_nobody_else_holds_is_not_copied():
    cache, values = cache_of(num_pages=2, reuse_prefixes=False), Values()
    run(cache, 1, range(32), values)
    before = cache.page_table([1]).tolist()

    cache.truncate(1, 20)

    assert cache.page_table([1]).tolist() == before


def test_a_copy_that_finds_no_page_leaves_the_cache_as_it_was():
    cache, values = cache_of(num_pages=2), Values()
    run(cache, 1, range(32), values)
    cache.begin(2, range(32))

    with pytest.raises(OutOfPagesError, match="expected 1 free, got 0 of 2"):
        cache.truncate(2, 10)

    cache.check_integrity()
    assert_holds(cache, 2, range(32), values)
    cache.release(1)
    cache.grow(3)
    cache.truncate(2, 10)
    assert_holds(cache, 2, range(10), values)


def test_the_least_recently_used_prompt_is_evicted_first_and_from_its_end():
    cache, values = cache_of(num_pages=6), Values()
    for seq in range(3):
        run(cache, seq, [seq] * 32, values)
        cache.release(seq)
    assert run(cache, 0, [0] * 32, values) == 32
    cache.release(0)

    cache.reserve(9, 16)

    assert cache.num_indexed_pages == 5
    assert [cache.begin(10 + seq, [seq] * 32) for seq in range(3)] == [32, 16, 32]
    cache.check_integrity()


def test_a_prompt_that_only_began_with_a_page_has_used_it():
    cache, values = cache_of(num_pages=3), Values()
    for seq in range(2):
        run(cache, seq, [seq] * 16, values)
        cache.release(seq)
    cache.begin(0, [0] * 16)
    cache.release(0)

    cache.reserve(9, 32)

    assert [cache.begin(10 + seq, [seq] * 16) for seq in range(2)] == [16, 0]


def test_a_page_passed_over_takes_those_before_it_along():
    """It would otherwise stand behind its own beginning, which then could never be evicted."""
    index = PrefixIndex(1)
    index.insert([1, 2], [1, 2])
    index.insert([3], [3])
    index.match([1])  # order of use: 2, 3, 1

    assert index.evict(1, lambda page: page != 2) == [3]

    index.check()
    assert index.evict(2, lambda page: True) == [2, 1]


def test_pages_in_use_are_not_evicted():
    cache, values = cache_of(num_pages=4), Values()
    run(cache, 1, [1] * 32, values)
    run(cache, 2, [2] * 32, values)
    cache.release(2)

    cache.reserve(3, 32)

    assert_holds(cache, 1, [1] * 32, values)
    assert cache.begin(4, [1] * 32) == 32
    assert cache.begin(5, [2] * 32) == 0
    cache.check_integrity()


def test_an_idle_page_stays_while_one_that_continues_it_is_in_use():
    cache, values = cache_of(num_pages=4), Values()
    for seq in (1, 2):
        cache.reserve(seq, 16 * seq)
        write(cache, seq, range(16 * seq), values, 0)
        cache.advance(seq, 16 * seq)
        cache.publish(seq, range(32))
    cache.release(1)  # its page is indexed and idle; the next one is sequence 2's

    with pytest.raises(OutOfPagesError, match="expected 2 free, got 1 of 4"):
        cache.reserve(3, 32)

    assert cache.begin(4, range(32)) == 32
    cache.check_integrity()


def test_a_failing_reserve_evicts_nothing():
    cache, values = cache_of(num_pages=4), Values()
    run(cache, 1, [1] * 32, values)
    run(cache, 2, [2] * 32, values)
    cache.release(2)

    with pytest.raises(OutOfPagesError):
        cache.reserve(3, 48)

    assert cache.num_indexed_pages == 4
    assert cache.sequences == (1,)
    cache.check_integrity()


def test_clearing_frees_what_only_the_index_holds():
    cache, values = cache_of(num_pages=4), Values()
    run(cache, 1, [1] * 32, values)
    run(cache, 2, [2] * 32, values)
    cache.release(2)

    cache.clear_prefixes()

    assert cache.num_free_pages == 2
    assert cache.num_indexed_pages == 0
    assert cache.begin(3, [1] * 32) == 0
    assert_holds(cache, 1, [1] * 32, values)
    cache.check_integrity()


def test_a_prompt_published_again_after_an_eviction_is_found_whole():
    cache, values = cache_of(num_pages=3), Values()
    run(cache, 1, range(48), values)
    cache.release(1)
    cache.reserve(2, 32)  # evicts the last two pages
    cache.release(2)

    assert run(cache, 3, range(48), values) == 16
    cache.release(3)

    assert cache.begin(4, range(48)) == 48
    assert_holds(cache, 4, range(48), values)


def test_evictions_pass_over_pages_in_use_once():
    index = PrefixIndex(1)
    index.insert(range(1000), range(1000))  # in use, the least recently used of all
    for page in range(1000, 1100):
        index.insert([-page], [page])
    asked = []

    def is_idle(page):
        asked.append(page)
        return page >= 1000

    evicted = [index.evict(1, is_idle) for _ in range(100)]

    assert list(itertools.chain(*evicted)) == list(range(1000, 1100))
    assert len(asked) <= 1000 + 100
    index.check()


class CacheHistory(RuleBasedStateMachine):
    """The whole cache against lists of tokens, one for each sequence."""

    # Beginnings that meet again: pages are shared often, and leave each other at every distance.
    beginnings = st.sampled_from([(0,) * 40, (1,) * 40, (0,) * 17 + (1,) * 23, tuple(range(40))])
    names = st.integers(0, 4)

    @initialize(
        page_size=st.sampled_from([1, 1, 16, 16, 16, 32]),
        reuse=st.sampled_from([True, True, False]),
    )
    def make(self, page_size, reuse):
        self.num_pages = 192 // page_size
        self.cache = cache_of(page_size, self.num_pages, reuse_prefixes=reuse)
        self.scratch = self.cache.new_scratch(5, 12)
        self.values = Values()
        self.tokens = {}

    def teardown(self):
        for seq in self.tokens:
            self.cache.release(seq)
        self.cache.clear_prefixes()
        assert self.cache.num_free_pages == self.num_pages
        self.cache.check_integrity()

    @rule(
        seq=names,
        beginning=beginnings,
        size=st.integers(0, 40),
        end=st.lists(st.integers(0, 1), max_size=40),
    )
    def begin(self, seq, beginning, size, end):
        if seq in self.tokens:
            return
        prompt = [*beginning[:size], *end]
        start = self.cache.begin(seq, prompt)
        self.tokens[seq] = prompt[:start]
        self.prefill(seq, prompt[start:])

    @rule(seq=names, end=st.lists(st.integers(0, 1), max_size=40))
    def prefill(self, seq, end):
        if seq not in self.tokens or not self.reserve(seq, len(end)):
            return
        tokens = [*self.tokens[seq], *end]
        write(self.cache, seq, tokens, self.values, len(self.tokens[seq]))
        self.cache.advance(seq, len(end))
        self.tokens[seq] = tokens

    @rule(seq=names, path=st.sets(st.integers(1, 11), max_size=7))
    def step(self, seq, path):
        """Write a tree of 12 rows into pages: its accepted path is right, the rest is noise."""
        if seq not in self.tokens or not self.reserve(seq, 12):
            return
        kept, committed = [0, *sorted(path)], self.tokens[seq]
        self.tokens[seq] = [*committed, *(node % 2 for node in kept)]
        for layer in range(LAYERS):
            rows = self.tree(seq, kept, layer)
            slots = self.cache.slots(seq, range(len(committed), len(committed) + 12))
            self.cache.write(layer, slots, rows)
        assert self.cache.commit(seq, kept[1:]) == len(self.tokens[seq])
        self.write_features(seq, len(committed))

    @rule(seq=names, path=st.sets(st.integers(1, 11), max_size=7))
    def hybrid_step(self, seq, path):
        """Write a tree of 12 rows into the scratch, with pages for what will be accepted only."""
        if seq not in self.tokens or not self.reserve(seq, 1 + len(path)):
            return
        kept, committed = [0, *sorted(path)], self.tokens[seq]
        self.tokens[seq] = [*committed, *(node % 2 for node in kept)]
        for layer in range(LAYERS):
            slots = torch.arange(12) + 12 * seq
            self.scratch.write(layer, slots, self.tree(seq, kept, layer))
        length = self.cache.commit_scratch(self.scratch, seq, seq, kept[1:])
        assert length == len(self.tokens[seq])
        assert self.scratch.rows.isnan().all()
        self.write_features(seq, len(committed))

    @rule(seq=names, drop=st.integers(0, 60))
    def truncate(self, seq, drop):
        if seq not in self.tokens:
            return
        length = max(0, len(self.tokens[seq]) - drop)
        try:
            self.cache.truncate(seq, length)
        except OutOfPagesError:
            return
        self.tokens[seq] = self.tokens[seq][:length]

    @rule(seq=names, drop=st.integers(-5, 20))
    def publish(self, seq, drop):
        if seq in self.tokens:
            tokens = self.tokens[seq]
            known = tokens[: len(tokens) - drop] if drop > 0 else [*tokens, *[9] * -drop]
            self.cache.publish(seq, known)

    @rule(seq=names)
    def release(self, seq):
        if self.tokens.pop(seq, None) is not None:
            self.cache.release(seq)

    @rule(more=st.integers(0, 3))
    def grow(self, more):
        self.num_pages += more
        self.cache.grow(self.num_pages)

    @rule()
    def clear(self):
        self.cache.clear_prefixes()

    @invariant()
    def every_sequence_holds_its_tokens_rows(self):
        self.cache.check_integrity()
        for seq, tokens in self.tokens.items():
            assert_holds(self.cache, seq, tokens, self.values)

    def reserve(self, seq, num_rows):
        try:
            self.cache.reserve(seq, num_rows)
        except OutOfPagesError:
            return False
        return True

    def tree(self, seq, kept, layer):
        """Return [12, DIM] rows whose nodes `kept` are those of the last tokens of `seq`."""
        rows = torch.full((12, DIM), -5.0)
        last = self.values.rows(self.tokens[seq], len(self.tokens[seq]) - len(kept))
        rows[kept] = last.expand(-1, DIM) + 1e6 * layer
        return rows

    def write_features(self, seq, start):
        rows = -self.values.rows(self.tokens[seq], start).expand(-1, FEATURES).contiguous()
        slots = self.cache.slots(seq, range(start, len(self.tokens[seq])))
        self.cache.write_features(slots, rows)


TestCacheHistory = CacheHistory.TestCase
TestCacheHistory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
