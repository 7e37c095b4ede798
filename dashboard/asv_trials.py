"""Trials of commits against each other: pairs in turns until a plan decides, and a search by them.

Knows nothing of asv or git: a machine is whatever measures cases of a commit.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from dashboard.asv_errors import AsvFailedError
from db.cases import Verdict
from db.sequential import LEAST_PAIRS, Levels, decide

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from db.sequential import Decision, Plan


class Machine(Protocol):
    """Something that measures."""

    def ratios(
        self, commits: tuple[str, str], patterns: Sequence[str], *, is_swapped: bool
    ) -> dict[str, float]:
        """Measure a pair, the second commit first if swapped; give its seconds over the first's."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a search ended."""

    case: str
    change: Decision  # of the bad end against the good one
    good: str  # newest commit known to be good
    bad: str  # oldest commit known to be bad: the culprit where nothing lies between
    between: int  # commits that nobody could tell

    @property
    def is_decided(self) -> bool:
        """Whether one commit is left."""
        return self.between == 0


class Pairs:
    """Ratios of two commits, case by case, pair by pair."""

    def __init__(self, machine: Machine, base: str, head: str) -> None:
        self._machine, self._commits = machine, (base, head)
        self._done = 0
        self.ratios: dict[str, list[float]] = defaultdict(list)

    def until(self, num_pairs: int, patterns: Sequence[str]) -> None:
        """Measure on, each side first in every other pair, so that a drift favours neither."""
        for number in range(self._done, num_pairs):
            is_swapped = number % 2 == 1
            found = self._machine.ratios(self._commits, patterns, is_swapped=is_swapped)
            for case, ratio in found.items():
                self.ratios[case].append(ratio)
            if not found:
                raise AsvFailedError("pairs: expected a time of both commits, got no case at all")
        self._done = num_pairs


def exactly(case: str) -> str:
    """Give asv's pattern for one case and no other."""
    return f"^{re.escape(case)}$"


def confirm(
    machine: Machine,
    commits: tuple[str, str],
    patterns: Sequence[str],
    plan: Plan,
    tell: Callable[[str], None],
) -> dict[str, Decision]:
    """Decide each case that the patterns select; a case that is decided is not measured again."""
    return _decided(Pairs(machine, *commits), patterns, plan, tell)


def _decided(
    pairs: Pairs, patterns: Sequence[str], plan: Plan, tell: Callable[[str], None]
) -> dict[str, Decision]:
    found: dict[str, Decision] = {}
    still = list(patterns)
    for look in plan.looks:
        pairs.until(look, still)
        shared = replace(plan, num_cases=len(pairs.ratios))
        for case, ratios in pairs.ratios.items():
            if case not in found or found[case].is_open:
                found[case] = decide(ratios, shared)
        waiting = [case for case, decision in found.items() if decision.is_open]
        tell(f"{look} pairs: {len(found) - len(waiting)} of {len(found)} decided")
        if not waiting:
            break
        still = [exactly(case) for case in waiting]
    return found


def bisect(
    machine: Machine,
    commits: Sequence[str],
    patterns: Sequence[str],
    plan: Plan,
    tell: Callable[[str], None],
) -> Found | None:
    """Find the commit at which the case that changed most did; None if none did.

    `commits` stand oldest first, and the first is good. Each is tried against it in fresh pairs,
    until it is told at which end's level it lies. The error of the plan is that of the whole
    search once the ends differ, shared evenly by the commits it may try.
    """
    pairs = Pairs(machine, commits[0], commits[-1])
    ends = _decided(pairs, patterns, plan, tell)
    called = (Verdict.REGRESSION, Verdict.IMPROVEMENT)
    changed = {case: one for case, one in ends.items() if one.verdict in called}
    if not changed:
        return None
    case = max(changed, key=lambda name: abs(math.log1p(changed[name].relative_change)))
    levels = Levels([math.log(ratio) for ratio in pairs.ratios[case]])
    last_good, first_bad = 0, len(commits) - 1
    error = plan.alpha / max(1, (first_bad - 1).bit_length())
    while first_bad - last_good > 1:
        middle = (last_good + first_bad) // 2
        trial = Pairs(machine, commits[0], commits[middle])
        is_bad = _told(trial, case, levels, error, plan.most_pairs)
        if is_bad is None:
            break
        tell(f"{commits[middle][:12]}: {'changed' if is_bad else 'as before'}")
        last_good, first_bad = (last_good, middle) if is_bad else (middle, first_bad)
    between = first_bad - last_good - 1
    return Found(case, changed[case], commits[last_good], commits[first_bad], between)


def _told(trial: Pairs, case: str, levels: Levels, error: float, most_pairs: int) -> bool | None:
    """Say whether a commit is changed; None where no number of pairs tells."""
    for count in range(LEAST_PAIRS, most_pairs + 1):
        trial.until(count, [exactly(case)])
        is_bad = levels.tell(trial.ratios[case], error)
        if is_bad is not None:
            return is_bad
    return None
