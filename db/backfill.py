"""Which commit of a range to measure next: the one that tells most about what is not known."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

DIFFERENCE_WEIGHT: Final = 100.0  # a percent between two ends is worth as much as their distance


def next_commit(
    num_commits: int, known: Mapping[int, Mapping[str, float]], closed: Collection[int] = ()
) -> int | None:
    """Give the place of a commit, oldest 0; None once nothing is left.

    First the ends, the newest before the oldest. Then the middle of the stretch that is longest,
    weighed by how far its ends differ in the case that differs most: there a change must lie.

    Parameters
    ----------
    known : values by case of every commit that is measured
    closed : places that cannot be measured
    """
    settled = {*known, *closed}
    for end in (num_commits - 1, 0):
        if num_commits and end not in settled:
            return end
    gaps = [(low, high) for low, high in pairwise(sorted(settled)) if high - low > 1]
    if not gaps:
        return None
    low, high = max(gaps, key=lambda gap: (_weight(known, *gap), gap[0]))
    return (low + high) // 2


def _weight(known: Mapping[int, Mapping[str, float]], low: int, high: int) -> float:
    before, after = known.get(low, {}), known.get(high, {})
    differences = [
        abs(math.log(after[case] / before[case]))
        for case in before.keys() & after.keys()
        if before[case] > 0.0 and after[case] > 0.0
    ]
    return (high - low) * (1.0 + DIFFERENCE_WEIGHT * max(differences, default=0.0))
