"""Cases that moved together: a machine whose every case moved by one ratio is the cause itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from db.change_points import ChangePoint

LEAST_BENCHMARKS: Final = 3  # different pieces of code that no single commit touches alike
LEAST_SHARE: Final = 0.9  # of the machine's cases that could have shown it
NEAR: Final = 2  # commits between change points of one event
ALIKE: Final = 0.25  # of the usual change, that most changes lie from it at most
OWN: Final = frozenset({"code", "unknown"})  # causes that nothing else explains yet


@dataclass(frozen=True, slots=True)
class Moved:
    """What was found in one case of one machine."""

    machine_id: int
    benchmark: str
    orders: NDArray[np.int64]  # place of each result's commit among all commits
    points: tuple[ChangePoint, ...]


def suspects(points: Iterable[tuple[int, str, int, str]]) -> set[int]:
    """Give the machines that may have moved as a whole, so that the others need no closer look.

    `points` are the machine, benchmark, place and cause of each change point.
    """
    by_machine: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for machine_id, benchmark, place, cause in points:
        if cause in OWN:
            by_machine[machine_id].append((place, benchmark))
    return {machine_id for machine_id, found in by_machine.items() if _is_suspect(sorted(found))}


def _is_suspect(found: Sequence[tuple[int, str]]) -> bool:
    """Whether enough benchmarks moved close to each other; `found` is in order."""
    near: Counter[str] = Counter()
    start = 0
    for place, benchmark in found:
        near[benchmark] += 1
        while found[start][0] < place - 2 * NEAR:
            near -= Counter({found[start][1]: 1})
            start += 1
        if len(near) >= LEAST_BENCHMARKS:
            return True
    return False


def name_hardware(cases: Sequence[Moved]) -> list[list[ChangePoint]]:
    """Give each case's change points, those of a whole machine called `hardware`."""
    by_machine: dict[int, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        by_machine[case.machine_id].append(index)
    named = [list(case.points) for case in cases]
    for members in by_machine.values():
        by_order: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index in members:
            for place, point in enumerate(cases[index].points):
                by_order[_order(cases[index], point)].append((index, place))
        for order in sorted(by_order):
            around = range(order - NEAR, order + NEAR + 1)
            near = [one for other in around for one in by_order.get(other, ())]
            for index, place in _event(cases, members, near, order):
                named[index][place] = replace(named[index][place], cause="hardware")
    return named


def _order(case: Moved, point: ChangePoint) -> int:
    return int(case.orders[point.index])


def _event(
    cases: Sequence[Moved], members: Sequence[int], near: Sequence[tuple[int, int]], order: int
) -> list[tuple[int, int]]:
    """Give the change points near a commit if they are of all the machine's cases and alike."""
    found = [
        (index, place)
        for index, place in near
        if cases[index].points[place].cause in OWN and _could_tell(cases[index], order)
    ]
    if len({cases[index].benchmark for index, _ in found}) < LEAST_BENCHMARKS:
        return []
    watched = sum(_could_tell(cases[index], order) for index in members)
    if len({index for index, _ in found}) < LEAST_SHARE * watched:
        return []
    shifts = np.log1p([cases[i].points[place].relative_change for i, place in found])
    usual = float(np.median(shifts))
    is_alike = np.abs(shifts - usual) <= ALIKE * abs(usual)
    return found if float(is_alike.mean()) >= LEAST_SHARE else []


def _could_tell(case: Moved, order: int) -> bool:
    """Whether a case has a level on both sides of a commit."""
    after = int(np.count_nonzero(case.orders >= order))
    return min(after, len(case.orders) - after) >= 3  # results of a level
