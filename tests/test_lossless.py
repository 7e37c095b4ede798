"""Whatever the drafter says, the engine says what the target alone would.

The oracle is the target's plain forward: naive attention, no pages, no tree. A text is the
target's own exactly if each of its tokens is the one chosen from the logits before it, so one
causal forward over the finished text judges all of its tokens.
"""

import functools
import random

import pytest
import torch

from engine.config import PAGE_SIZES, EngineConfig
from engine.decoder import Engine
from engine.planted import PlantedDrafter, record_continuation
from engine.presets import preset
from tests.nano import own_tokens
from tests.steered import Steered, one_token_only, random_logits, tied_logits

SEEDS = range(18)
LAYOUTS = (*PAGE_SIZES, "hybrid")
NEW_TOKENS = 12
BLOCK = 8


@functools.cache
def models_of(seed):
    return preset("nano", dtype=torch.float64, seed=seed)


@functools.cache
def recorded(seed):
    models = models_of(seed)
    prompts = prompts_of(seed, models.target.config.vocab_size)
    return [record_continuation(models.target, prompt, NEW_TOKENS + BLOCK) for prompt in prompts]


def drafter_of(models, seed):
    """The drafter of a seed: the model's own, senseless ones, perfect and always wrong ones."""
    kind = seed % 6
    if kind < 4:
        steer = (None, random_logits, tied_logits, one_token_only)[kind]
        return models.drafter if steer is None else Steered(models.drafter, steer)
    return PlantedDrafter(models.drafter, recorded(seed), BLOCK if kind == 4 else 1)


def prompts_of(seed, vocab_size):
    source = random.Random(seed)
    lengths = (1, source.randint(2, 20), source.randint(50, 66))  # up to and over a page of 64
    return [[source.randrange(vocab_size) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_output_is_the_targets_own(seed, layout):
    models = models_of(seed)
    prompts = prompts_of(seed, models.target.config.vocab_size)
    config = EngineConfig(
        mode="dflash" if seed % 7 == 3 else "ddtree",
        node_budget=(7, 16, 40)[seed // 6],
        budget_policy=("fixed", "shared")[seed // 3 % 2],
        cache_layout="hybrid" if layout == "hybrid" else "paged",
        page_size=PAGE_SIZES[seed % 5] if layout == "hybrid" else layout,
        max_context=128,
        prefill_chunk=(64, 5)[seed % 2],
    )
    engine = Engine(models.target, drafter_of(models, seed), config, page_fill=torch.nan)

    generations = engine.generate(prompts, max_new_tokens=NEW_TOKENS)

    for prompt, generation in zip(prompts, generations, strict=True):
        assert len(generation.token_ids) == NEW_TOKENS
        assert generation.token_ids == own_tokens(models.target, prompt, generation.token_ids)


@pytest.mark.parametrize("temperature", [0.7, 2.0])
@pytest.mark.parametrize("seed", range(10))
def test_sampled_output_is_the_targets_own_with_the_same_noise(seed, temperature):
    models = models_of(seed)
    prompts = prompts_of(seed, models.target.config.vocab_size)
    steer = (None, random_logits, tied_logits)[seed % 3]
    drafter = models.drafter if steer is None else Steered(models.drafter, steer)
    engine = Engine(
        models.target, drafter, EngineConfig(node_budget=40, max_context=128), page_fill=torch.nan
    )

    generations = engine.generate(
        prompts, max_new_tokens=NEW_TOKENS, temperature=temperature, seed=[seed, 7, 7]
    )

    for prompt, noise, generation in zip(prompts, (seed, 7, 7), generations, strict=True):
        assert generation.token_ids == own_tokens(
            models.target, prompt, generation.token_ids, temperature=temperature, seed=noise
        )


def test_seed_and_temperature_matter():
    models = preset("nano", dtype=torch.float64)
    engine = Engine(models.target, models.drafter, EngineConfig(max_context=64))

    outputs = {
        engine.generate([[1, 2, 3]], max_new_tokens=12, temperature=t, seed=s)[0].token_ids
        for t, s in ((0.0, 0), (1.0, 0), (1.0, 1), (3.0, 1))
    }

    assert len(outputs) == 4


def test_one_token_at_a_time_gives_the_same_text():
    """The oracle itself: a loop of plain forwards, each over the text so far."""
    models = preset("nano", dtype=torch.float64, seed=2)
    text = [4, 9, 1]
    for _ in range(20):
        text.append(int(models.target.logits(text)[-1].argmax()))

    engine = Engine(models.target, models.drafter, EngineConfig(max_context=64))

    assert engine.generate([text[:3]], max_new_tokens=20)[0].token_ids == tuple(text[3:])
    assert record_continuation(models.target, text[:3], 20) == text[3:]


@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_a_perfect_drafter_always_commits_the_whole_block(name):
    models = preset(name, dtype=torch.float64)
    prompts = [[1, 2, 3, 4, 5], [6]]
    known = [record_continuation(models.target, prompt, 40 + BLOCK) for prompt in prompts]
    engine = Engine(
        models.target,
        PlantedDrafter(models.drafter, known, BLOCK),
        EngineConfig(node_budget=7, max_context=128),
    )

    generations = engine.generate(prompts, max_new_tokens=40)

    for generation, continuation in zip(generations, known, strict=True):
        assert generation.token_ids == tuple(continuation[:40])
        assert set(generation.commit_lengths) == {BLOCK}


def test_a_text_does_not_depend_on_the_batch_it_is_in():
    models = preset("nano", dtype=torch.float64, seed=5)
    prompts = prompts_of(5, models.target.config.vocab_size)
    engine = Engine(models.target, models.drafter, EngineConfig(max_context=128))

    together = engine.generate(prompts, max_new_tokens=20, temperature=1.0, seed=3)
    alone = [engine.generate([p], max_new_tokens=20, temperature=1.0, seed=3)[0] for p in prompts]

    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


def test_float32_output_is_the_targets_own_too():
    models = preset("tiny")
    prompt = list(b"a longer prompt, so that several pages of sixteen rows are in use")
    engine = Engine(
        models.target, models.drafter, EngineConfig(max_context=128), page_fill=torch.nan
    )

    token_ids = engine.generate([prompt], max_new_tokens=24)[0].token_ids

    assert token_ids == own_tokens(models.target, prompt, token_ids)
