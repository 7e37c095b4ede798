import dataclasses

import pytest
import torch

from engine.drafter import Drafter, DraftRequest, TapRows
from engine.errors import CacheError, ConfigError
from engine.presets import preset, random_drafter

NANO = preset("nano", dtype=torch.float64, seed=3)


def variant(**changes):
    return random_drafter(dataclasses.replace(NANO.drafter.config, **changes), NANO.target, seed=3)


def taps(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        count, NANO.target.config.hidden_size, generator=generator, dtype=torch.float64
    )


def request(*roots):
    return DraftRequest(roots, (0,) * len(roots), tuple(range(len(roots))))


def draft(drafter, rows, root):
    context = drafter.new_context(1)
    drafter.extend(context, TapRows(rows, (len(rows),)))
    return drafter.draft(context, request(root))[0]


def norm(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x, position, theta):
    """Half-split rotation of one head, one pair of dimensions after the other."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / len(x)), dtype=torch.float64)
        cos, sin = angle.cos(), angle.sin()
        out[i], out[i + half] = x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin
    return out


def slow_twin(drafter, rows, root):
    """The drafter of one sequence with one query head and one row at a time, no buffers."""
    config, t, target = drafter.config, drafter.tensors, drafter.target
    eps, dim, heads = config.rms_norm_eps, config.head_dim, config.num_attention_heads
    group = heads // config.num_key_value_heads
    features = norm(rows @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
    tokens = [root] + [config.mask_token_id] * config.horizon
    x = target.embed_tokens[tokens]
    start, size = len(rows), config.block_size
    for i, kind in enumerate(config.layer_types):
        w = {name.removeprefix(f"layers.{i}."): value for name, value in t.items()}
        normed = norm(x, w["input_layernorm.weight"], eps)
        both = torch.cat((features, normed))
        keys = (both @ w["self_attn.k_proj.weight"].T).view(len(both), -1, dim)
        values = (both @ w["self_attn.v_proj.weight"].T).view(len(both), -1, dim)
        queries = (normed @ w["self_attn.q_proj.weight"].T).view(size, heads, dim)
        out = torch.zeros(size, heads, dim, dtype=torch.float64)
        for row in range(size):
            at = start + row
            seen = list(range(len(both)))
            if kind == "sliding_attention":
                seen = [k for k in seen if abs(at - k) < config.sliding_window]
                if config.is_block_causal:
                    seen = [k for k in seen if k <= at]
            for head in range(heads):
                q = rotated(
                    norm(queries[row, head], w["self_attn.q_norm.weight"], eps),
                    at,
                    config.rope_theta,
                )
                ks = [
                    rotated(
                        norm(keys[k, head // group], w["self_attn.k_norm.weight"], eps),
                        k,
                        config.rope_theta,
                    )
                    for k in seen
                ]
                weights = torch.stack([q @ k for k in ks]).div(dim**0.5).softmax(0)
                out[row, head] = weights @ values[seen, head // group]
        x = x + out.flatten(1) @ w["self_attn.o_proj.weight"].T
        normed = norm(x, w["post_attention_layernorm.weight"], eps)
        gate = normed @ w["mlp.gate_proj.weight"].T
        x = (
            x
            + (gate * gate.sigmoid() * (normed @ w["mlp.up_proj.weight"].T))
            @ w["mlp.down_proj.weight"].T
        )
    return (norm(x[1:], t["norm.weight"], eps) @ target.lm_head.T).float()


@pytest.mark.parametrize("length", [0, 1, 5, 13])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_block_causal": True},
        {"sliding_window": 1},
        {"num_attention_heads": 4, "num_key_value_heads": 2},
    ],
    ids=["kimi-like", "block-causal", "window-of-one", "two-key-heads"],
)
def test_a_block_agrees_with_a_loop_over_rows_and_heads(changes, length):
    drafter = variant(**changes)

    got = draft(drafter, taps(length), root=7)

    assert got.dtype == torch.float32
    torch.testing.assert_close(got, slow_twin(drafter, taps(length), 7), rtol=1e-5, atol=1e-6)


def test_a_context_grown_in_pieces_equals_one_made_at_once():
    rows, drafter = taps(90), NANO.drafter  # beyond the first buffer
    pieces, whole = drafter.new_context(1), drafter.new_context(1)
    drafter.extend(whole, TapRows(rows, (90,)))

    for start, end in ((0, 1), (1, 1), (1, 9), (9, 64), (64, 65), (65, 90)):
        drafter.extend(pieces, TapRows(rows[start:end], (end - start,)))
        drafter.draft(pieces, request(3))  # its rows behind the context must not stay

    assert pieces.lengths == whole.lengths == [90]
    for kept in ("keys", "values"):
        for grown, made in zip(getattr(pieces, kept), getattr(whole, kept), strict=True):
            torch.testing.assert_close(grown[:, :, :90], made[:, :, :90], rtol=0, atol=1e-13)


def test_sequences_of_a_batch_do_not_see_each_other():
    drafter = NANO.drafter
    rows = [taps(n, seed=n) for n in (0, 11, 70, 4)]
    context = drafter.new_context(4)
    drafter.extend(context, TapRows(torch.cat(rows), tuple(map(len, rows))))

    together = drafter.draft(context, request(1, 2, 3, 4))

    for n, own in enumerate(rows):
        torch.testing.assert_close(together[n], draft(drafter, own, n + 1), rtol=1e-6, atol=1e-6)


def test_a_selection_of_sequences_goes_on_as_before():
    drafter, rows = NANO.drafter, [taps(n, seed=n) for n in (6, 9, 2)]
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
    near, far = taps(20), taps(20)
    far[: 20 - drafter.config.sliding_window + 1] += 3.0  # all that no row's window reaches

    torch.testing.assert_close(draft(drafter, near, 1), draft(drafter, far, 1), rtol=0, atol=0)
    assert not torch.allclose(draft(full, near, 1), draft(full, far, 1))


def test_the_root_token_stands_in_slot_zero():
    assert not torch.equal(draft(NANO.drafter, taps(4), 1), draft(NANO.drafter, taps(4), 2))


def test_a_context_goes_back_and_never_forward():
    context = NANO.drafter.new_context(1)
    NANO.drafter.extend(context, TapRows(taps(5), (5,)))

    context.rewind([3])

    assert context.lengths == [3]
    with pytest.raises(CacheError, match="only goes back"):
        context.rewind([4])


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_target_layers"])
def test_a_drafter_of_another_target_is_refused(field):
    config = dataclasses.replace(
        NANO.drafter.config, **{field: getattr(NANO.drafter.config, field) * 2}
    )

    with pytest.raises(ConfigError, match=field):
        Drafter(config, NANO.drafter.tensors, NANO.target)
