"""The trained pair: whatever drafts and wherever rows lie, the text is autoregressive decoding's.

The oracle is the engine in mode "ar", and what it says is judged by the target's plain forward:
naive attention, no pages, no tree. All is in float64, sampled texts share their noise.

A test is a combination of a drafter and a cache layout; whatever else can be chosen (mode, budget,
chunks, reuse of prefixes, filters) is mixed in by lot. By default the tests share the batches out,
so that every prompt is decoded once. With `--exhaustive` every test decodes every prompt twice,
greedily and sampled.
"""

import functools
import itertools
import random
from collections import Counter

import pytest
import torch

from engine.budget import CostTable
from engine.config import PAGE_SIZES, EngineConfig
from engine.cost import cost_origin
from engine.decoder import Engine
from engine.draft_tree import DraftTree
from engine.planted import PlantedDrafter
from engine.presets import TEXTS, preset, random_drafter, sample_text
from engine.sampling import GREEDY, Sampling, choose_tokens
from tests.steered import Steered, always
from tests.windows import windows

pytestmark = pytest.mark.slow

BLOCK = 8
PROMPTS = windows(500)
DRAFTERS = ("tiny", "random", "constant", "perfect")
LAYOUTS = (*PAGE_SIZES, "hybrid")
COMBINATIONS = list(itertools.product(DRAFTERS, LAYOUTS))
NEW_TOKENS = {"tiny": 8, "random": 4, "constant": 5, "perfect": 2 * BLOCK - 1}
ORACLE_BATCH = 40
SAMPLED = (
    Sampling(1.0),
    Sampling(1.0, top_k=20),
    Sampling(1.0),
    Sampling(1.0, top_p=0.9),
    Sampling(1.0, min_p=0.05),
    Sampling(0.8, top_k=40, top_p=0.95, min_p=0.01),
)


def batches_of_one_to_eight():
    source, batches, first = random.Random(3), [], 0
    while first < len(PROMPTS):
        size = min(source.randint(1, 8), len(PROMPTS) - first)
        batches.append(range(first, first + size))
        first += size
    return batches


BATCHES = batches_of_one_to_eight()


@functools.cache
def pair():
    return preset("tiny", dtype=torch.float64)


def jobs_of(combination, is_exhaustive):
    """The batches a combination decodes and how their tokens are chosen."""
    number = COMBINATIONS.index(combination)
    jobs = []
    for n, batch in enumerate(BATCHES):
        turn, share = divmod(n, len(COMBINATIONS))
        samplings = (GREEDY, SAMPLED[n % len(SAMPLED)])
        if is_exhaustive:
            jobs += [(batch, sampling) for sampling in samplings]
        elif share == number:
            jobs.append((batch, samplings[(turn + number) % 2]))
    return jobs


@pytest.fixture(scope="module")
def own_texts():
    """What autoregressive decoding appends, by a prompt's index and the sampling; see `learn`."""
    return {}


def learn(own_texts, jobs, num_tokens):
    """Decode what the jobs need and is not known yet, in larger batches than theirs."""
    missing = {}
    for batch, sampling in jobs:
        missing.setdefault(sampling, []).extend(
            index for index in batch if len(own_texts.get((index, sampling), ())) < num_tokens
        )
    for sampling, indices in missing.items():
        for first in range(0, len(indices), ORACLE_BATCH):
            part = indices[first : first + ORACLE_BATCH]
            decoded = decode_alone(part, sampling, num_tokens)
            own_texts.update({(n, sampling): text for n, text in zip(part, decoded, strict=True)})


def decode_alone(indices, sampling, num_tokens):
    engine = Engine(pair().target, None, EngineConfig(mode="ar", max_context=256))
    prompts = [PROMPTS[index] for index in indices]
    generations = engine.generate(
        prompts, max_new_tokens=num_tokens, sampling=sampling, seed=seeds_of(indices)
    )
    for prompt, index, generation in zip(prompts, indices, generations, strict=True):
        judge(prompt, generation.token_ids, sampling, seed=seeds_of([index])[0])
    return [generation.token_ids for generation in generations]


def judge(prompt, token_ids, sampling, *, seed):
    """Each token is the one chosen from the plain forward's logits at its own prefix."""
    text = [*prompt, *token_ids]
    logits = pair().target.logits(text[:-1])[len(prompt) - 1 :]
    positions = torch.arange(len(prompt), len(text))
    assert token_ids == tuple(choose_tokens(logits, positions, seed, sampling).tolist())


def seeds_of(indices):
    return [7919 * index - 1000 for index in indices]


def drafter_named(name, continuations=()):
    drafter = pair().drafter
    if name == "random":
        return random_drafter(drafter.config, pair().target, seed=11)
    if name == "constant":
        counts = torch.zeros(drafter.config.vocab_size)
        for byte, count in Counter(b"".join(map(sample_text, TEXTS))).items():
            counts[byte] = count
        return Steered(drafter, always(counts.log1p()))
    if name == "perfect":
        return PlantedDrafter(drafter, continuations, BLOCK)
    return drafter


def config_by_lot(name, layout, lot):
    policies = ("fixed", "shared") if name == "perfect" else ("fixed", "shared", "adaptive")
    return EngineConfig(
        mode=lot.choice(("ddtree", "ddtree", "ddtree", "dflash")),
        node_budget=lot.choice(
            (7, 7, 7, 16, 32) if name == "perfect" else (3, 7, 7, 7, 16, 16, 32)
        ),
        budget_policy=lot.choice(policies),
        cache_layout="hybrid" if layout == "hybrid" else "paged",
        page_size=lot.choice(PAGE_SIZES) if layout == "hybrid" else layout,
        prefill_chunk=lot.choice((64, 64, 64, 64, 64, 17, 17, 5)),
        prefix_reuse=lot.choice((False, False, True)),
        drafter_context=lot.choice((None, 24)),
        max_context=128,
    )


def engine_for(name, config, continuations=()):
    drafter = drafter_named(name, continuations)
    table = CostTable(
        num_rows=(8, 16, 32, 64, 512),
        context_tokens=(64,),
        step_seconds=((2.0, 2.5, 3.0, 5.0, 41.0),),
        sequence_seconds=(0.25,),
        origin=cost_origin(pair().target, drafter, config),
    )
    adaptive = config.budget_policy == "adaptive"
    return Engine(
        pair().target,
        drafter,
        config,
        page_fill=torch.nan,
        cost_table=table if adaptive else None,
    )


def decode(engine, indices, sampling, known, num_tokens):
    """Decode prompts, in two turns where pages of the first can serve the second."""
    turns = [0, num_tokens]
    if engine.config.prefix_reuse:
        turns.insert(1, num_tokens // 2)
    token_ids, commit_lengths = [() for _ in indices], []
    for start, end in itertools.pairwise(turns):
        if isinstance(engine.drafter, PlantedDrafter):
            engine.drafter.continuations = [text[start:] for text in known]
        generations = engine.generate(
            [[*PROMPTS[i], *done] for i, done in zip(indices, token_ids, strict=True)],
            max_new_tokens=end - start,
            sampling=sampling,
            seed=seeds_of(indices),
        )
        token_ids = [
            done + generation.token_ids
            for done, generation in zip(token_ids, generations, strict=True)
        ]
        commit_lengths += [n for generation in generations for n in generation.commit_lengths]
    return token_ids, commit_lengths


@pytest.mark.parametrize(("name", "layout"), COMBINATIONS)
def test_output_is_that_of_autoregressive_decoding(name, layout, own_texts, is_exhaustive):
    num_tokens = NEW_TOKENS[name]
    jobs = jobs_of((name, layout), is_exhaustive)
    learn(own_texts, jobs, max(NEW_TOKENS.values()) if is_exhaustive else num_tokens)
    for batch, sampling in jobs:
        config = config_by_lot(name, layout, random.Random(f"{name} {layout} {batch} {sampling}"))
        known = [own_texts[index, sampling] for index in batch]
        engine = engine_for(name, config, known)

        token_ids, commit_lengths = decode(engine, batch, sampling, known, num_tokens)

        assert token_ids == [text[:num_tokens] for text in known], (batch, sampling, config)
        if name == "perfect":
            assert set(commit_lengths) == {BLOCK}, (batch, sampling, config)
        engine.cache.check_integrity()
        assert not engine.cache.sequences


def test_the_default_run_decodes_every_prompt_once_and_the_exhaustive_one_everywhere():
    shares = [jobs_of(combination, False) for combination in COMBINATIONS]
    used = sorted(index for jobs in shares for batch, _ in jobs for index in batch)

    assert used == list(range(len(PROMPTS)))
    assert {len(batch) for batch in BATCHES} == set(range(1, 9))
    for jobs in shares:
        assert {sampling.is_greedy for _, sampling in jobs} == {True, False}
    for combination in COMBINATIONS:
        assert sum(len(batch) for batch, _ in jobs_of(combination, True)) == 2 * len(PROMPTS)


@pytest.mark.parametrize("sampling", [*SAMPLED[:2], GREEDY])
def test_a_perfect_drafter_commits_the_whole_block_in_every_step_of_a_long_text(sampling):
    indices, num_tokens = range(4), 9 * BLOCK
    known = decode_alone(indices, sampling, num_tokens + BLOCK)
    config = EngineConfig(node_budget=BLOCK - 1, max_context=256)
    engine = engine_for("perfect", config, known)

    generations = engine.generate(
        [PROMPTS[index] for index in indices],
        max_new_tokens=num_tokens,
        sampling=sampling,
        seed=seeds_of(indices),
    )

    for generation, text in zip(generations, known, strict=True):
        assert generation.token_ids == text[:num_tokens]
        assert generation.commit_lengths == (BLOCK,) * 9


class Blind(Engine):
    """An engine in whose verify pass a node sees the root and itself, not what is between."""

    def verify(self, batch, trees):
        return super().verify(batch, [as_star(tree) for tree in trees])


def as_star(tree):
    parents = torch.zeros_like(tree.parents)
    parents[0] = -1
    return DraftTree(tree.token_ids, parents, tree.depths, tree.path_log_probs)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)])
def test_a_wrong_ancestor_mask_changes_the_text(sampling):
    """The comparison can fail: it is no property of the drafter's that hides the pass."""
    known = decode_alone(range(8), sampling, 12)
    engine = Blind(pair().target, pair().drafter, EngineConfig(max_context=128))

    token_ids, _ = decode(engine, range(8), sampling, known, 12)

    assert token_ids != known
