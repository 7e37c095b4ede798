"""Choosing tokens: greedy, or by Gumbel noise that is a function of its place, not of its turn.

A sample of `softmax(logits / temperature)` is `argmax(logits / temperature + g)` with g standard
Gumbel. Here g is computed from (seed, position, token) alone. All nodes of a draft tree at one
depth share their noise, and so does plain decoding at that position: only one path comes true, so
every token is still an exact sample, and speculative output equals plain output token for token.

The generator is SplitMix64: stream number (seed, position), word number token. Its words are
integers and equal on every device; g follows in float64, where `log` may differ in its last bit.
Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants
of Stafford's mix 13. Differs: a stream starts at a hash of its number instead of a split.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import RequestError, ShapeError

GREEDY_BELOW = 1e-5  # temperatures under this choose the most likely token
SEED_LIMIT = 2**63  # seeds are int64 on the device


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from the target's logits; checked when made.

    Raises
    ------
    RequestError
        The temperature is negative or not finite.
    """

    temperature: float = 0.0  # below `GREEDY_BELOW` the most likely token is chosen

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise RequestError(
                f"temperature: expected a finite number >= 0, got {self.temperature!r} (0 = greedy)"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether no randomness is left."""
        return self.temperature < GREEDY_BELOW


GREEDY = Sampling()


def check_seed(seed: int) -> None:
    """Refuse a seed that does not fit into int64 with a `RequestError`."""
    if not -SEED_LIMIT <= seed < SEED_LIMIT:
        raise RequestError(f"seed: expected an int64, got {seed} (hashed on the device)")


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
    """
    scores = logits
    if not sampling.is_greedy:
        noise = gumbel_noise(positions, seeds, logits.shape, device=logits.device)
        scores = noise.add_(logits.double() / sampling.temperature)
    best = scores.max(-1)  # the first of equal maxima, NaN before all
    if not bool(best.values.isfinite().all()):
        raise ShapeError(
            "logits: expected a finite maximum in each row, got NaN or an infinity "
            "(no distribution to choose from)"
        )
    return best.indices


def gumbel_noise(
    positions: Tensor, seeds: Tensor | int, shape: torch.Size, *, device: torch.device
) -> Tensor:
    """Return standard Gumbel noise, a function of (seed, position, token) only.

    Parameters
    ----------
    positions, seeds
        As in `choose_tokens`.
    shape : the shape of the logits, `[..., V]`

    Returns
    -------
    Tensor
        `[..., V] float64` on `device`, finite.
    """
    if isinstance(seeds, int):
        check_seed(seeds)
    seeded = _mix(_rows(seeds, "seeds", shape, device) + _GAMMA)
    streams = _mix(seeded + _rows(positions, "positions", shape, device))
    tokens = torch.arange(1, shape[-1] + 1, device=device)
    words = _mix(streams.unsqueeze(-1) + tokens * _GAMMA)
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


_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # 2**64 over the golden ratio, odd, as int64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * _MIX_1  # int64 products wrap
    words = (words ^ _shift_right(words, 27)) * _MIX_2
    return words ^ _shift_right(words, 31)


def _uniform(words: Tensor) -> Tensor:
    # The upper 52 bits and a half: every value is exact and strictly between 0 and 1.
    return _shift_right(words, 12).double().add_(0.5).mul_(2.0**-52)


def _shift_right(words: Tensor, count: int) -> Tensor:
    return (words >> count) & ((1 << (64 - count)) - 1)  # int64 shifts copy the sign


def _rows(values: Tensor | int, name: str, shape: torch.Size, device: torch.device) -> Tensor:
    rows = torch.as_tensor(values, device=device)
    if rows.is_floating_point():
        raise ShapeError(f"{name}: expected integers, got {rows.dtype} (hashed bit by bit)")
    try:
        return rows.long().broadcast_to(shape[:-1])
    except RuntimeError as error:
        raise ShapeError(
            f"{name}: expected {list(shape[:-1])}, got {list(rows.shape)} (one for each row)"
        ) from error
