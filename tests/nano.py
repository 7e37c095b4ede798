"""Engines over the random toy pair in float64, and what their state must equal."""

import functools

import torch

from engine.config import EngineConfig
from engine.decoder import Engine
from engine.drafter import TapRows
from engine.layers import Rotary
from engine.observer import STAGES
from engine.planted import PlantedDrafter, record_continuation
from engine.presets import preset
from engine.sampling import GREEDY, Sampling, choose_tokens

MODELS = preset("nano", dtype=torch.float64, seed=1)
TARGET = MODELS.target
VOCAB = TARGET.config.vocab_size
BLOCK = MODELS.drafter.config.block_size
POISON = torch.nan  # what rows hold that nobody may read


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def make_engine(drafter=MODELS.drafter, *, observer=None, cost_table=None, **config):
    config = EngineConfig(**({"node_budget": 24, "max_context": 256} | config))
    return Engine(
        TARGET, drafter, config, observer=observer, page_fill=POISON, cost_table=cost_table
    )


@functools.cache
def recorded(text, num_tokens):
    return record_continuation(TARGET, text, num_tokens)


def planted(prompts, commit_length, num_tokens=60):
    known = [recorded(tuple(text), num_tokens) for text in prompts]
    return PlantedDrafter(MODELS.drafter, known, commit_length)


def naive_pass(token_ids):
    """Latent rows of every layer and the residual stream after it, by the plain forward."""
    positions = torch.arange(len(token_ids))
    rotation = Rotary.of_target(TARGET.config, TARGET.device).at(positions, TARGET.dtype)
    x = TARGET.embed_tokens[token_ids]
    rows, streams = [], []
    for layer in TARGET.layers:
        normed = x * (x.square().mean(-1, keepdim=True) + layer.eps).rsqrt() * layer.input_layernorm
        rows.append(layer.self_attn.latent_rows(normed, rotation))
        x = layer.naive(x, rotation)
        streams.append(x)
    return rows, streams


def assert_state_equals_recomputation(engine, batch):
    """Cache rows, taps and drafter context of every sequence against one made from scratch."""
    if engine.drafter is not None:
        batch.complete_context(engine.drafter)
    for n, sequence in enumerate(batch.sequences):
        rows, streams = naive_pass(sequence.token_ids)
        committed = sequence.committed_length
        for layer, expected in enumerate(rows):
            held = batch.cache.gather(layer, sequence.seq)
            torch.testing.assert_close(held, expected[:committed], rtol=0, atol=1e-10)
        if engine.drafter is not None:
            assert_context_equals_one_from_scratch(engine, batch, n, streams)


def assert_context_equals_one_from_scratch(engine, batch, n, streams):
    """Every row that a block behind sequence `n` sees, layer by layer."""
    drafter, length = MODELS.drafter, batch.sequences[n].committed_length
    taps = torch.cat([streams[i][:length] for i in drafter.config.target_layer_ids], dim=-1)
    made = drafter.new_context(1, max_context=engine.config.drafter_context)
    drafter.extend(made, TapRows(taps, (length,)))
    assert batch.context.lengths[n] == length
    batch.context.check_complete()
    for layer, sight in enumerate(made.sights):
        slots = sight.slots(torch.arange(sight.first_seen(length), length))
        for held in ("keys", "values"):
            grown = getattr(batch.context, held)[layer][n, :, slots]
            expected = getattr(made, held)[layer][0, :, slots]
            torch.testing.assert_close(grown, expected, rtol=0, atol=1e-9)


def own_continuation(text, token_ids, sampling=GREEDY, seed=0, *, target=TARGET):
    """What the target alone chooses at each prefix of a continuation, and its log-probs of it."""
    whole = [*text, *token_ids]
    logits = target.logits(whole)[len(text) - 1 : -1]
    chosen = choose_tokens(logits, torch.arange(len(text), len(whole)), seed, sampling)
    log_probs = logits.double().log_softmax(-1).gather(1, chosen.unsqueeze(1)).flatten()
    return tuple(chosen.tolist()), tuple(log_probs.tolist())


def own_tokens(target, text, token_ids, *, temperature=0.0, seed=0):
    """What `target` alone chooses at each prefix of a continuation."""
    sampling = Sampling(temperature)
    return own_continuation(text, token_ids, sampling, seed, target=target)[0]


def assert_is_the_targets_own(generation, text, sampling=GREEDY, seed=0):
    tokens, log_probs = own_continuation(text, generation.token_ids, sampling, seed)
    assert generation.token_ids == tokens
    torch.testing.assert_close(
        torch.tensor(generation.logprobs), torch.tensor(log_probs), rtol=0, atol=2e-5
    )


def pages_in_use(engine):
    return engine.cache.shape.num_pages - engine.cache.num_free_pages


def assert_nobody_holds_a_page(engine):
    """All pages are free but those kept for later prompts."""
    cache = engine.cache
    cache.check_integrity()
    assert cache.sequences == ()
    assert cache.num_free_pages + cache.num_indexed_pages == cache.shape.num_pages


class Notes:
    """An observer that writes down what it is told."""

    def __init__(self):
        self.heard = []

    def start(self, stage):
        self.heard.append(("start", stage))

    def stop(self, stage):
        self.heard.append(("stop", stage))

    def seconds(self):
        return dict.fromkeys(STAGES, 0.5)
