"""Trials of commits against each other: pairs in turns until a plan decides, and a search by them.

Knows nothing of asv or git: a machine is whatever measures cases of a commit.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dashboard.asv_errors import AsvFailedError
from db.cases import Verdict
from db.sequential import decide, is_beyond, is_short_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from db.sequential import Decision, Plan


class Machine(Protocol):
    """Something that measures."""

    def measure(self, commit: str, patterns: Sequence[str]) -> dict[str, float]:
        """Give seconds by case."""


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
    """Times of two commits, case by case, pair by pair."""

    def __init__(self, machine: Machine, base: str, head: str) -> None:
        self._machine, self._sides = machine, (base, head)
        self._done = 0
        self.times: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def until(self, num_pairs: int, patterns: Sequence[str]) -> None:
        """Measure on, each side first in every other pair, so that a drift favours neither."""
        for number in range(self._done, num_pairs):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                for case, seconds in self._machine.measure(self._sides[side], patterns).items():
                    self.times[case][side].append(seconds)
        self._done = num_pairs
        uneven = [case for case, (base, head) in self.times.items() if len(base) != len(head)]
        if uneven or not self.times:
            raise AsvFailedError(
                f"pairs: expected a time of both commits, got none of {', '.join(uneven) or 'any'} "
                "(a case failed, or only one side has it)"
            )


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
    pairs = Pairs(machine, *commits)
    found: dict[str, Decision] = {}
    still = list(patterns)
    for look in plan.looks:
        pairs.until(look, still)
        for case, (base, head) in pairs.times.items():
            if case not in found or found[case].is_open:
                found[case] = decide(base, head, plan)
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
    until its level is surely nearer to one end.
    """
    good = commits[0]
    ends = confirm(machine, (good, commits[-1]), patterns, plan, tell)
    called = (Verdict.REGRESSION, Verdict.IMPROVEMENT)
    changed = {case: one for case, one in ends.items() if one.verdict in called}
    if not changed:
        return None
    case = max(changed, key=lambda name: abs(math.log1p(changed[name].relative_change)))
    change = changed[case]
    half = math.log1p(change.relative_change) / 2.0
    last_good, first_bad = 0, len(commits) - 1
    while first_bad - last_good > 1:
        middle = (last_good + first_bad) // 2
        is_bad = _is_bad(machine, (good, commits[middle]), case, half, plan)
        if is_bad is None:
            break
        tell(f"{commits[middle][:12]}: {'changed' if is_bad else 'as before'}")
        last_good, first_bad = (last_good, middle) if is_bad else (middle, first_bad)
    between = first_bad - last_good - 1
    return Found(case, change, commits[last_good], commits[first_bad], between)


def _is_bad(
    machine: Machine, commits: tuple[str, str], case: str, half: float, plan: Plan
) -> bool | None:
    """Say on which side of half the change a commit lies; None where no look tells."""
    pairs = Pairs(machine, *commits)
    for look in plan.looks:
        pairs.until(look, [exactly(case)])
        base, head = pairs.times[case]
        if is_beyond(base, head, half, plan):
            return True
        if is_short_of(base, head, half, plan):
            return False
    return None
