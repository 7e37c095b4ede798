import pytest
import torch

from engine.draft_tree import build_draft_tree
from engine.errors import OutOfPagesError, RequestError, ShapeError
from engine.observer import STAGES
from engine.planted import record_continuation
from engine.sampling import Sampling
from engine.verify import REFERENCE, chain, plan_pass
from tests.nano import (
    BLOCK,
    MODELS,
    TARGET,
    VOCAB,
    Notes,
    assert_state_equals_recomputation,
    make_engine,
    naive_pass,
    planted,
    prompt,
)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_committed_state_equals_recomputation_from_scratch(page_size):
    prompts = [prompt(n, seed=n) for n in (1, 30, 61)]
    engine = make_engine(planted(prompts, 4), page_size=page_size, prefill_chunk=7)
    batch = engine.prefill(prompts)

    for _ in range(4):
        assert engine.step(batch).commit_lengths == (4, 4, 4)

    batch.cache.check_integrity()
    assert_state_equals_recomputation(engine, batch)


@pytest.mark.parametrize("commit_length", [1, 3])
def test_a_step_from_every_offset_within_a_page_commits_the_right_rows(commit_length):
    prompts = [prompt(n, seed=n) for n in range(1, 18)]  # P mod 16 takes every value
    engine = make_engine(planted(prompts, commit_length, 20), page_size=16)
    batch = engine.prefill(prompts)

    engine.step(batch)
    engine.step(batch)

    batch.cache.check_integrity()
    assert_state_equals_recomputation(engine, batch)


def test_rows_off_the_chain_are_compacted():
    """The accepted node is not the first child: its row has to move."""
    text = prompt(9)
    first, second = record_continuation(TARGET, text, 2)
    engine = make_engine()
    batch = engine.prefill([text])
    logits = torch.zeros(2, VOCAB)
    logits[0, (first + 1) % VOCAB], logits[0, (first + 2) % VOCAB], logits[0, first] = 9.0, 8.0, 7.0
    logits[1, second] = 3.0
    tree = build_draft_tree(logits, root_token=text[-1], node_budget=12)

    appended = engine.commit(batch, [tree], engine.verify(batch, [tree]))

    assert appended[0][:2] == (first, second)
    assert tree.parents.tolist().index(0) != tree.token_ids.tolist().index(first)
    assert_state_equals_recomputation(engine, batch)


def test_one_plain_step_after_a_commit_equals_the_plain_forward():
    text = prompt(20)
    engine = make_engine(planted([text], 5))
    batch = engine.prefill([text])
    engine.step(batch)
    sequence = batch.sequences[0]

    rows = plan_pass(batch.cache, [sequence.seq], [chain(sequence.token_ids[-1:])], REFERENCE)
    got = TARGET.head(TARGET.forward(rows, ()).hidden)[0]

    torch.testing.assert_close(got, TARGET.logits(sequence.token_ids)[-1], rtol=1e-6, atol=1e-6)


def test_taps_are_the_residual_stream_after_their_layer():
    text = prompt(12)
    engine = make_engine()
    cache = engine.prefill([text]).cache
    rows = plan_pass(cache, [9], [chain(text)], REFERENCE)

    taps = TARGET.forward(rows, (0, 1)).taps

    torch.testing.assert_close(taps, torch.cat(naive_pass(text)[1], dim=-1), rtol=0, atol=1e-10)


@pytest.mark.parametrize("commit_length", [1, 4, 8])
@pytest.mark.parametrize("node_budget", [7, 16, 64])
def test_a_planted_regime_commits_its_length_in_every_step(commit_length, node_budget):
    prompts = [prompt(5, seed=1), prompt(40, seed=2)]
    engine = make_engine(planted(prompts, commit_length, 12 * 8 + 8), node_budget=node_budget)
    batch = engine.prefill(prompts)

    results = [engine.step(batch) for _ in range(12)]

    assert {result.commit_lengths for result in results} == {(commit_length, commit_length)}
    assert {result.num_nodes for result in results} == {(node_budget, node_budget)}


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_step_after_a_rewind_is_the_same_step(page_size):
    prompts = [prompt(14, seed=3), prompt(3, seed=4)]
    engine = make_engine(page_size=page_size)
    batch = engine.prefill(prompts, sampling=Sampling(temperature=1.0), seed=5)
    engine.step(batch)
    snapshot = engine.snapshot(batch)

    def run():
        draft_logits = []
        results = []
        for _ in range(4):
            results.append(engine.step(batch))
            draft_logits.append(engine.draft(batch))  # completes the context as the next step would
        rows = [batch.cache.gather(layer, s) for layer in range(2) for s in batch.seqs]
        states = [(s.token_ids[:], s.logprobs[:], s.commit_lengths[:]) for s in batch.sequences]
        return results, [*draft_logits, *rows], states

    first = run()
    engine.rewind(batch, snapshot)
    batch.cache.check_integrity()
    second = run()

    assert first[0] == second[0]
    assert first[2] == second[2]
    assert all(map(torch.equal, first[1], second[1]))


def test_a_rewind_right_after_prefill_forgets_every_step():
    engine = make_engine()
    batch = engine.prefill([prompt(6)])
    snapshot = engine.snapshot(batch)
    engine.step(batch)
    engine.step(batch)

    engine.rewind(batch, snapshot)

    sequence = batch.sequences[0]
    assert sequence.token_ids == prompt(6)
    assert (sequence.logprobs, sequence.commit_lengths, batch.cache.length(0)) == ([], [], 5)


def test_a_snapshot_of_other_sequences_is_refused():
    engine = make_engine()
    batch = engine.prefill([prompt(6), prompt(7)])
    snapshot = engine.snapshot(batch)
    batch.keep([1])

    with pytest.raises(RequestError, match="snapshot"):
        engine.rewind(batch, snapshot)


@pytest.mark.parametrize("cut_at", [1, 3, 8, 9])
def test_a_stop_token_ends_the_text_inside_a_path(cut_at):
    text = prompt(10, seed=6)
    engine = make_engine(planted([text], BLOCK))
    full = engine.generate([text], max_new_tokens=20)[0]
    stop = full.token_ids[cut_at - 1]
    expected = full.token_ids[: full.token_ids.index(stop) + 1]

    got = engine.generate([text], max_new_tokens=20, stop_token_ids={stop})[0]

    assert got.token_ids == expected
    assert got.finish_reason == "stop"
    assert len(got.logprobs) == len(expected)
    assert set(got.commit_lengths) == {BLOCK}


@pytest.mark.parametrize("max_new_tokens", [1, 7, 8, 9, 17])
def test_the_token_limit_ends_the_text_inside_a_path(max_new_tokens):
    text = prompt(10, seed=6)
    engine = make_engine(planted([text], BLOCK))

    got = engine.generate([text], max_new_tokens=max_new_tokens)[0]

    assert list(got.token_ids) == record_continuation(TARGET, text, max_new_tokens)
    assert got.finish_reason == "length"
    assert len(got.commit_lengths) == -(-max_new_tokens // BLOCK)


def test_logprobs_are_the_targets_own():
    text = prompt(9)

    got = make_engine().generate([text], max_new_tokens=10, temperature=1.5, seed=4)[0]

    logits = TARGET.logits([*text, *got.token_ids])[len(text) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(got.token_ids).unsqueeze(1)).flatten()
    assert got.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_released_batch_holds_no_page():
    engine = make_engine()
    batch = engine.prefill([prompt(20), prompt(3)])
    engine.step(batch)

    engine.release(batch)

    batch.cache.check_integrity()
    assert batch.cache.num_free_pages == batch.cache.shape.num_pages
    assert batch.sequences == []


def test_a_batch_without_sequences_cannot_step():
    engine = make_engine()
    batch = engine.prefill([prompt(20)])
    engine.release(batch)

    with pytest.raises(RequestError, match="batch: expected at least one sequence"):
        engine.step(batch)


def test_a_step_without_pages_leaves_the_batch_as_it_was():
    text = prompt(17)
    engine = make_engine(page_size=16, num_pages=2)
    batch = engine.prefill([text])

    for _ in range(2):  # refused, and refused again: the draft of the first try is not lost
        with pytest.raises(OutOfPagesError, match="pages"):
            engine.step(batch)

    batch.cache.check_integrity()
    assert batch.sequences[0].token_ids == text
    assert_state_equals_recomputation(engine, batch)


def test_the_observer_hears_the_four_stages_in_order():
    notes = Notes()
    engine = make_engine(observer=notes)
    batch = engine.prefill([prompt(5)])
    assert notes.heard == []

    result = engine.step(batch)

    assert notes.heard == [(word, stage) for stage in STAGES for word in ("start", "stop")]
    assert result.stage_seconds == dict.fromkeys(STAGES, 0.5)
    assert make_engine().step(batch).stage_seconds is None


def test_the_observer_hears_the_end_of_a_stage_that_fails():
    notes = Notes()
    engine = make_engine(observer=notes, page_size=16, num_pages=2)
    batch = engine.prefill([prompt(17)])

    with pytest.raises(OutOfPagesError):
        engine.step(batch)

    assert notes.heard[-2:] == [("start", "verify"), ("stop", "verify")]


def test_a_drafter_that_gives_nan_is_refused_and_not_decoded():
    class Broken:
        config, new_context, extend = (
            MODELS.drafter.config,
            MODELS.drafter.new_context,
            MODELS.drafter.extend,
        )

        def draft(self, context, request):
            return torch.full((1, BLOCK - 1, VOCAB), torch.nan)

    with pytest.raises(ShapeError, match="draft_logits"):
        make_engine(Broken()).generate([prompt(3)], max_new_tokens=2)


def test_a_text_may_fill_the_context_to_the_last_token():
    engine = make_engine(max_context=40, node_budget=64)

    got = engine.generate([prompt(30)], max_new_tokens=10)[0]

    assert len(got.token_ids) == 10


def test_a_step_result_says_what_was_appended():
    engine = make_engine()
    batch = engine.prefill([prompt(4), prompt(8)])

    result = engine.step(batch)

    assert result.token_ids == tuple(s.new_token_ids for s in batch.sequences)
    assert result.commit_lengths == tuple(map(len, result.token_ids))
