import dataclasses

import pytest
import torch

from engine.drafter import MASK_EMBEDDING, Drafter, TapRows
from engine.errors import ConfigError, ShapeError
from engine.layers import Rotary
from tests.drafts import NANO, random_taps, request, variant
from tests.kimi import KIMI_DRAFTER


def draft(drafter, rows, root):
    context = drafter.new_context(1)
    drafter.extend(context, TapRows(rows, (len(rows),)))
    return drafter.draft(context, request(root))[0]


def test_sequences_of_a_batch_do_not_see_each_other():
    drafter = NANO.drafter
    rows = [random_taps(n, seed=n) for n in (0, 11, 70, 4)]
    context = drafter.new_context(4)
    drafter.extend(context, TapRows(torch.cat(rows), tuple(map(len, rows))))

    together = drafter.draft(context, request(1, 2, 3, 4))

    for n, own in enumerate(rows):
        torch.testing.assert_close(together[n], draft(drafter, own, n + 1), rtol=1e-6, atol=1e-6)


def test_a_selection_of_sequences_goes_on_as_before():
    drafter, rows = NANO.drafter, [random_taps(n, seed=n) for n in (6, 9, 2)]
    context = drafter.new_context(3)
    drafter.extend(context, TapRows(torch.cat(rows), (6, 9, 2)))

    context.select([2, 0])

    got = drafter.draft(context, request(5, 6))
    torch.testing.assert_close(got[0], draft(drafter, rows[2], 5), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got[1], draft(drafter, rows[0], 6), rtol=1e-6, atol=1e-6)


def test_packed_taps_are_selected_by_sequence():
    rows = TapRows(torch.arange(6.0).unsqueeze(1), (1, 0, 3, 2))

    chosen = rows.select([3, 1, 0])

    assert chosen.counts == (2, 0, 1)
    assert chosen.taps.flatten().tolist() == [4.0, 5.0, 0.0]


def test_sliding_layers_read_the_window_alone_and_full_layers_everything():
    drafter = variant(layer_types=("sliding_attention", "sliding_attention"))
    full = NANO.drafter
    near, far = random_taps(20), random_taps(20)
    far[: 20 - drafter.config.sliding_window + 1] += 3.0  # all that no row's window reaches

    torch.testing.assert_close(draft(drafter, near, 1), draft(drafter, far, 1), rtol=0, atol=0)
    assert not torch.allclose(draft(full, near, 1), draft(full, far, 1))


def test_the_root_token_stands_in_slot_zero():
    assert not torch.equal(
        draft(NANO.drafter, random_taps(4), 1), draft(NANO.drafter, random_taps(4), 2)
    )


def test_features_returned_by_an_extension_make_the_same_context_again():
    drafter, rows = NANO.drafter, random_taps(90)
    first, again = drafter.new_context(1), drafter.new_context(1)

    features = drafter.extend(first, TapRows(rows, (90,)))
    drafter.extend_features(again, features, (90,))

    assert torch.equal(features, drafter.features(rows))
    assert torch.equal(drafter.draft(first, request(1)), drafter.draft(again, request(1)))


@pytest.mark.parametrize(
    ("counts", "message"),
    [((3,), "features: expected 3 rows, got 4"), ((2, 2), "counts: expected 1 numbers")],
)
def test_features_that_do_not_fit_their_counts_are_refused(counts, message):
    drafter = NANO.drafter
    context = drafter.new_context(1)

    with pytest.raises(ShapeError, match=message):
        drafter.extend_features(context, drafter.features(random_taps(4)), counts)

    assert context.lengths == [0]


def test_a_negative_count_is_refused():
    drafter = NANO.drafter

    with pytest.raises(ShapeError, match="counts: expected 2 numbers >= 0"):
        drafter.extend_features(drafter.new_context(2), drafter.features(random_taps(4)), (5, -1))


@pytest.mark.parametrize("shape", [(1, 32), (31,)])
def test_a_mask_embedding_that_is_not_one_row_is_refused(shape):
    tensors = NANO.drafter.tensors | {MASK_EMBEDDING: torch.zeros(shape)}

    with pytest.raises(ShapeError, match=r"mask_embedding.weight: expected \[32\]"):
        Drafter(NANO.drafter.config, tensors, NANO.target)


def test_the_kimi_drafters_rotary_tables_are_the_published_ones():
    rotary = Rotary.of_drafter(
        dataclasses.replace(KIMI_DRAFTER, rope_attention_factor=1.4158883083359672),
        torch.device("cpu"),
    )

    published = {0: 1.0, 1: 8.4445904869e-1, 17: 5.6472380176e-2, 18: 4.5554817992e-2}
    published |= {28: 4.4658487486e-3, 38: 9.7904539908e-5, 39: 2.1398591081e-5}
    published |= {63: 3.7005938948e-7}
    for pair, frequency in published.items():
        assert rotary.frequencies[pair].item() == pytest.approx(frequency, rel=2e-10)
    assert rotary.at(torch.tensor([0]), torch.float64).cos.unique().item() == 1.4158883083359672


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_target_layers"])
def test_a_drafter_of_another_target_is_refused(field):
    config = dataclasses.replace(
        NANO.drafter.config, **{field: getattr(NANO.drafter.config, field) * 2}
    )

    with pytest.raises(ConfigError, match=field):
        Drafter(config, NANO.drafter.tensors, NANO.target)
