"""Choosing tokens: greedy, or by Gumbel noise that is a function of its place, not of its turn.

A sample of `softmax(logits / temperature)` is `argmax(logits / temperature + g)` with g standard
Gumbel. Here g is computed from (seed, position, token) alone. All nodes of a draft tree at one
depth share their noise, and so does plain decoding at that position: only one path comes true, so
every token is still an exact sample, and speculative output equals plain output token for token.

Filters cut the distribution before: top-k, then top-p of what is left, then min-p. They too are a
function of the row alone. Tokens rank by logit, the lower id first among equals, so a cut through
equals has one answer; probabilities are summed as integers, so the order of summation has no say.
Source of the order: huggingface/transformers generation/logits_process.py. Differs: its top-k keeps
all equals of the last, its top-p leaves the order of equals to the sort.

The generator is SplitMix64: stream number (seed, position), word number token. Its words are
integers and equal on every device; g follows in float64, where `log` may differ in its last bit.
Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants
of Stafford's mix 13. Differs: a stream starts at a hash of its number instead of a split.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import RequestError, ShapeError
from engine.kernels.operands import NO_TOKEN

GREEDY_BELOW = 1e-5  # temperatures under this choose the most likely token
SEED_LIMIT = 2**63  # seeds are int64 on the device


def check_integer(
    name: str, value: object, *, least: int, most: int | None = None, reason: str
) -> None:
    """Refuse what is no `int` (a bool is none) or lies outside least..most: `RequestError`."""
    if type(value) is int and least <= value and (most is None or value <= most):
        return
    bounds = f">= {least}" if most is None else f"in {least}..{most}"
    raise RequestError(f"{name}: expected an integer {bounds}, got {value!r} ({reason})")


def check_seed(seed: object) -> None:
    """Refuse a seed that is no integer or does not fit into int64 with a `RequestError`."""
    check_integer(
        "seed", seed, least=-SEED_LIMIT, most=SEED_LIMIT - 1, reason="an int64 hashed on the device"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from the target's logits; checked when made.

    A token may be chosen if it passes all filters. The most likely one always does.

    Raises
    ------
    RequestError
        A parameter is no number or outside its range.
    """

    temperature: float = 0.0  # below `GREEDY_BELOW` the most likely token is chosen
    top_k: int | None = None  # how many of the most likely tokens stay; None = all
    top_p: float = 1.0  # the most likely tokens stay until they hold this share of probability
    min_p: float = 0.0  # tokens stay that are this likely, relative to the most likely one

    def __post_init__(self) -> None:
        if not (_is_number(self.temperature) and 0.0 <= self.temperature <= sys.float_info.max):
            raise RequestError(
                f"temperature: expected a finite number >= 0, got {self.temperature!r} (0 = greedy)"
            )
        if self.top_k is not None:
            check_integer("top_k", self.top_k, least=1, reason="tokens that stay; None = all")
        if not (_is_number(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise RequestError(
                f"top_p: expected a number in (0, 1], got {self.top_p!r} (1 = no filter)"
            )
        if not (_is_number(self.min_p) and 0.0 <= self.min_p <= 1.0):
            raise RequestError(
                f"min_p: expected a number in [0, 1], got {self.min_p!r} (0 = no filter)"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether no randomness is left."""
        return self.temperature < GREEDY_BELOW


GREEDY = Sampling()


def choose_tokens(
    logits: Tensor, positions: Tensor, seeds: Tensor | int, sampling: Sampling
) -> Tensor:
    """Choose one token from each row of `logits`.

    Parameters
    ----------
    logits : [..., V] floating point
    positions : [...] integer, broadcast to the rows
        Absolute position of each row's token. Callers that must agree must count alike.
    seeds : [...] int64, broadcast to the rows, or an int
        Seed of each row's sequence.
    sampling : Sampling
        Greedy takes the lowest id among equal maxima.

    Returns
    -------
    Tensor
        `[...] int64`, on the device of `logits`.

    Raises
    ------
    RequestError
        An int seed exceeds int64.
    ShapeError
        The positions or seeds do not fit; a row holds NaN or +inf, or nothing but -inf (found by
        one read back to the host).

    Complexity
    ----------
    With `top_k` nothing of the vocabulary's size is sorted or hashed; `top_p` alone sorts rows.
    """
    tokens = tokens_or_none(logits, positions, seeds, sampling)
    check_chosen(tokens.flatten().tolist())
    return tokens


def tokens_or_none(
    logits: Tensor, positions: Tensor, seeds: Tensor | int, sampling: Sampling
) -> Tensor:
    """Choose as `choose_tokens` does, without a wait: `NO_TOKEN` where a row is no distribution.

    Whoever reads the tokens back checks them with `check_chosen`.
    """
    best = logits.max(-1)  # the first of equal maxima, NaN before all
    is_sound, tokens = best.values.isfinite(), best.indices
    if not sampling.is_greedy:
        logits = torch.where(is_sound.unsqueeze(-1), logits, 0.0)  # ids of NaN may be anything
        ids, scores = _candidates(logits, sampling)
        noise = gumbel_noise(positions, seeds, ids, logits.shape[:-1])
        winners = noise.add_(scores).argmax(-1, keepdim=True)
        tokens = ids.expand_as(scores).gather(-1, winners).squeeze(-1)
    return tokens.masked_fill(~is_sound, NO_TOKEN)


def check_chosen(token_ids: Iterable[int]) -> None:
    """Refuse tokens of `tokens_or_none` among which a row gave none: `ShapeError`."""
    if NO_TOKEN in token_ids:
        raise ShapeError(
            "logits: expected a finite maximum in each row, got NaN or an infinity "
            "(no distribution to choose from)"
        )


def gumbel_noise(
    positions: Tensor, seeds: Tensor | int, token_ids: Tensor, rows: torch.Size
) -> Tensor:
    """Return standard Gumbel noise, a function of (seed, position, token) only.

    Parameters
    ----------
    positions, seeds
        As in `choose_tokens`.
    token_ids : [..., K] int64, broadcast to the rows
    rows : the shape of the logits without the vocabulary

    Returns
    -------
    Tensor
        `[*rows, K] float64` on the device of `token_ids`, finite.
    """
    if isinstance(seeds, int):
        check_seed(seeds)
    device = token_ids.device
    seeded = _mix(_rows(seeds, "seeds", rows, device) + _GAMMA)
    streams = _mix(seeded + _rows(positions, "positions", rows, device))
    words = _mix(streams.unsqueeze(-1) + (token_ids + 1) * _GAMMA)
    return _uniform(words).log_().neg_().log_().neg_()


def chosen_log_probs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log-probs the model itself gives to the chosen tokens, before any temperature.

    Parameters
    ----------
    logits : [..., V] floating point
    token_ids : [...] int64

    Returns
    -------
    Tensor
        `[...]`, float64 for float64 logits and float32 for all others.

    Raises
    ------
    ShapeError
        `token_ids` has not one token for each row.
    """
    if token_ids.shape != logits.shape[:-1]:
        raise ShapeError(
            f"token_ids: expected {list(logits.shape[:-1])}, got {list(token_ids.shape)} "
            "(one chosen token for each row)"
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    chosen = wide.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - wide.logsumexp(-1)


def _candidates(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the ids that may be chosen, [V] or [..., K], and their scores, [..., K] float64.

    A score is the logit under the row's best over the temperature; -inf if the token is filtered.
    """
    ids = torch.arange(logits.shape[-1], device=logits.device)
    if sampling.top_k is not None and sampling.top_k < len(ids):
        ids = _top_ids(logits, sampling.top_k)
        logits = logits.gather(-1, ids)
    if sampling.top_p < 1.0:
        # Adding zero turns -0.0 into 0.0: some sorts compare bits.
        logits, order = (logits + 0.0).sort(dim=-1, descending=True, stable=True)
        ids = ids.expand_as(order).gather(-1, order)
    # Devices divide by a number differently, but multiply alike.
    scores = (logits.double() - logits.amax(-1, keepdim=True)) * (1.0 / sampling.temperature)
    if sampling.top_p < 1.0:
        scores.masked_fill_(~_nucleus(scores, sampling.top_p), -math.inf)
    if sampling.min_p > 0.0:
        scores.masked_fill_(scores < math.log(sampling.min_p), -math.inf)
    return ids, scores


def _top_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest of each row, ascending; the lowest among equals."""
    values, ids = logits.topk(count)  # which of the tokens that equal the last is undefined
    last = values[..., -1:]
    tokens = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    equals = torch.where(logits == last, tokens, logits.shape[-1]).topk(count, largest=False).values
    num_above = (values > last).sum(-1, keepdim=True)
    place = torch.arange(count, device=logits.device) - num_above  # among the equals
    ids = torch.where(place < 0, ids, equals.long().gather(-1, place.clamp(min=0)))
    return ids.sort(-1).values


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Return which of the descending scores stay: the tokens before hold less than `top_p`."""
    weights = (scores.exp() * _WEIGHT_OF_BEST).round().long()
    sums = weights.cumsum(-1)
    return (sums - weights).double() < top_p * sums[..., -1:].double()


_WEIGHT_OF_BEST = 2.0**40  # sums fit int64 for vocabularies below 2**23
_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # 2**64 over the golden ratio, odd, as int64
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _mix(words: Tensor) -> Tensor:
    # Into fresh tensors only; int64 products wrap.
    words = _shift_right(words, 30).bitwise_xor_(words).mul_(_MIX_1)
    words = _shift_right(words, 27).bitwise_xor_(words).mul_(_MIX_2)
    return _shift_right(words, 31).bitwise_xor_(words)


def _uniform(words: Tensor) -> Tensor:
    # The upper 52 bits and a half: every value is exact and strictly between 0 and 1.
    return _shift_right(words, 12).double().add_(0.5).mul_(2.0**-52)


def _shift_right(words: Tensor, count: int) -> Tensor:
    return (words >> count).bitwise_and_((1 << (64 - count)) - 1)  # int64 shifts copy the sign


def _rows(values: Tensor | int, name: str, shape: torch.Size, device: torch.device) -> Tensor:
    rows = torch.as_tensor(values, device=device)
    if rows.dtype not in _INTEGERS:
        raise ShapeError(f"{name}: expected integers, got {rows.dtype} (hashed bit by bit)")
    try:
        return rows.long().broadcast_to(shape)
    except RuntimeError as error:
        raise ShapeError(
            f"{name}: expected {list(shape)}, got {list(rows.shape)} (one for each row)"
        ) from error
