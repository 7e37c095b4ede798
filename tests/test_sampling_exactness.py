"""The filters cut where they say, and trees under them emit what plain decoding would.

transformers' warpers judge the filters where no two tokens are equal; a slow twin, which says the
rule token by token, judges them where many are. The pairs of a toy target with five tokens and
two depths judge the whole: their law is known in closed form.
"""

import itertools
import math

import pytest
import torch
from scipy import stats
from transformers.generation import logits_process as warpers

from engine import sampling as module
from engine.draft_tree import accept_batch, build_draft_tree
from engine.sampling import Sampling, choose_tokens

FILTERS = [
    Sampling(1.0),
    Sampling(0.7, top_k=1),
    Sampling(1.0, top_k=7),
    Sampling(1.5, top_k=1000),
    Sampling(1.0, top_p=1e-9),
    Sampling(0.8, top_p=0.5),
    Sampling(1.0, top_p=0.95),
    Sampling(2.0, top_p=1 - 1e-9),
    Sampling(1.0, min_p=0.1),
    Sampling(1.0, min_p=1.0),
    Sampling(1.3, top_k=20, top_p=0.9),
    Sampling(0.6, top_k=12, min_p=0.02),
    Sampling(1.7, top_p=0.9, min_p=0.05),
    Sampling(1.2, top_k=15, top_p=0.8, min_p=0.05),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def kept_scores(logits, sampling):
    """The scores of all tokens in the vocabulary's order, -inf where filtered."""
    ids, scores = module._candidates(logits, sampling)
    full = torch.full(logits.shape, -torch.inf, dtype=torch.float64)
    return full.scatter(-1, ids.expand_as(scores), scores)


def warped_scores(logits, sampling):
    chain = [warpers.TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k is not None:
        chain.append(warpers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(warpers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        chain.append(warpers.MinPLogitsWarper(sampling.min_p))
    scores = logits.double()
    for warper in chain:
        scores = warper(None, scores)
    return scores


def kept_by_the_rule(row, sampling):
    """The tokens of one row that stay, each judged alone."""
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    best = row[ranked[0]]
    weights = [math.exp((row[token] - best) / sampling.temperature) for token in ranked]
    most = len(row) if sampling.top_k is None else min(sampling.top_k, len(row))
    total = math.fsum(weights[:most])
    kept = set()
    for rank in range(most):
        before = math.fsum(weights[:rank])
        in_nucleus = sampling.top_p == 1.0 or before < sampling.top_p * total
        if in_nucleus and weights[rank] >= sampling.min_p and row[ranked[rank]] > -math.inf:
            kept.add(ranked[rank])
    return kept


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_without_ties_the_filters_are_those_of_transformers(sampling):
    logits = torch.randn(2000, 60, generator=torch.Generator().manual_seed(1)).double() * 3
    logits[::7, ::3] = -torch.inf
    logits[5, 1:] = -torch.inf

    scores = kept_scores(logits, sampling)

    expected = warped_scores(logits, sampling)
    assert torch.equal(scores > -torch.inf, expected > -torch.inf)
    torch.testing.assert_close(scores.softmax(-1), expected.softmax(-1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_ties_the_lower_ids_stay(sampling, dtype):
    levels = torch.tensor([-torch.inf, -2.0, -1.0, -0.0, 0.0, 1.5])
    picks = torch.randint(6, (150, 24), generator=torch.Generator().manual_seed(2))
    picks[:, 0] = picks[:, 0].clamp(min=1)
    logits = levels[picks].to(dtype)

    kept = kept_scores(logits, sampling) > -torch.inf

    for row, stays in zip(logits.tolist(), kept, strict=True):
        assert set(stays.nonzero().flatten().tolist()) == kept_by_the_rule(row, sampling)


@pytest.mark.parametrize(("top_p", "count"), [(0.5, 2), (0.5 + 1e-9, 3), (0.25, 1), (0.75, 3)])
def test_a_nucleus_ends_exactly_where_its_share_is_reached(top_p, count):
    logits = torch.tensor([3.0, -torch.inf, 3.0, 3.0, -50.0, 3.0])

    kept = kept_scores(logits, Sampling(1.0, top_p=top_p)) > -torch.inf

    assert kept.nonzero().flatten().tolist() == [0, 2, 3, 5][:count]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_filtered_choice_is_the_best_of_what_stays_under_the_noise_of_its_place(sampling, dtype):
    logits = (torch.randn(300, 40, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    positions = torch.arange(300)

    tokens = choose_tokens(logits, positions, 5, sampling)

    noise = module.gumbel_noise(positions, 5, torch.arange(40), torch.Size([300]))
    assert torch.equal(tokens, (kept_scores(logits, sampling) + noise).argmax(-1))


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_a_filtered_row_gets_the_same_token_alone_in_a_batch_and_in_a_tree(sampling):
    shaper = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 9, 300, generator=shaper).mul(4).round()
    positions = torch.randint(0, 200_000, (3, 9), generator=shaper)
    seeds = torch.tensor([[5], [6], [5]])

    together = choose_tokens(logits, positions, seeds, sampling)

    strided = logits.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(choose_tokens(strided, positions, seeds, sampling), together)
    for sequence, node in itertools.product(range(3), range(9)):
        place = positions[sequence, node]
        alone = choose_tokens(logits[sequence, node], place, int(seeds[sequence]), sampling)
        assert alone == together[sequence, node]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_a_single_possible_token_survives_every_filter(sampling):
    logits = torch.full((4, 30), -torch.inf)
    logits[torch.arange(4), torch.tensor([0, 11, 29, 3])] = torch.tensor([-1e30, 0.0, 7.0, 1e30])

    tokens = choose_tokens(logits, torch.arange(4), 0, sampling)

    assert tokens.tolist() == [0, 11, 29, 3]


def test_huge_logits_over_a_low_temperature_keep_their_distribution():
    logits = torch.tensor([1.7e308, -1.7e308, 1.7e308], dtype=torch.float64).expand(400, -1)

    tokens = choose_tokens(logits, torch.arange(400), 0, Sampling(1e-5))

    assert set(tokens.tolist()) == {0, 2}


def test_a_filter_leaves_the_logits_of_its_caller_alone():
    logits = torch.randn(5, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    before = logits.clone()

    for sampling in FILTERS:
        choose_tokens(logits, torch.arange(5), 0, sampling)

    assert torch.equal(logits, before)


VOCAB_SIZE, NUM_ROUNDS, NUM_TREES, START = 5, 100_000, 40, 17
PAIR_SAMPLINGS = [
    Sampling(1.0),
    Sampling(1.0, top_k=3),
    Sampling(1.0, top_p=0.8),
    Sampling(1.0, min_p=0.2),
    Sampling(1.4, top_k=4, top_p=0.9, min_p=0.1),
]


def toy_target():
    """Logits after the first root, and after each first token."""
    shaper = torch.Generator().manual_seed(8)
    return torch.randn(VOCAB_SIZE, generator=shaper), torch.randn(5, 5, generator=shaper)


def plain_pairs(sampling, seeds):
    """What the target alone says, token by token."""
    after_root, after_first = toy_target()
    firsts = choose_tokens(after_root.expand(len(seeds), -1), torch.tensor(START), seeds, sampling)
    seconds = choose_tokens(after_first[firsts], torch.tensor(START + 1), seeds, sampling)
    return torch.stack([firsts, seconds], 1)


def random_tree(seed):
    """A draft of depth 2 from a drafter that knows nothing, of up to 12 nodes."""
    shaper = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, VOCAB_SIZE, generator=shaper) * 2
    return build_draft_tree(logits, root_token=0, node_budget=1 + seed % 12)


def step_tokens(tree, rows, start, seeds, sampling):
    """What one step appends in each round: accepted path, then the bonus token."""
    positions = start + tree.depths.long()
    chosen = choose_tokens(rows.expand(len(seeds), -1, -1), positions, seeds.unsqueeze(1), sampling)
    digits = VOCAB_SIZE ** torch.arange(tree.tree_size)
    codes, which = (chosen * digits).sum(1).unique(return_inverse=True)  # a walk sees no more
    different = codes.unsqueeze(1) // digits % VOCAB_SIZE
    drafted = tree.token_ids.tolist()
    walked = [
        [*(drafted[node] for node in acceptance.path.tolist()), acceptance.bonus_token]
        for acceptance in accept_batch([tree] * len(different), different)
    ]
    return [walked[index] for index in which.tolist()]


def speculative_pairs(sampling, seeds, tree):
    """The first two tokens that steps emit: both of the first step, or the second of the next."""
    after_root, after_first = toy_target()
    is_root = (tree.depths == 0).unsqueeze(1)
    # After depth 2 comes a third token, which no pair holds: any logits do.
    rows = torch.where(is_root, after_root, after_first[tree.token_ids.long()])
    emitted = step_tokens(tree, rows, START, seeds, sampling)
    short = torch.tensor([len(tokens) == 1 for tokens in emitted]).nonzero().flatten()
    firsts = torch.tensor([tokens[0] for tokens in emitted])
    rows = after_first[firsts[short]].unsqueeze(1).expand(-1, tree.tree_size, -1)
    again = step_tokens(tree, rows, START + 1, seeds[short], sampling)
    for index, tokens in zip(short.tolist(), again, strict=True):
        emitted[index] = emitted[index] + tokens
    return torch.tensor([tokens[:2] for tokens in emitted]), len(short)


def pair_law(sampling):
    """The probability of each pair under the target, in closed form."""
    after_root, after_first = toy_target()
    first = warped_scores(after_root.unsqueeze(0), sampling).softmax(-1).squeeze(0)
    return first.unsqueeze(1) * warped_scores(after_first, sampling).softmax(-1)


@pytest.mark.parametrize("sampling", PAIR_SAMPLINGS, ids=str)
def test_pairs_that_trees_emit_come_as_often_as_plain_decoding_says(sampling):
    seeds = torch.arange(NUM_ROUNDS)

    parts = [
        speculative_pairs(sampling, part, random_tree(index))
        for index, part in enumerate(seeds.chunk(NUM_TREES))
    ]

    pairs = torch.cat([part for part, _ in parts])
    assert torch.equal(pairs, plain_pairs(sampling, seeds))  # round by round, not only in law
    assert 0.05 < sum(short for _, short in parts) / NUM_ROUNDS < 0.95  # both ways were taken
    counts = (pairs[:, 0] * VOCAB_SIZE + pairs[:, 1]).bincount(minlength=25).numpy()
    expected = pair_law(sampling).flatten().numpy() * NUM_ROUNDS
    assert not counts[expected == 0].any()
    possible = expected > 0
    assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-3
