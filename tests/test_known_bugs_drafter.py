"""Failures that cost other engines their commit lengths, tried on this one's drafter.

None of them changes the text, so no test of losslessness would ever see one.
"""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint_config import target_layout
from engine.config import CACHE_LAYOUTS
from engine.context_rows import PAGE_ROWS, REWIND_ROWS
from engine.drafter import Drafter, TapRows
from engine.drafter_context import DrafterContext
from engine.errors import ConfigError, WeightsError
from engine.target import Target
from engine.weights import load_drafter, save_drafter
from tests.drafts import random_taps, request
from tests.kimi import KIMI_DRAFTER
from tests.nano import MODELS, POISON, TARGET, VOCAB, make_engine, naive_pass, prompt
from tests.published_configs import DEEPSEEK_V3, FP8_QUANTIZATION, INT4_QUANTIZATION

DRAFTER = MODELS.drafter


def draft(drafter, context, *roots):
    return drafter.draft(context, request(*roots))


def draft_after(*parts, drafter=DRAFTER, root=5):
    """The draft over taps that came in parts."""
    context = drafter.new_context(1)
    for taps in parts:
        drafter.extend(context, TapRows(taps, (len(taps),)))
    return draft(drafter, context, root)[0]


def test_a_drafter_speaks_through_its_targets_head():
    order = torch.arange(VOCAB - 1, -1, -1)
    head = {"lm_head.weight": TARGET.lm_head[order]}
    drafter = Drafter(DRAFTER.config, DRAFTER.tensors, Target(TARGET.config, TARGET.tensors | head))

    got = draft_after(random_taps(9), drafter=drafter)

    torch.testing.assert_close(got, draft_after(random_taps(9))[:, order], rtol=0, atol=1e-6)


@pytest.mark.parametrize("padded", [0, 10])
def test_a_drafter_that_brings_a_head_of_its_own_is_refused(tmp_path, padded):
    save_drafter(DRAFTER, tmp_path)
    path = tmp_path / "model.safetensors"
    head = torch.zeros(VOCAB + padded, DRAFTER.config.hidden_size)
    save_file(load_file(path) | {"lm_head.weight": head}, path)

    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        load_drafter(tmp_path, TARGET)


def test_a_drafter_with_a_padded_vocabulary_is_refused(tmp_path):
    save_drafter(DRAFTER, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": VOCAB + 10}))

    with pytest.raises(ConfigError, match=f"vocab_size: expected {VOCAB}, got {VOCAB + 10}"):
        load_drafter(tmp_path, TARGET)


def test_the_mask_stands_in_every_slot_but_the_first():
    """With a mask that looks like the root all slots are alike; slot 0 alone must not change."""
    roots, taps = (5, 6), random_taps(9)
    drafts = {}
    for mask in roots:
        tensors = DRAFTER.tensors | {"mask_embedding.weight": TARGET.embed_tokens[mask]}
        drafter = Drafter(DRAFTER.config, tensors, TARGET)
        drafts |= {(mask, root): draft_after(taps, drafter=drafter, root=root) for root in roots}

    differing = [(a, b) for a in drafts for b in drafts if a < b]
    assert len(differing) == 6
    assert not any(torch.allclose(drafts[a], drafts[b], atol=1e-4) for a, b in differing)


@pytest.mark.parametrize("quantization", [INT4_QUANTIZATION, FP8_QUANTIZATION])
def test_weights_that_were_rotated_are_refused(quantization):
    """Their hidden states, and so the taps, would be rotated too."""
    rotated = {"config_groups": {"R1": {"type": "hadamard", "apply": []}}}
    stored = quantization | {"transform_config": rotated}

    with pytest.raises(ConfigError, match=r"transform_config: expected none, got"):
        target_layout(DEEPSEEK_V3 | {"quantization_config": stored})


def test_prompts_and_single_rows_extend_one_context_together():
    earlier = [random_taps(count, seed=count) for count in (0, 30, 70, 7)]
    later = [random_taps(count, seed=100 + count) for count in (80, 1, 0, 8)]
    context = DRAFTER.new_context(4)

    for parts in (earlier, later):
        DRAFTER.extend(context, TapRows(torch.cat(parts), tuple(map(len, parts))))

    together = draft(DRAFTER, context, 1, 2, 3, 4)
    for n, parts in enumerate(zip(earlier, later, strict=True)):
        alone = draft_after(*parts, root=n + 1)
        torch.testing.assert_close(together[n], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_a_prompt_that_comes_between_the_steps_of_others_disturbs_nobody(layout):
    prompts = [prompt(length, seed=length) for length in (25, 3, 90)]
    engine = make_engine(cache_layout=layout)
    first = engine.prefill(prompts[:2])
    engine.step(first)
    late = engine.prefill(prompts[2:])

    for batch in (first, late, first, late):
        engine.step(batch)

    engine.cache.check_integrity()
    for batch, alone in ((first, prompts[:2]), (late, prompts[2:])):
        again = make_engine(cache_layout=layout)
        other = again.prefill(alone)
        while len(other.sequences[0].commit_lengths) < len(batch.sequences[0].commit_lengths):
            again.step(other)
        assert [s.token_ids for s in batch.sequences] == [s.token_ids for s in other.sequences]
        got, expected = engine.draft(batch), again.draft(other)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("drafter_context", [None, 3])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prefix_that_is_reused_brings_its_drafter_rows(page_size, drafter_context):
    options = {"page_size": page_size, "drafter_context": drafter_context}
    engine = make_engine(prefix_reuse=True, **options)
    first = prompt(100)
    (said,) = engine.generate([first], max_new_tokens=30)
    longer = [*first, *said.token_ids[:20], 4, 4]  # the text so far, then something else
    fresh = make_engine(**options)

    for text in (longer, first[:70], longer):
        batch = engine.prefill([text])
        assert engine.cache.num_indexed_pages > 0
        expected = fresh.draft(fresh.prefill([text]))
        torch.testing.assert_close(engine.draft(batch), expected, rtol=0, atol=1e-6)
        engine.release(batch)


def test_drafter_rows_are_no_rows_of_the_targets_cache():
    engine, text = make_engine(), prompt(40)
    expected = engine.draft(engine.prefill([text]))
    batch = engine.prefill([text])

    engine.cache.pages.fill_(POISON)

    assert torch.equal(engine.draft(batch), expected)
    assert {rows.dtype for rows in batch.context.keys} == {DRAFTER.fc.dtype}


@pytest.mark.parametrize("length", [65536, 185000])
def test_a_drafter_scans_and_holds_no_more_than_it_may_see(length):
    config = dataclasses.replace(KIMI_DRAFTER, num_key_value_heads=1, head_dim=2)
    context = DrafterContext(
        config, 1, max_context=12288, dtype=torch.bfloat16, device=torch.device("cpu")
    )

    context.reserve(length)
    context.advance([length])

    for index in range(config.num_hidden_layers):
        seen = 12288 if config.layer_types[index] == "full_attention" else config.sliding_window
        most = seen - 1 + REWIND_ROWS
        assert context.num_slots(context.sights[index]) == most
        assert context.keys[index].shape[2] == context.values[index].shape[2] == most
        held_bytes = context.rows.layers[index].untyped_storage().nbytes()
        assert held_bytes == (PAGE_ROWS + most) * 2 * 2 * 2


def test_the_engines_knob_bounds_what_the_drafter_scans():
    bounded, whole = (
        make_engine(drafter_context=bound, max_context=512).prefill([prompt(400)]).context
        for bound in (16, None)
    )

    most = 16 - 1 + REWIND_ROWS
    assert max(bounded.num_slots(sight) for sight in bounded.sights) == most
    assert max(whole.num_slots(sight) for sight in whole.sights) == 399


@pytest.mark.parametrize("prefill_chunk", [1, 7, 69, 70, 200])
def test_a_long_prompt_gives_the_same_draft_whatever_its_chunks(prefill_chunk):
    prompts = [prompt(160), prompt(64)]
    engine = make_engine(prefill_chunk=prefill_chunk)
    batch = engine.prefill(prompts)

    got = engine.draft(batch)

    for n, text in enumerate(prompts):
        rows, streams = naive_pass(text[:-1])
        taps = torch.cat([streams[i] for i in DRAFTER.config.target_layer_ids], dim=-1)
        alone = draft_after(taps, root=text[-1])
        torch.testing.assert_close(got[n], alone, rtol=0, atol=1e-6)
        for layer, expected in enumerate(rows):
            held = batch.cache.gather(layer, batch.seqs[n])
            torch.testing.assert_close(held, expected, rtol=0, atol=1e-10)
