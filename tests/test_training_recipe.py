"""The tiny pair's recipe computes what the engine computes, and learns."""

import dataclasses

import numpy as np
import pytest
import torch

from engine.checkpoints.tiny.batches import (
    PERIODS,
    SHARES,
    draw_places,
    make_corpus,
)
from engine.checkpoints.tiny.configs import DRAFTER, TARGET
from engine.checkpoints.tiny.corpus import html_text, pack, read_documents
from engine.checkpoints.tiny.drafter_task import DrafterTask
from engine.checkpoints.tiny.fitting import Phase, Settings, fit, learning_rate
from engine.checkpoints.tiny.model import draft_blocks, drafter_pass
from engine.checkpoints.tiny.synthetic import documents
from engine.checkpoints.tiny.target_task import (
    TargetRunner,
    TargetTask,
    initial_target,
    repeated,
)
from engine.drafter import DraftRequest, TapRows
from engine.layers import Rotary
from engine.presets import END_TOKEN, random_drafter, random_target
from engine.weights import load_drafter, load_target

SMALL_TARGET = dataclasses.replace(TARGET, hidden_size=64, intermediate_size=64)
SMALL_DRAFTER = dataclasses.replace(DRAFTER, hidden_size=64, intermediate_size=64)
TEXT = b"".join(b"\0" + f"line {i} of {i}\n".encode() * 40 for i in range(30))
WINDOW = 11  # of the sliding layers in these tests; shorter than the sequences


def as_it_is(function):
    return function


@pytest.fixture(scope="module")
def target():
    return random_target(TARGET, device="cpu", dtype=torch.float32, seed=3)


@pytest.fixture(scope="module")
def token_ids():
    return torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(1))


def naive_taps(target, tokens, layers):
    x = target.embed_tokens[tokens]
    rotation = target.rotary.at(torch.arange(len(tokens)), target.dtype)
    taps = []
    for layer in target.layers:
        x = layer.naive(x, rotation)
        taps.append(x)
    return torch.cat([taps[layer] for layer in layers], dim=-1)


def test_the_training_pass_gives_the_engines_logits_and_taps(target, token_ids):
    passed = TargetRunner(TARGET, target.tensors, as_it_is)(token_ids, DRAFTER.target_layer_ids)

    for row, tokens in enumerate(token_ids):
        torch.testing.assert_close(passed.logits[row], target.logits(tokens), rtol=1e-4, atol=1e-4)
        taps = naive_taps(target, tokens, DRAFTER.target_layer_ids)
        torch.testing.assert_close(passed.taps[row], taps, rtol=1e-4, atol=1e-4)


def test_the_load_counts_every_choice_of_every_expert_layer(target, token_ids):
    loads = TargetRunner(TARGET, target.tensors, as_it_is)(token_ids).loads

    assert loads.shape == (3, TARGET.n_routed_experts)
    torch.testing.assert_close(loads.sum(dim=1), torch.ones(3))


def test_training_drafts_are_the_engines_at_every_anchor(target, token_ids):
    config = dataclasses.replace(DRAFTER, sliding_window=WINDOW)
    drafter = random_drafter(config, target, seed=5)
    anchors = torch.tensor([[0, 1, 10, 31], [3, 3, 12, 32], [9, 11, 13, 20]])
    taps = TargetRunner(TARGET, target.tensors, as_it_is)(token_ids, config.target_layer_ids).taps
    table = Rotary.of_drafter(config, target.device).at(torch.arange(40), torch.float32)

    drafts = drafter_pass(
        config,
        target.tensors | drafter.tensors,
        taps,
        repeated(table, 3),
        draft_blocks(config, token_ids, anchors, table),
    )

    for row, column in np.ndindex(*anchors.shape):
        anchor = int(anchors[row, column])
        context = drafter.new_context(1)
        drafter.extend(context, TapRows(taps[row, :anchor], (anchor,)))
        request = DraftRequest((int(token_ids[row, anchor]),), (1,), (0,))
        expected = drafter.draft(context, request)[0]
        torch.testing.assert_close(drafts[row, column], expected, rtol=1e-4, atol=1e-4)


def test_a_trained_pair_has_learnt_and_loads_like_any_checkpoint(tmp_path):
    corpus = make_corpus(TEXT, TEXT, num_templated=2000, seed=0, device="cpu")
    texts = {"lines": TEXT[1:]}
    settings = Settings(learning_rate=3e-3, batch_tokens=256, seed=0)
    phases = [Phase(32, 0.0, steps=25), Phase(64, 0.0, steps=5)]
    start = initial_target(SMALL_TARGET, torch.device("cpu"), seed=0)
    task = TargetTask(start, tmp_path / "target", texts, as_it_is)
    losses = watched(task)

    fit(task, corpus, phases, settings)
    target = load_target(tmp_path / "target", dtype=torch.float32)
    drafting = DrafterTask(SMALL_DRAFTER, target, tmp_path / "drafter", texts, as_it_is, seed=0)
    draft_losses = watched(drafting)
    fit(drafting, corpus, phases, settings)
    drafter = load_drafter(tmp_path / "drafter", target)

    assert min(losses[-5:]) < 0.6 * losses[0]
    assert min(draft_losses[-5:]) < 0.8 * draft_losses[0]
    assert (target.config, drafter.config) == (SMALL_TARGET, SMALL_DRAFTER)
    biases = [t for name, t in target.tensors.items() if name.endswith("correction_bias")]
    assert all(bias.dtype == torch.float32 and bias.abs().max() > 0.0 for bias in biases)


def watched(task):
    """Collect the losses of training steps, those of reports excepted."""
    losses, step = [], task.loss

    def loss(token_ids):
        value = step(token_ids)
        if value.requires_grad:
            losses.append(value.item())
        return value

    task.loss = loss
    return losses


def test_the_same_seed_trains_the_same_weights():
    tensors = []
    for _ in range(2):
        start = initial_target(SMALL_TARGET, torch.device("cpu"), seed=7)
        corpus = make_corpus(TEXT, TEXT, num_templated=2000, seed=7, device="cpu")
        places = draw_places(corpus.spans, (2, 33), np.random.default_rng(7))
        tensors.append((start.tensors["lm_head.weight"], corpus.tokens(places)))

    assert torch.equal(tensors[0][0], tensors[1][0])
    assert torch.equal(tensors[0][1], tensors[1][1])


def test_the_routers_bias_rises_for_experts_below_their_share(tmp_path):
    start = initial_target(SMALL_TARGET, torch.device("cpu"), seed=0)
    task = TargetTask(start, tmp_path, {}, as_it_is)
    task.loads = torch.zeros(3, TARGET.n_routed_experts)
    task.loads[:, 0] = 1.0

    task.after_step(1.0)

    for bias in task.biases:
        assert bias[0] < 0.0
        assert bool((bias[1:] > 0.0).all())


def test_sequences_hold_code_prose_and_predictable_text_in_their_shares():
    spans = ((1, 100_001), (100_001, 200_001), (200_001, 300_001))
    rng = np.random.default_rng(0)

    places = np.concatenate([draw_places(spans, (400, 4096), rng) for _ in range(2)])

    shares = [np.mean((places >= start) & (places < end)) for start, end in spans]
    repeating = sum(SHARES[3:]) / 2  # as often of code as of prose
    assert shares == pytest.approx(
        [SHARES[0] + repeating, SHARES[1] + repeating, SHARES[2]], abs=0.03
    )
    assert 0 < np.mean(places == 0) < 0.01


def test_some_stretches_repeat_at_any_distance_up_to_half_a_sequence():
    spans = ((1, 100_001), (100_001, 200_001), (200_001, 300_001))

    places = draw_places(spans, (600, 8193), np.random.default_rng(1))

    distances = set()
    for row in places:
        order = np.argsort(row, kind="stable")
        same = (np.diff(row[order]) == 0) & (row[order][1:] > 0)
        distances |= set(np.diff(order)[same].tolist())
    assert min(distances) <= 2 * PERIODS[0]
    assert max(distances) > 3000


def test_separators_are_read_as_the_end_token():
    corpus = make_corpus(b"\0ab", b"\0c", num_templated=0, seed=0, device="cpu")

    found = corpus.tokens(np.array([[0, 1, 2, 3, 4, 5]]))

    assert found.tolist() == [[END_TOKEN, END_TOKEN, ord("a"), ord("b"), END_TOKEN, ord("c")]]


def test_predictable_documents_are_the_same_for_the_same_seed():
    first, again, other = (documents(seed) for seed in (1, 1, 2))

    texts = [next(first) for _ in range(50)]

    assert texts == [next(again) for _ in range(50)]
    assert texts != [next(other) for _ in range(50)]
    assert all("\0" not in text for text in texts)


def test_the_corpus_keeps_equal_documents_once_and_leaves_out_held_out_ones(tmp_path):
    for name in ("a.py", "sub/b.py", "sub/held.py", "c.txt", "short.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n" * (1 if name == "short.py" else 100))
    (tmp_path / "latin.py").write_bytes(b"\xe9" * 500)
    (tmp_path / "sub" / "held.py").write_text("secret\n" * 100)

    packed = pack(read_documents([tmp_path], (".py",), ["/held.py"]), 10_000)

    assert packed == b"\0" + b"x = 1\n" * 100


def test_a_page_becomes_the_text_it_shows():
    page = "<head><title>no</title></head><p>One&amp;two</p>\n<script>no</script><li>three"

    assert html_text(page) == "One&two\n\nthree\n"


def test_the_learning_rate_warms_up_and_falls():
    rates = [learning_rate(progress) for progress in np.linspace(0.02, 1.0, 50)]

    assert learning_rate(0.0) == 0.0
    assert rates[0] == max(rates)
    assert rates == sorted(rates, reverse=True)
    assert 0.0 < rates[-1] < 0.1
