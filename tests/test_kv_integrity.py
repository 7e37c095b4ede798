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
        ((1, 4, 32, 8), "page_size"),
        ((0, 4, 16, 8), "num_layers"),
        ((1, 0, 16, 8), "num_pages"),
        ((1, 4, 16, 0), "row_dim"),
    ],
)
def test_a_cache_of_an_impossible_shape_is_refused(shape, message):
    with pytest.raises(ConfigError, match=message):
        CacheShape(*shape)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [1, 2, 3]])
def test_a_page_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ConfigError, match="page order"):
        cache_of(3, page_order=order)


def damaged(damage):
    cache = cache_of()
    commit_rows(cache, 1, 20)
    commit_rows(cache, 2, 20)
    cache.check_integrity()
    damage(cache)
    return cache


def give_a_page_a_second_owner(cache):
    shared = cache._owners[1].pages[0]
    cache._owners[2].pages[0] = shared
    cache._tables.ids[cache._owners[2].row, 0] = shared


def lose_a_free_page(cache):
    cache._pool._free.pop()


def free_a_page_that_is_owned(cache):
    cache._pool._free.append(cache._owners[1].pages[0])


def leave_an_entry_after_the_last_page(cache):
    cache.page_table([1], max_pages=4)
    cache._tables.ids[cache._owners[1].row, 2] = 0


def point_a_table_elsewhere(cache):
    cache._tables.ids[cache._owners[1].row, 0] = cache._pool._free[-1]


def lengthen_beyond_the_pages(cache):
    cache._owners[1].length = 33


def leave_a_released_table_behind(cache):
    row = cache._owners[2].row
    cache.release(2)
    cache._tables.ids[row, 0] = 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (give_a_page_a_second_owner, "owners of page .*got [02]"),
        (lose_a_free_page, "owners of page .*got 0"),
        (free_a_page_that_is_owned, "owners of page .*got 2"),
        (leave_an_entry_after_the_last_page, "page table of 1"),
        (point_a_table_elsewhere, "page table of 1"),
        (lengthen_beyond_the_pages, "length of 1"),
        (leave_a_released_table_behind, "unused page table"),
    ],
)
def test_the_integrity_check_names_the_damage(damage, message):
    with pytest.raises(CacheError, match=message):
        damaged(damage).check_integrity()
