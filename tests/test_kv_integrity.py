"""What the KV cache refuses, and the damage its integrity check finds."""

import pytest
import torch

from engine.errors import CacheError, ConfigError, ShapeError
from engine.kv_cache import CacheShape, LatentCache

DIM = 5


def cache_of(num_pages=8, **options):
    return LatentCache(CacheShape(2, num_pages, 16, DIM), **options)


def commit_rows(cache, seq, count):
    cache.reserve(seq, count)
    cache.advance(seq, count)


@pytest.mark.parametrize("wanted", [[-1], [32], [0, 40]])
def test_positions_without_a_page_are_refused(wanted):
    cache = cache_of()
    cache.reserve(1, 20)

    with pytest.raises(CacheError, match=r"positions: expected 0\.\.31"):
        cache.slots(1, wanted)


@pytest.mark.parametrize("wanted", [torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64)])
def test_positions_that_are_no_row_numbers_are_refused(wanted):
    cache = cache_of()
    cache.reserve(1, 20)

    with pytest.raises(ShapeError, match="positions: expected"):
        cache.slots(1, wanted)


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(2, DIM), torch.zeros(3, DIM + 1), torch.zeros(3, DIM).double(), torch.zeros(DIM)],
)
def test_rows_that_do_not_fit_are_refused(rows):
    cache = cache_of()
    cache.reserve(1, 3)

    with pytest.raises(ShapeError, match="rows: expected"):
        cache.write(0, cache.slots(1, range(3)), rows)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.reserve(1, -1), "num_rows: expected at least 0"),
        (lambda cache: cache.advance(1, 13), r"num_rows: expected 0\.\.12"),
        (lambda cache: cache.advance(1, -1), r"num_rows: expected 0\.\.12"),
        (lambda cache: cache.truncate(1, 5), r"length: expected 0\.\.4"),
        (lambda cache: cache.truncate(1, -1), r"length: expected 0\.\.4"),
        (lambda cache: cache.release(9), "sequence: expected one of"),
        (lambda cache: cache.begin(1, [5]), "sequence: expected one that has not begun, got 1"),
        (lambda cache: cache.gather_features(1, 2, 5), r"start, end: .* 0\.\.4, got 2 and 5"),
        (lambda cache: cache.gather_features(1, 3, 2), r"start, end: .* got 3 and 2"),
    ],
)
def test_impossible_lengths_are_refused(call, message):
    cache = cache_of()
    commit_rows(cache, 1, 4)

    with pytest.raises(CacheError, match=message):
        call(cache)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 4, 8, 8), "page_size"),
        ((1, 4, 256, 8), "page_size"),
        ((0, 4, 16, 8), "num_layers"),
        ((1, 0, 16, 8), "num_pages"),
        ((1, 4, 16, 0), "row_dim"),
        ((1, 4, 16, 8, -1), "feature_dim"),
    ],
)
def test_a_cache_of_an_impossible_shape_is_refused(shape, message):
    with pytest.raises(ConfigError, match=message):
        CacheShape(*shape)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3]])
def test_a_page_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ConfigError, match="page order"):
        cache_of(3, page_order=order)


@pytest.mark.parametrize("rows", [torch.zeros(2, 3), torch.zeros(3, 3).double()])
def test_features_that_do_not_fit_are_refused(rows):
    cache = LatentCache(CacheShape(1, 4, 16, DIM, 3))
    cache.reserve(1, 3)

    with pytest.raises(ShapeError, match=r"rows: expected \[n\] slots and \[n, 3\]"):
        cache.write_features(cache.slots(1, range(3)), rows)


def damaged(damage):
    cache = cache_of(reuse_prefixes=True)
    commit_rows(cache, 1, 40)
    cache.publish(1, range(40))
    cache.begin(2, range(20))
    commit_rows(cache, 2, 4)
    cache.check_integrity()
    damage(cache)
    return cache


def holding(cache, seq):
    return cache._ledger.holdings[seq]


def set_table(cache, seq, entry, page):
    cache._ledger.tables.ids[holding(cache, seq).row, entry] = page


def give_a_page_a_second_owner(cache):
    taken = holding(cache, 1).pages[2]
    holding(cache, 2).pages[1] = taken
    set_table(cache, 2, 1, taken)


def lose_a_free_page(cache):
    cache._ledger.pool._free.pop()


def free_a_page_that_is_held(cache):
    cache._ledger.pool._free.append(holding(cache, 1).pages[0])


def count_a_holder_too_many(cache):
    cache._ledger.pool.share([holding(cache, 1).pages[2]])


def forget_the_indexs_hold(cache):
    cache._ledger.pool.drop([holding(cache, 1).pages[1]])


def share_a_page_that_will_be_written(cache):
    """As if a sequence went back into a published page without a copy."""
    holding(cache, 1).length = 30


def leave_an_entry_after_the_last_page(cache):
    cache.page_table([1], max_pages=4)
    set_table(cache, 1, 3, 0)


def point_a_table_elsewhere(cache):
    set_table(cache, 1, 0, cache._ledger.pool._free[-1])


def lengthen_beyond_the_pages(cache):
    holding(cache, 1).length = 49


def leave_a_released_table_behind(cache):
    row = holding(cache, 2).row
    cache.release(2)
    cache._ledger.tables.ids[row, 0] = 0


def lose_the_page_before_an_indexed_one(cache):
    entries = cache._ledger.index._entries
    first = next(key for key, entry in entries.items() if entry.before is None)
    cache._ledger.pool.drop([entries.pop(first).page])


def use_a_page_before_what_continues_it(cache):
    cache._ledger.index._entries.move_to_end(next(iter(cache._ledger.index._entries)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (give_a_page_a_second_owner, "holders of page .*expected [02] .* got 1"),
        (lose_a_free_page, r"holders of page .*expected 0 \(free: 1\), got 0 \(free: 0\)"),
        (free_a_page_that_is_held, r"holders of page .*got 3 \(free: 1\)"),
        (count_a_holder_too_many, "holders of page .*expected 1 .* got 2"),
        (forget_the_indexs_hold, "holders of page .*expected 2 .* got 1"),
        (share_a_page_that_will_be_written, "of 1: expected no other holder, got"),
        (leave_an_entry_after_the_last_page, "page table of 1"),
        (point_a_table_elsewhere, "page table of 1"),
        (lengthen_beyond_the_pages, "length of 1"),
        (leave_a_released_table_behind, "page table of nobody"),
        (lose_the_page_before_an_indexed_one, "index of page .*expected the page before it"),
        (use_a_page_before_what_continues_it, "index of page .*expected 0 pages that continue it"),
    ],
)
def test_the_integrity_check_names_the_damage(damage, message):
    with pytest.raises(CacheError, match=message):
        damaged(damage).check_integrity()
