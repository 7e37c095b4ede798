"""What a runner, its environment or its clocks explain of a series, so that the rest is code.

Each effect is a curve of the same length as the series, in logs, subtracted before levels are
searched. An identity (a runner, an environment) keeps one offset however often it returns, so a
returning environment resumes its level and what a commit changed meanwhile stays visible.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from db.partition import median

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from db.partition import Logs

NEIGHBOURS = 5  # results on each side of a switch that its jump is read from
FEW_SWITCHES = 2  # up to here the first jump defines an offset, beyond it the median of all
CLOCK_MOVE = 0.005  # of the log: a clock that moved less has not moved
CLOCK_SLOPES = np.linspace(-1.0, 1.0, 9)  # time over clock: -1 bound by it, 0 indifferent
CLOCK_EXPLAINS = 0.5  # share of the jumps at clock moves that a clock must take away


def switches(identities: Sequence[Hashable]) -> list[int]:
    """List the indices at which the identity is another one than before."""
    return [i for i in range(1, len(identities)) if identities[i] != identities[i - 1]]


def identity_effect(logs: Logs, identities: Sequence[Hashable]) -> Logs:
    """Estimate the offset of each identity from the jumps where it takes over."""
    edges = [0, *switches(identities), len(identities)]
    jumps: dict[tuple[Hashable, Hashable], list[float]] = defaultdict(list)
    for start, index, end in zip(edges, edges[1:], edges[2:], strict=False):
        before = logs[max(start, index - NEIGHBOURS) : index]
        after = logs[index : min(end, index + NEIGHBOURS)]
        jump = median(after) - median(before)
        jumps[identities[index - 1], identities[index]].append(jump)
        jumps[identities[index], identities[index - 1]].append(-jump)
    offsets: dict[Hashable, float] = {identities[0]: 0.0}
    for index in edges[1:-1]:
        pair = identities[index - 1], identities[index]
        offsets.setdefault(pair[1], offsets[pair[0]] + _usual(jumps[pair]))
    return np.asarray([offsets[identity] for identity in identities])


def _usual(jumps: list[float]) -> float:
    """Trust the first of few jumps: at a later one a commit may have changed the level too."""
    if len(jumps) <= FEW_SWITCHES:
        return jumps[0]
    return median(np.asarray(jumps))


def clock_effect(logs: Logs, clock: Logs) -> Logs | None:
    """Estimate how the series follows a clock; None where it does not.

    Only the jumps at moves of the clock count, and the slope is the one that leaves least of
    them. A slope of -1 is time bound by the clock, +1 a rate bound by it.
    """
    moves = np.diff(clock)
    moved = np.abs(moves) >= CLOCK_MOVE
    if not moved.any():
        return None
    jumps = np.diff(logs)[moved]
    left = np.abs(jumps[None, :] - CLOCK_SLOPES[:, None] * moves[moved]).sum(axis=1)
    best = int(left.argmin())
    if left[best] > (1.0 - CLOCK_EXPLAINS) * np.abs(jumps).sum():
        return None
    effect: Logs = CLOCK_SLOPES[best] * (clock - np.median(clock))
    return effect
