"""Sampling: the right distribution, and the same token whatever is computed beside it."""

import math

import pytest
import torch
from scipy import stats

from engine import sampling
from engine.errors import RequestError, ShapeError
from engine.sampling import GREEDY, Sampling, choose_tokens, chosen_log_probs, gumbel_noise

LOGITS = torch.tensor([2.0, 1.0, 0.5, -0.3, -1.0])
MASK_64 = 2**64 - 1


def draw(logits, count, *, temperature, seed=11):
    positions = torch.arange(count)
    rows = logits.expand(count, -1)
    return choose_tokens(rows, positions, seed, Sampling(temperature))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1])
def test_tokens_come_as_often_as_softmax_says(temperature, seed):
    count = 40_000

    tokens = draw(LOGITS, count, temperature=temperature, seed=seed)

    observed = tokens.bincount(minlength=5).numpy()
    expected = (LOGITS.double() / temperature).softmax(0).numpy() * count
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_neighbouring_positions_and_seeds_are_independent():
    count = 40_000
    tokens = draw(LOGITS, count, temperature=1.0, seed=3)
    other_seed = draw(LOGITS, count, temperature=1.0, seed=4)

    for first, second in [(tokens[:-1], tokens[1:]), (tokens, other_seed)]:
        pairs = (first * 5 + second).bincount(minlength=25).reshape(5, 5).numpy()
        assert stats.chi2_contingency(pairs).pvalue > 1e-3


def test_noise_is_standard_gumbel_along_tokens_and_along_positions():
    noise = gumbel_noise(torch.arange(300), 9, torch.arange(300), torch.Size([300]))

    for sample in (noise[0], noise[:, 0], noise.flatten()):
        assert stats.kstest(sample.numpy(), "gumbel_r").pvalue > 1e-3


def test_words_are_those_of_splitmix64():
    words = sampling._mix(torch.tensor(1234567) + torch.arange(1, 6) * sampling._GAMMA)

    # The generator's widely published first outputs for this seed.
    assert [word & MASK_64 for word in words.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_uniform_values_never_reach_zero_or_one():
    words = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), 4095, -4096])

    uniform = sampling._uniform(words)

    assert uniform.min() == 2.0**-53
    assert uniform.max() == 1.0 - 2.0**-53
    assert (-(-uniform.log()).log()).isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_gets_the_same_token_alone_in_a_batch_and_in_a_tree(temperature):
    shaper = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 9, 200, generator=shaper)
    positions = torch.randint(0, 200_000, (3, 9), generator=shaper)
    seeds = torch.tensor([[5], [6], [5]])

    together = choose_tokens(logits, positions, seeds, Sampling(temperature))

    assert together.shape == (3, 9)
    assert together.dtype == torch.int64
    for sequence in range(3):
        for node in range(9):
            alone = choose_tokens(
                logits[sequence, node],
                positions[sequence, node],
                int(seeds[sequence]),
                Sampling(temperature),
            )
            assert alone == together[sequence, node]
    backwards = choose_tokens(
        logits.flip(0, 1), positions.flip(0, 1), seeds.flip(0), Sampling(temperature)
    )
    assert torch.equal(backwards.flip(0, 1), together)


def test_nodes_of_one_depth_share_their_noise():
    noise = gumbel_noise(torch.tensor([8, 9, 9, 10]), 1, torch.arange(50), torch.Size([4]))

    assert torch.equal(noise[1], noise[2])
    assert not torch.equal(noise[0], noise[1])


def test_a_larger_vocabulary_does_not_change_the_noise_of_its_first_tokens():
    position, row = torch.tensor([4]), torch.Size([1])

    small = gumbel_noise(position, 1, torch.arange(50), row)
    large = gumbel_noise(position, 1, torch.arange(99), row)

    assert torch.equal(small, large[:, :50])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_greedy_takes_the_lowest_id_among_equals(dtype):
    logits = torch.zeros(4, 3000, dtype=dtype)
    logits[1, 1700:] = 1.0
    logits[2, [5, 2999]] = 1.0
    logits[3] = -torch.inf
    logits[3, 7] = -1.0

    tokens = choose_tokens(logits, torch.arange(4), 0, GREEDY)

    assert tokens.tolist() == [0, 1700, 5, 7]


def test_only_temperatures_below_the_limit_are_greedy():
    logits = torch.zeros(50, 10)
    positions = torch.arange(50)

    assert not choose_tokens(logits, positions, 0, Sampling(9.9e-6)).any()
    assert choose_tokens(logits, positions, 0, Sampling(1e-5)).any()


def test_banned_tokens_are_never_sampled():
    logits = torch.tensor([0.0, -torch.inf, 0.0])

    tokens = draw(logits, 500, temperature=5.0)

    assert set(tokens.tolist()) == {0, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probs_are_those_of_the_untempered_distribution(dtype):
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
    tokens = torch.tensor([0, 5, 2, 2])

    log_probs = chosen_log_probs(logits, tokens)

    assert log_probs.dtype == dtype
    expected = logits.double().log_softmax(1)[torch.arange(4), tokens]
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 0.0], [0.0, math.inf], [-math.inf, -math.inf]])
def test_rows_without_a_distribution_are_refused(temperature, bad):
    logits = torch.tensor([[0.0, 1.0], bad])

    with pytest.raises(ShapeError, match="logits: expected a finite maximum"):
        choose_tokens(logits, torch.arange(2), 0, Sampling(temperature))


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_an_impossible_temperature_is_refused(temperature):
    with pytest.raises(RequestError, match="temperature: expected a finite number >= 0"):
        draw(LOGITS, 2, temperature=temperature)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": True}, "temperature: expected a finite number >= 0, got True"),
        ({"temperature": "1"}, "temperature: expected a finite number >= 0, got '1'"),
        ({"top_k": 0}, r"top_k: expected an integer >= 1, got 0"),
        ({"top_k": 2.0}, r"top_k: expected an integer >= 1, got 2\.0"),
        ({"top_k": True}, r"top_k: expected an integer >= 1, got True"),
        ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0\.0"),
        ({"top_p": 1.01}, r"top_p: expected a number in \(0, 1\], got 1\.01"),
        ({"top_p": math.nan}, r"top_p: expected a number in \(0, 1\], got nan"),
        ({"top_p": True}, r"top_p: expected a number in \(0, 1\], got True"),
        ({"min_p": -0.1}, r"min_p: expected a number in \[0, 1\], got -0\.1"),
        ({"min_p": 1.1}, r"min_p: expected a number in \[0, 1\], got 1\.1"),
        ({"min_p": math.nan}, r"min_p: expected a number in \[0, 1\], got nan"),
    ],
)
def test_an_impossible_filter_is_refused(options, message):
    with pytest.raises(RequestError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, True, False])
def test_a_seed_that_is_no_int64_is_refused(seed):
    with pytest.raises(RequestError, match=rf"seed: expected an integer in .* got {seed}"):
        draw(LOGITS, 2, temperature=1.0, seed=seed)


@pytest.mark.parametrize(
    ("positions", "seeds", "message"),
    [
        (torch.arange(3), 0, r"positions: expected \[2\], got \[3\]"),
        (torch.zeros(2), 0, "positions: expected integers"),
        (torch.zeros(2, dtype=torch.bool), 0, "positions: expected integers"),
        (torch.arange(2), torch.tensor([0.5, 1.0]), "seeds: expected integers"),
        (torch.arange(2), 0.5, "seeds: expected integers"),
        (torch.arange(2), torch.arange(3), r"seeds: expected \[2\], got \[3\]"),
    ],
)
def test_positions_and_seeds_that_do_not_fit_the_rows_are_refused(positions, seeds, message):
    with pytest.raises(ShapeError, match=message):
        choose_tokens(LOGITS.expand(2, -1), positions, seeds, Sampling(1.0))


def test_log_probs_need_one_token_for_each_row():
    with pytest.raises(ShapeError, match=r"token_ids: expected \[2\], got \[3\]"):
        chosen_log_probs(LOGITS.expand(2, -1), torch.zeros(3, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.7),
        Sampling(0.7, top_k=20),
        Sampling(1.3, top_p=0.8),
        Sampling(1.3, min_p=0.05),
        Sampling(0.9, top_k=50, top_p=0.9, min_p=0.01),
    ],
)
def test_a_device_draws_the_tokens_the_host_draws(dtype, sampling):
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[:32] = logits[:32].round()  # full of ties, both zeros among them
    positions = torch.arange(64)

    on_host = choose_tokens(logits, positions, 7, sampling)
    on_device = choose_tokens(logits.cuda(), positions.cuda(), 7, sampling)

    assert torch.equal(on_device.cpu(), on_host)
