"""Findings of a comparison: flagged cases of a machine that moved together are one of them."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from db.cases import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from db.cases import CaseComparison, Comparison
    from db.change_points import Cause

ALIKE: Final = 1.5  # times the least log change of a finding, that its largest may be
LEAST_BENCHMARKS: Final = 3  # pieces of code that no single commit touches alike
JUDGED: Final = frozenset(
    {Verdict.REGRESSION, Verdict.IMPROVEMENT, Verdict.NO_CHANGE, Verdict.INCONCLUSIVE}
)


@dataclass(frozen=True, slots=True)
class MovedCases:
    """Cases that moved one way by about one ratio, and what is the likely cause class."""

    machine: str
    verdict: str
    cause: Cause
    relative_change: float  # the median's
    cases: tuple[str, ...]  # the largest change first

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        return {**asdict(self), "cases": list(self.cases)}


def findings(comparison: Comparison) -> list[MovedCases]:
    """Group the flagged cases, the largest group first."""
    flagged: dict[tuple[str, Verdict, bool], list[CaseComparison]] = defaultdict(list)
    for case in comparison.cases:
        is_flagged = case.verdict in {Verdict.REGRESSION, Verdict.IMPROVEMENT}
        if is_flagged and case.relative_change is not None:
            rises = case.relative_change > 0.0
            flagged[case.key.machine, case.verdict, rises].append(case)
    found = [
        _finding(comparison, group) for members in flagged.values() for group in _alike(members)
    ]
    return sorted(found, key=lambda one: (-len(one.cases), -abs(one.relative_change), one.cases))


def _alike(members: Sequence[CaseComparison]) -> list[list[CaseComparison]]:
    """Cut cases of one direction into groups of about one ratio."""
    groups: list[list[CaseComparison]] = []
    for case in sorted(members, key=_size):
        if groups and _size(case) <= ALIKE * _size(groups[-1][0]):
            groups[-1].append(case)
        else:
            groups.append([case])
    return groups


def _finding(comparison: Comparison, group: Sequence[CaseComparison]) -> MovedCases:
    first = group[0]
    changes = [case.relative_change or 0.0 for case in group]
    return MovedCases(
        machine=first.key.machine,
        verdict=first.verdict.value,
        cause=_cause(comparison, group),
        relative_change=statistics.median(changes),
        cases=tuple(case.key.name for case in sorted(group, key=_size, reverse=True)),
    )


def _cause(comparison: Comparison, group: Sequence[CaseComparison]) -> Cause:
    """Take what was recorded to differ first; a machine of which everything moved is next."""
    if all(case.environment_differs for case in group):
        return "environment"
    machine = group[0].key.machine
    judged = [
        case for case in comparison.cases if case.key.machine == machine and case.verdict in JUDGED
    ]
    is_all = len(judged) == len(group)
    is_broad = len({case.key.benchmark for case in group}) >= LEAST_BENCHMARKS
    return "hardware" if is_all and is_broad else "code"


def _size(case: CaseComparison) -> float:
    return abs(math.log1p(case.relative_change or 0.0))
