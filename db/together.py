"""Cases that moved together: a machine whose every case moved by one ratio is the cause itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    orders: tuple[int, ...]  # place of each result's commit among all commits of the machine
    points: tuple[ChangePoint, ...]


def name_hardware(cases: Sequence[Moved]) -> list[list[ChangePoint]]:
    """Give each case's change points, those of a whole machine called `hardware`."""
    by_machine: dict[int, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        by_machine[case.machine_id].append(index)
    named = [list(case.points) for case in cases]
    for members in by_machine.values():
        for order in sorted(
            {_order(cases[i], point) for i in members for point in cases[i].points}
        ):
            together = _event(cases, members, order)
            for index, place in together:
                named[index][place] = replace(named[index][place], cause="hardware")
    return named


def _order(case: Moved, point: ChangePoint) -> int:
    return case.orders[point.index]


def _event(cases: Sequence[Moved], members: Sequence[int], order: int) -> list[tuple[int, int]]:
    """Give the change points at a commit if they are of all the machine's cases and alike."""
    watched = [i for i in members if _could_tell(cases[i], order)]
    found = [
        (index, place)
        for index in watched
        for place, point in enumerate(cases[index].points)
        if abs(_order(cases[index], point) - order) <= NEAR and point.cause in OWN
    ]
    shifts = np.log1p([cases[i].points[place].relative_change for i, place in found])
    if not watched or len({index for index, _ in found}) < LEAST_SHARE * len(watched):
        return []
    if len({cases[index].benchmark for index, _ in found}) < LEAST_BENCHMARKS:
        return []
    usual = float(np.median(shifts))
    is_alike = np.abs(shifts - usual) <= ALIKE * abs(usual)
    return found if float(is_alike.mean()) >= LEAST_SHARE else []


def _could_tell(case: Moved, order: int) -> bool:
    """Whether a case has a level on both sides of a commit."""
    after = sum(1 for one in case.orders if one >= order)
    return min(after, len(case.orders) - after) >= 3  # results of a level
