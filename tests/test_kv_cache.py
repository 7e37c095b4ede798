"""Pages, tables and compaction of the KV cache, attacked with NaN and shuffled pages."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import CacheError, OutOfPagesError
from engine.kv_cache import CacheShape, LatentCache
from engine.page_pool import NO_PAGE

LAYERS, DIM = 3, 5
PAGE_SIZES = [1, 16, 32, 64, 128]


def cache_of(page_size, num_pages=None, **options):
    num_pages = num_pages or -(-512 // page_size)
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).tolist()
    options = {"fill": math.nan, "page_order": shuffled} | options
    return LatentCache(CacheShape(LAYERS, num_pages, page_size, DIM), **options)


def row_values(seq, layer, positions):
    """Rows that say whose they are, in which layer and where."""
    base = 10_000 * seq + 1_000_000 * layer
    return (torch.tensor(list(positions)).float() + base)[:, None].expand(-1, DIM).contiguous()


def write_rows(cache, seq, positions):
    positions = list(positions)
    slots = cache.slots(seq, positions)
    for layer in range(LAYERS):
        cache.write(layer, slots, row_values(seq, layer, positions))


def commit_rows(cache, seq, count):
    start = cache.length(seq) if seq in cache.sequences else 0
    cache.reserve(seq, count)
    write_rows(cache, seq, range(start, start + count))
    cache.advance(seq, count)


def contents(cache):
    """All that a refused call must leave as it was, in a form that can be compared."""
    lengths = {seq: (cache.length(seq), cache.capacity(seq)) for seq in cache.sequences}
    return cache.pages.nan_to_num(nan=-7.0).tolist(), lengths, cache._ledger.pool.free_pages


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("start", [0, 12, 15, 16, 31, 63, 127])
@pytest.mark.parametrize(
    "path",
    [[], [1, 2, 3], [3, 5], [2, 3], [4, 7, 9], [1, 4, 9, 15, 22, 31], [70, 71]],
    ids=str,
)
def test_a_commit_moves_the_accepted_rows_of_every_layer(page_size, start, path):
    cache = cache_of(page_size)
    commit_rows(cache, 1, start)
    cache.reserve(1, 72)
    write_rows(cache, 1, range(start, start + 72))

    length = cache.commit(1, path)

    kept = [*range(start), start, *(start + node for node in path)]
    assert length == cache.length(1) == start + 1 + len(path)
    for layer in range(LAYERS):
        assert torch.equal(cache.gather(layer, 1), row_values(1, layer, kept))
    cache.check_integrity()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_commit_leaves_other_sequences_alone_and_drops_rejected_rows(page_size):
    cache = cache_of(page_size)
    for seq in (1, 2):
        commit_rows(cache, seq, 20)
        cache.reserve(seq, 9)
        write_rows(cache, seq, range(20, 29))

    cache.commit(1, torch.tensor([3, 5, 8], dtype=torch.int32))

    for layer in range(LAYERS):
        second = cache.layer(layer).flatten(0, 1)[cache.slots(2, range(29))]
        assert torch.equal(second, row_values(2, layer, range(29)))
    rejected = cache.slots(1, range(24, cache.capacity(1)))
    assert cache.pages.flatten(1, 2)[:, rejected].isnan().all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_sequences_of_a_batch_commit_their_own_paths(page_size):
    """Different overlaps side by side: rows of one path are where another's are dropped."""
    cache = cache_of(page_size)
    starts = {1: 12, 2: 0, 3: 63}
    paths = {1: [4, 7, 9], 2: [3, 5], 3: [2, 3]}
    for seq, start in starts.items():
        commit_rows(cache, seq, start)
        cache.reserve(seq, 10)
        write_rows(cache, seq, range(start, start + 10))

    for seq, path in paths.items():
        cache.commit(seq, path)

    for seq, start in starts.items():
        kept = [*range(start), start, *(start + node for node in paths[seq])]
        assert torch.equal(cache.gather(1, seq), row_values(seq, 1, kept))


def test_a_long_accepted_path_moves_alike_in_64_layers():
    """No layer shares storage with another, and each is compacted once."""
    cache = LatentCache(CacheShape(64, 4, 16, DIM), fill=math.nan)
    cache.reserve(1, 32)
    rows = torch.arange(64 * 32 * DIM).float().view(64, 32, DIM)
    for layer in range(64):
        cache.write(layer, cache.slots(1, range(32)), rows[layer])

    cache.commit(1, [1, 4, 9, 15, 22, 31])

    for layer in range(64):
        assert torch.equal(cache.gather(layer, 1), rows[layer, [0, 1, 4, 9, 15, 22, 31]])


def test_a_path_may_be_a_chain_of_the_whole_tree():
    cache = cache_of(1, 8)
    cache.reserve(4, 8)
    write_rows(cache, 4, range(8))

    assert cache.commit(4, range(1, 8)) == 8
    assert torch.equal(cache.gather(0, 4), row_values(4, 0, range(8)))


@pytest.mark.parametrize("path", [[0], [2, 0], [2, 2], [3, 1], [16], [1, 16], [-1]], ids=str)
def test_a_path_that_does_not_ascend_within_the_tree_changes_nothing(path):
    cache = cache_of(16)
    cache.reserve(1, 16)
    write_rows(cache, 1, range(16))
    before = contents(cache)

    with pytest.raises(CacheError, match=r"path: expected ascending nodes|num_rows: .* got 17"):
        cache.commit(1, path)

    assert contents(cache) == before


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slots_follow_the_page_table(page_size):
    cache = cache_of(page_size)
    commit_rows(cache, 1, 70)
    commit_rows(cache, 2, 3)

    table = cache.page_table([2, 1])

    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert table.shape == (2, -(-70 // page_size))
    for position in range(70):
        page = int(table[1, position // page_size])
        assert cache.slots(1, [position]).tolist() == [page * page_size + position % page_size]
    pages_of_second = -(-3 // page_size)
    assert (table[0, pages_of_second:] == NO_PAGE).all()
    assert (table[0, :pages_of_second] >= 0).all()


def test_a_page_table_can_be_wider_but_not_narrower_than_its_sequences():
    cache = cache_of(16)
    commit_rows(cache, 1, 40)

    table = cache.page_table([1], max_pages=9)

    assert table.shape == (1, 9)
    assert (table[0, 3:] == NO_PAGE).all()
    assert cache.page_table([]).shape == (0, 1)
    with pytest.raises(CacheError, match="max_pages: expected at least 3, got 2"):
        cache.page_table([1], max_pages=2)


def test_a_page_table_is_a_copy():
    cache = cache_of(16)
    commit_rows(cache, 1, 40)

    cache.page_table([1]).fill_(99)

    cache.check_integrity()


def test_pages_are_handed_out_in_the_given_order():
    cache = cache_of(16, 4, page_order=[2, 0, 3, 1])

    cache.reserve(1, 17)
    cache.reserve(2, 1)

    assert cache.page_table([1, 2]).tolist() == [[2, 0], [3, NO_PAGE]]


def test_reserved_pages_are_used_before_new_ones():
    cache = cache_of(16, 4)
    cache.reserve(1, 20)
    cache.advance(1, 1)

    cache.reserve(1, 31)

    assert cache.capacity(1) == 32
    assert cache.num_free_pages == 2


@pytest.mark.parametrize("known", [True, False])
def test_running_out_of_pages_leaves_the_cache_unchanged(known):
    cache = cache_of(16, 4)
    commit_rows(cache, 1, 33)
    seq = 1 if known else 2
    before = contents(cache)

    with pytest.raises(OutOfPagesError, match=r"pages: expected [23] free, got 1 of 4"):
        cache.reserve(seq, 32)

    assert contents(cache) == before
    cache.check_integrity()
    cache.reserve(seq, 15)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_released_sequence_gives_everything_back(page_size):
    cache = cache_of(page_size, 64)
    commit_rows(cache, 1, 30)
    commit_rows(cache, 2, 30)

    cache.release(1)
    cache.release(2)

    assert cache.num_free_pages == 64
    assert cache.sequences == ()
    cache.check_integrity()
    with pytest.raises(CacheError, match="sequence: expected one of"):
        cache.length(1)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_cache_grows_with_its_contents(page_size):
    cache = cache_of(page_size, 128 // page_size)
    commit_rows(cache, 1, 100)
    with pytest.raises(OutOfPagesError):
        cache.reserve(1, 29)

    cache.grow(192 // page_size + 1)

    cache.check_integrity()
    assert cache.shape.num_pages == cache.layer(0).shape[0] == 192 // page_size + 1
    commit_rows(cache, 1, 64)
    assert torch.equal(cache.gather(2, 1), row_values(1, 2, range(164)))
    cache.check_integrity()
    with pytest.raises(CacheError, match="num_pages: expected at least"):
        cache.grow(1)


def test_added_rows_hold_the_fill_and_added_pages_are_handed_out_last():
    cache = cache_of(16, 2, page_order=[1, 0])

    cache.grow(4)

    assert cache.pages.isnan().all()
    cache.reserve(1, 64)
    assert cache.page_table([1]).tolist() == [[1, 0, 2, 3]]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_features_stand_beside_the_rows_of_their_positions(page_size):
    num_pages = 256 // page_size
    cache = LatentCache(CacheShape(LAYERS, num_pages, page_size, DIM, 3), fill=math.nan)
    features = torch.arange(300.0).view(100, 3)
    cache.reserve(7, 5)
    commit_rows(cache, 1, 100)

    cache.write_features(cache.slots(1, range(20)), features[:20])
    cache.write_features(cache.slots(1, range(20, 100)), features[20:])
    cache.grow(num_pages + 3)

    assert cache.features.shape == (num_pages + 3, page_size, 3)
    assert torch.equal(cache.gather_features(1, 0, 100), features)
    assert torch.equal(cache.gather_features(1, 33, 65), features[33:65])
    assert cache.gather_features(1, 40, 40).shape == (0, 3)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_features_of_dropped_rows_do_not_come_back(page_size):
    cache = LatentCache(CacheShape(1, 128 // page_size, page_size, DIM, 3), fill=math.nan)
    cache.reserve(1, 128)
    cache.write_features(cache.slots(1, range(128)), torch.ones(128, 3))
    cache.advance(1, 128)

    cache.truncate(1, 37)
    cache.reserve(1, 91)
    cache.advance(1, 91)

    assert cache.gather_features(1, 37, 128).isnan().all()
    assert (cache.gather_features(1, 0, 37) == 1).all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_page_used_before_comes_back_without_its_old_rows(page_size):
    cache = cache_of(page_size, 64 // page_size)
    commit_rows(cache, 1, 64)
    cache.release(1)

    cache.reserve(2, 64)

    assert cache.pages.isnan().all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_truncation_keeps_the_first_rows_and_gives_back_the_pages_after_them(page_size):
    cache = cache_of(page_size, 512 // page_size)
    commit_rows(cache, 1, 100)

    cache.truncate(1, 35)

    assert cache.length(1) == 35
    assert cache.capacity(1) == -(-35 // page_size) * page_size
    assert torch.equal(cache.gather(2, 1), row_values(1, 2, range(35)))
    cache.check_integrity()
    cache.reserve(1, 65)
    fresh = cache.slots(1, range(35, 100))
    assert cache.pages.flatten(1, 2)[:, fresh].isnan().all()


def test_without_a_fill_rows_begin_as_zeros():
    cache = LatentCache(CacheShape(1, 2, 16, 4))

    assert not cache.pages.any()


class RefuseHostReads(TorchDispatchMode):
    """Fails on every operation by which a tensor's values reach the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        assert name not in {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}, name
        return func(*args, **(kwargs or {}))


def test_a_write_reads_nothing_back_to_the_host():
    cache = cache_of(16)
    cache.reserve(1, 3)
    slots, rows = cache.slots(1, range(3)), torch.ones(3, DIM)

    with RefuseHostReads():
        cache.write(1, slots, rows)

    with pytest.raises(AssertionError, match="_local_scalar_dense"), RefuseHostReads():
        slots.sum().item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_step_of_the_cache_never_waits_for_the_device(page_size):
    """What a step asks for, new pages and a copy on write included, with every sync an error."""
    shape = CacheShape(LAYERS, 512 // page_size, page_size, DIM, 2)
    cache = LatentCache(shape, device="cuda", reuse_prefixes=True)
    rows = torch.arange(200.0, device="cuda")[:, None].expand(-1, DIM).contiguous()
    cache.reserve(1, 200)
    scratch = cache.new_scratch(1, 24)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots = cache.slots(1, range(200))
        for layer in range(LAYERS):
            cache.write(layer, slots, rows)
            scratch.write(layer, slots[:0], rows[:0])
        cache.write_features(slots, rows[:, :2].contiguous())
        cache.advance(1, 136)
        cache.commit(1, [2, 3, 30])
        cache.reserve(1, 200)
        cache.commit_scratch(scratch, 0, 1, [1, 5, 23])
        cache.publish(1, range(144))
        start = cache.begin(2, range(144))
        cache.truncate(2, start - start // 3)
        cache.reserve(2, 40)
        table = cache.page_table([2, 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")

    cache.check_integrity()
    assert start == 144 // page_size * page_size
    assert table.shape == (2, -(-340 // page_size))
    kept = [*range(136), 136, 138, 139, 166]
    assert cache.gather(1, 1)[:, 0].tolist() == [*map(float, kept), 0.0, 0.0, 0.0, 0.0]
    assert torch.equal(cache.gather(2, 2), cache.gather(2, 1)[: start - start // 3])
