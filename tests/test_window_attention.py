"""Attention of drafter layers that see a window: spread over a device against PyTorch's own."""

import dataclasses

import pytest
import torch

from engine.context_rows import PAGE_ROWS, ContextRows, Sight
from engine.window_attention import ALIGNMENT, MaskedAttention, SpreadAttention, block_mask
from tests.attention_runs import ON_GPU, captured
from tests.kimi import KIMI_DRAFTER

HEAD_DIM = 16
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
WINDOW = Sight(12, 12)
# Sight, lengths, block size, key heads, query heads of each.
LAYOUTS = {
    "empty": (WINDOW, [0], 2, 1, 1),
    "part-of-a-window": (WINDOW, [5, 0, 11], 8, 2, 4),
    "ring-turned": (WINDOW, [75, 149, 3], 5, 1, 8),
    "causal": (Sight(12, 1), [90, 1], 8, 2, 2),
    "bounded-full-layer": (Sight(40), [130], 7, 1, 3),
    "no-room-in-front": (WINDOW, [20, 80], PAGE_ROWS, 1, 2),
}


def rows_of(sight, lengths, block_size, heads, *, device, dtype):
    """Rows of one layer, drawn in every slot and in the block."""
    config = dataclasses.replace(
        KIMI_DRAFTER, block_size=block_size, num_key_value_heads=heads, head_dim=HEAD_DIM
    )
    like = torch.empty(0, dtype=dtype, device=device)
    rows = ContextRows.zeros(config, (sight,), len(lengths), like).widened(256)
    used = rows.layers[0][:, :, rows.front - block_size :]
    used.copy_(torch.randn(used.shape, generator=torch.Generator().manual_seed(0)))
    return rows


def both(name, *, device, dtype):
    """Rows, queries, and both kinds of attention of one layout."""
    sight, lengths, block_size, heads, group = LAYOUTS[name]
    rows = rows_of(sight, lengths, block_size, heads, device=device, dtype=dtype)
    positions = torch.tensor(lengths).unsqueeze(1) + torch.arange(block_size)
    mask = block_mask(sight, positions, sight.num_kept(rows.capacity)).to(device)
    size = (len(lengths), heads, group * block_size, HEAD_DIM)
    queries = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    spread = SpreadAttention.over(mask, group, dtype, room=rows.front - rows.block_size)
    return rows, queries, MaskedAttention.over(mask, group, dtype), spread


@every_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_spread_attention_sees_what_the_mask_lets_it_see(name, dtype, device):
    rows, queries, masked, spread = both(name, device=device, dtype=dtype)

    got = spread(queries, rows, 0)

    assert got.dtype == dtype
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, masked(queries, rows, 0), rtol=bound, atol=bound)


def test_what_is_multiplied_is_aligned_where_there_is_room_in_front_of_the_block():
    widths = {name: both(name, device="cpu", dtype=torch.float32)[3] for name in LAYOUTS}

    assert all(
        one.bias.shape[-1] % ALIGNMENT == 0
        for name, one in widths.items()
        if name != "no-room-in-front"
    )
    assert widths["no-room-in-front"].lead == 0


def test_a_row_that_sees_nothing_is_a_number_and_the_others_are_as_ever():
    rows, queries, masked, spread = both("part-of-a-window", device="cpu", dtype=torch.float32)
    blind = dataclasses.replace(spread, bias=spread.bias.clone())
    blind.bias[1, :, 3] = torch.finfo(torch.float32).min

    got = blind(queries, rows, 0)

    assert got.isfinite().all()
    seeing = torch.ones(queries.shape[:3], dtype=torch.bool)
    seeing[1, :, 3] = False
    torch.testing.assert_close(got[seeing], masked(queries, rows, 0)[seeing])


@every_device
def test_a_graph_replays_other_rows_and_queries(device):
    rows, queries, masked, spread = both("ring-turned", device=device, dtype=torch.float32)
    got = {}

    def body():
        got["out"] = spread(queries, rows, 0)

    replay = captured(body, device)
    for seed in (5, 6):
        draws = torch.Generator().manual_seed(seed)
        queries.copy_(torch.randn(queries.shape, generator=draws))
        rows.layers[0].copy_(torch.randn(rows.layers[0].shape, generator=draws))

        replay()

        torch.testing.assert_close(got["out"], masked(queries, rows, 0), rtol=1e-4, atol=1e-5)
