"""Attention of drafter layers that see everything: lengths on the device against lengths known.

Drafts in buffers beside it, all of whose layers run through kernels, against plain drafts.

Triton's kernel runs in the interpreter, in a process of its own, and on a GPU (marker gpu).
"""

import dataclasses

import pytest
import torch

from engine.context_rows import PAGE_ROWS, ContextRows, Sight
from engine.drafter import BlockInputs, DraftRequest, TapRows
from engine.drafter_layer import LayerBackends
from engine.presets import preset, random_drafter
from engine.whole_attention import PagedAttention, SlicedAttention
from tests.attention_runs import INTERPRETED, ON_GPU, not_interpreted
from tests.interpreter import assert_passes_in_the_interpreter
from tests.kimi import KIMI_DRAFTER

RUNS = [
    pytest.param("cpu", "triton_split" if INTERPRETED else "reference"),
    pytest.param("cuda", "triton_split", marks=ON_GPU),
]
PAGE = PAGE_ROWS


def rows_of(device, lengths, *, block_size, num_key_heads, head_dim):
    """Rows of two layers, NaN wherever a sequence has none."""
    config = dataclasses.replace(
        KIMI_DRAFTER, block_size=block_size, num_key_value_heads=num_key_heads, head_dim=head_dim
    )
    like = torch.empty(0, dtype=torch.float32, device=device)
    rows = ContextRows.zeros(config, (Sight(3, 3), Sight()), len(lengths), like)
    rows = rows.widened(2 * PAGE)
    draws = torch.Generator(device).manual_seed(0)
    whole = rows.layers[1]
    whole.copy_(torch.randn(whole.shape, generator=draws, device=device))
    whole[:, :, : rows.front - block_size] = torch.nan
    for n, length in enumerate(lengths):
        whole[n, :, rows.front + length :] = torch.nan
    return rows, draws


@pytest.mark.parametrize(("device", "backend"), RUNS)
@pytest.mark.parametrize(
    ("lengths", "block_size", "num_key_heads", "group"),
    [([0], 2, 1, 1), ([PAGE - 1, 1], 8, 1, 4), ([2 * PAGE, 0, PAGE + 1], 5, 2, 2),
     ([PAGE], 40, 2, 1)],
)  # fmt: skip
def test_lengths_on_the_device_give_what_known_ones_give(
    device, backend, lengths, block_size, num_key_heads, group
):
    shape = {"block_size": block_size, "num_key_heads": num_key_heads, "head_dim": 16}
    rows, draws = rows_of(device, lengths, **shape)
    size = (len(lengths), num_key_heads, group * block_size, 16)
    queries = torch.randn(size, generator=draws, device=device)
    paged = PagedAttention.over(rows, backend)

    got = paged.at(torch.tensor(lengths, device=device))(queries, rows, 1)

    expected = SlicedAttention(tuple(lengths))(queries, rows, 1)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3 if device == "cuda" else 1e-5)


@pytest.mark.parametrize(("device", "backend"), RUNS)
def test_a_draft_through_kernels_is_the_plain_one(device, backend):
    nano = preset("nano", device=device, dtype=torch.float32)
    config = dataclasses.replace(nano.drafter.config, head_dim=16)
    drafter = random_drafter(config, nano.target, seed=3)
    S, width = drafter.config.block_size, drafter.fc.shape[1]
    text = torch.randn(130, width, generator=torch.Generator().manual_seed(2)).to(device)
    context = drafter.new_context(2)
    drafter.extend(context, TapRows(text[:100], (30, 70)))
    numbers = torch.tensor([[30, 3, 4], [70, S, 9]], device=device)
    inputs = BlockInputs(
        taps=torch.cat((text[100 : 103 + S], text.new_zeros(S - 3, width))),
        lengths=numbers[:, 0],
        counts=numbers[:, 1],
        tokens=numbers[:, 2:],
        heads={sight: context.rows.heads(sight) for sight in context.sights},
        whole=PagedAttention.over(context.rows, backend),
        backends=LayerBackends("reference" if backend == "reference" else "triton"),
    )

    got = drafter.complete_and_draft(context.rows, inputs).logits

    drafter.extend(context, TapRows(text[100 : 103 + S], (3, S)))
    expected = drafter.draft(context, DraftRequest((4, 9), (0, 0), (0, 1)))
    bound = 1e-2 if device == "cuda" else 1e-4
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)


def test_every_page_of_a_context_is_its_own_and_behind_the_block():
    rows, _ = rows_of("cpu", [PAGE, PAGE], block_size=8, num_key_heads=2, head_dim=4)

    table = rows.page_table()

    assert table.shape == (4, 2)
    assert table.unique().numel() == 8
    pages = rows.pages(1)[table.long()].flatten(1, 2)  # [N * H_kv, capacity, 2 * head_dim]
    torch.testing.assert_close(
        pages, rows.layers[1].flatten(0, 1)[:, rows.front :], equal_nan=True, rtol=0, atol=0
    )


@not_interpreted
def test_the_kernel_passes_in_the_interpreter():
    assert_passes_in_the_interpreter(__file__)
