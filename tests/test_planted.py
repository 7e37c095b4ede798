import pytest
import torch

from engine.config import EngineConfig
from engine.decoder import Engine
from engine.drafter import DraftRequest, TapRows
from engine.errors import ConfigError, OutOfPagesError, RequestError
from engine.kernels import greedy_tokens
from engine.pass_graphs import Choice, PlainPass
from engine.planted import (
    PLANT_MARGIN,
    PlantedDrafter,
    PlantedTarget,
    begin_planted,
    record_continuation,
)
from engine.presets import preset
from engine.sampling import GREEDY
from engine.verify import REFERENCE, chain, plan_pass

MODELS = preset("nano", dtype=torch.float64)
PROMPT = [3, 1, 4, 1, 5]


class Counting:
    """A wrapped drafter that remembers the logits it gave."""

    def __init__(self):
        drafter = MODELS.drafter
        self.config, self.new_context = drafter.config, drafter.new_context
        self.extend, self.extend_features = drafter.extend, drafter.extend_features
        self.given = []

    def draft(self, context, request):
        logits = MODELS.drafter.draft(context, request)
        self.given.append(logits.clone())
        return logits


@pytest.mark.parametrize("commit_length", [0, -1, 9])
def test_a_commit_length_no_block_can_have_is_refused(commit_length):
    with pytest.raises(ConfigError, match=rf"commit_length: expected 1\.\.8, got {commit_length}"):
        PlantedDrafter(MODELS.drafter, [[]], commit_length)


def test_the_wrapped_drafters_whole_forward_runs_in_every_step():
    counting = Counting()
    planted = PlantedDrafter(counting, [record_continuation(MODELS.target, PROMPT, 40)], 4)
    engine = Engine(MODELS.target, planted, EngineConfig(max_context=64))
    batch = engine.prefill([PROMPT])

    for _ in range(5):
        engine.step(batch)

    shape = (1, 7, MODELS.target.config.vocab_size)
    assert [logits.shape for logits in counting.given] == [shape] * 5
    assert len({logits.sum().item() for logits in counting.given}) == 5  # five different blocks


def test_only_the_planted_and_the_banned_logits_are_touched():
    counting = Counting()
    known = record_continuation(MODELS.target, PROMPT, 20)
    planted = PlantedDrafter(counting, {0: known}, 3)
    engine = Engine(MODELS.target, planted, EngineConfig(max_context=64))
    batch = engine.prefill([PROMPT])

    steered = engine.draft(batch)

    plain = counting.given[0]
    changed = (steered != plain).nonzero().tolist()
    assert changed == [[0, 0, known[0]], [0, 1, known[1]], [0, 2, known[2]]]
    assert steered[0, 0, known[0]] == plain[0, 0].max() + PLANT_MARGIN
    assert steered[0, 2, known[2]] == -torch.inf


def test_a_regime_does_not_change_the_text():
    known = record_continuation(MODELS.target, PROMPT, 40)

    for commit_length in range(1, 9):
        planted = PlantedDrafter(MODELS.drafter, [known], commit_length)
        engine = Engine(MODELS.target, planted, EngineConfig(node_budget=7, max_context=64))
        got = engine.generate([PROMPT], max_new_tokens=24)[0]
        assert got.token_ids == tuple(known[:24])
        assert set(got.commit_lengths) == {commit_length}


def test_the_context_is_the_wrapped_drafters_whichever_way_it_is_extended():
    planted = PlantedDrafter(MODELS.drafter, [[]], 4)
    width = len(planted.config.target_layer_ids) * MODELS.target.config.hidden_size
    shaper = torch.Generator().manual_seed(0)
    taps = torch.randn(5, width, dtype=torch.float64, generator=shaper)
    request = DraftRequest(root_tokens=(3, 4), num_generated=(1, 1), sequence_ids=(0, 1))

    drafts = []
    for drafter in (planted, MODELS.drafter):
        context = drafter.new_context(2, max_context=3)
        features = drafter.extend(context, TapRows(taps, (2, 3)))
        drafter.extend_features(context, features, (2, 3))
        assert tuple(context.lengths) == (4, 6)
        drafts.append(MODELS.drafter.draft(context, request))

    assert torch.equal(*drafts)


@pytest.mark.parametrize(
    ("continuations", "message"), [([], "expected one for each prompt"), ([[1, 2]], "record more")]
)
def test_a_continuation_that_is_missing_or_too_short_is_named(continuations, message):
    engine = Engine(
        MODELS.target,
        PlantedDrafter(MODELS.drafter, continuations, 4),
        EngineConfig(max_context=64),
    )

    with pytest.raises(RequestError, match=message):
        engine.generate([PROMPT], max_new_tokens=8)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 130])
def test_a_recording_is_the_plain_forwards_choice(length):
    text = torch.randint(23, (length,), generator=torch.Generator().manual_seed(length)).tolist()

    known = record_continuation(MODELS.target, text, 3)

    logits = MODELS.target.logits([*text, *known])[length - 1 : -1]
    assert known == logits.argmax(-1).tolist()


def test_nothing_is_recorded_for_an_empty_prompt():
    with pytest.raises(RequestError, match="at least one token"):
        record_continuation(MODELS.target, [], 3)


def planted_pair(models, prompts, commit_length, num_tokens=80):
    """A target that says drawn tokens, and a drafter that knows them."""
    target = PlantedTarget(models.target)
    known = [target.continuation(len(text), num_tokens) for text in prompts]
    return target, PlantedDrafter(models.drafter, known, commit_length), known


@pytest.mark.parametrize("graphs", ["off", "buffers"])
@pytest.mark.parametrize("commit_length", range(1, 9))
def test_a_planted_target_commits_the_planted_length_whatever_is_rounded(commit_length, graphs):
    models = preset("nano", dtype=torch.bfloat16)
    prompts = [PROMPT, [7], list(range(20))]
    target, drafter, known = planted_pair(models, prompts, commit_length)
    engine = Engine(target, drafter, EngineConfig(max_context=200, graphs=graphs))
    batch = engine.prefill(prompts)

    for _ in range(6):
        assert engine.step(batch).commit_lengths == (commit_length,) * 3

    for sequence, own in zip(batch.sequences, known, strict=True):
        assert sequence.new_token_ids == tuple(own[: 6 * commit_length])


def test_a_planted_target_says_all_the_target_says_but_one_logit_of_a_row(monkeypatch):
    target, drafter, known = planted_pair(MODELS, [PROMPT], 4)
    engine = Engine(target, drafter, EngineConfig(max_context=64))
    batch = engine.prefill([PROMPT])
    rows = plan_pass(batch.cache, batch.seqs, [chain(known[0][:3])], REFERENCE)
    heard = []

    def hear(logits, *, backend):
        heard.append(logits.clone())
        return greedy_tokens(logits, backend=backend)

    monkeypatch.setattr("engine.pass_graphs.greedy_tokens", hear)

    plain, planted = (
        PlainPass(one, (0,))(rows, Choice(GREEDY, rows.repeat([0])))
        for one in (MODELS.target, target)
    )

    own, steered = heard
    # The chain's first token stands where the prompt's last would: positions 4, 5 and 6.
    raised = [[row, token] for row, token in enumerate(known[0][:3])]
    assert (steered != own).nonzero().tolist() == raised
    assert planted.tokens.tolist() == known[0][:3]
    margin = steered.amax(1) - own.amax(1)
    torch.testing.assert_close(margin, torch.full_like(margin, PLANT_MARGIN))
    assert torch.equal(plain.taps, planted.taps)


def test_a_planted_target_does_not_hide_what_is_no_number():
    target = PlantedTarget(MODELS.target)
    logits = torch.zeros(2, 23).index_fill_(0, torch.tensor([1]), torch.nan)

    target.steer(logits, torch.tensor([3, 4]))

    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()


def test_planted_tokens_are_those_of_a_seed_and_of_a_position():
    one, same, other = (PlantedTarget(MODELS.target, seed=seed) for seed in (0, 0, 1))

    assert one.continuation(5, 30) == same.continuation(5, 30) != other.continuation(5, 30)
    assert one.continuation(5, 30)[2:] == one.continuation(7, 28)
    assert one.tensors is MODELS.target.tensors


@pytest.mark.parametrize("layout", [{"page_size": 1}, {"page_size": 64, "cache_layout": "hybrid"}])
def test_a_planted_context_is_all_there_and_nothing_is_computed(layout, monkeypatch):
    monkeypatch.setattr("engine.planted.PLANTED_ROWS", 32)
    engine = Engine(
        MODELS.target, MODELS.drafter, EngineConfig(max_context=200, **layout), page_fill=torch.nan
    )
    monkeypatch.setattr(type(MODELS.target), "forward", None)

    batch = begin_planted(engine, [90, 0, 33])

    assert [engine.cache.length(seq) for seq in batch.seqs] == [90, 0, 33]
    assert batch.context.lengths == [90, 0, 33]
    for layer in range(2):
        rows = torch.cat([engine.cache.gather(layer, seq) for seq in batch.seqs])
        assert rows.unique(dim=0).shape == (123, 20)
        assert rows.std().item() == pytest.approx(1.0, abs=0.1)
    engine.cache.check_integrity()
    monkeypatch.undo()
    assert engine.step(batch).num_nodes == (16, 16, 16)


def test_rows_are_planted_alike_each_time_and_not_where_prompts_reuse_them():
    engines = [Engine(MODELS.target, None, EngineConfig(mode="ar")) for _ in range(3)]
    for engine, seed in zip(engines, (0, 0, 1), strict=True):
        begin_planted(engine, [20], seed=seed)
    one, same, other = (engine.cache.gather(1, 0) for engine in engines)

    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    reusing = Engine(MODELS.target, MODELS.drafter, EngineConfig(prefix_reuse=True))
    with pytest.raises(ConfigError, match="prefix_reuse: expected False, got True"):
        begin_planted(reusing, [20])


def test_a_planted_context_without_room_gives_its_pages_back():
    engine = Engine(
        MODELS.target, MODELS.drafter, EngineConfig(max_context=64, num_pages=3, page_size=16)
    )

    with pytest.raises(OutOfPagesError):
        begin_planted(engine, [40, 40])

    assert engine.cache.num_free_pages == 3
