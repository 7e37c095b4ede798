"""The ladder: what each factor between the slow and the fast kernel is worth, and where.

A ladder runs the same work with one factor changed at a time. Each factor is read at three places:
in a fixed order from the slow end, alone at the slow end, and removed at the fast end; its worth
depends on where it stands. Cases are named by the factors that are on: `none`, `read_once+split`.
All cases of a ladder are measured in turns, so they are compared round by round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from db.case_groups import grouped
from db.evidence import LadderReading, Place
from db.ratios import POLICY, judged, ratio_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from db.evidence import EvidencePoint

    Variant = frozenset[str]

PREFIX: Final = "ladder."  # of the benchmarks that are ladders
VARIANT: Final = "variant"
PAGE_FACTOR: Final = "page_64"
FACTORS: Final = ("read_once", "split", "packed", PAGE_FACTOR, "in_order")  # the fixed order
SLOW_END: Final = frozenset[str]()
FAST_END: Final = frozenset(FACTORS)
MARGIN: Final = 1.0 + POLICY.relevance_rel


@dataclass(frozen=True, slots=True)
class Ladder:
    """The cases of one ladder at one context, by the factors that are on."""

    label: str
    rungs: Mapping[Variant, EvidencePoint]

    @property
    def context_tokens(self) -> int | None:
        """Committed rows that every rung attends."""
        return next(iter(self.rungs.values())).context_tokens


def is_rung(point: EvidencePoint) -> bool:
    """Whether a case is part of a ladder, slow on purpose."""
    return point.benchmark.startswith(PREFIX) and variant_of(point) is not None


def ladders(points: Sequence[EvidencePoint]) -> list[Ladder]:
    """Give every ladder that was climbed, the shortest context first."""
    found = []
    rungs = [point for point in points if is_rung(point)]
    for label, group in grouped(rungs, lambda name: name == VARIANT).items():
        by_variant = {variant_of(point) or SLOW_END: point for point in group}
        found.append(Ladder(label, by_variant))
    return sorted(found, key=lambda ladder: ladder.context_tokens or 0)


def ladder_readings(points: Sequence[EvidencePoint]) -> tuple[LadderReading, ...]:
    """Read every factor at its three places, as far as measured, and judge all of them."""
    found = [reading for ladder in ladders(points) for reading in _readings(ladder)]
    ratios = judged([reading.ratio for reading in found], MARGIN)
    return tuple(
        replace(reading, ratio=ratio) for reading, ratio in zip(found, ratios, strict=True)
    )


def page_size_readings(points: Sequence[EvidencePoint]) -> list[LadderReading]:
    """Give the pairs of rungs that differ in their page size alone, but for the slow end.

    Nobody serves the walk that stands there, so what its pages cost is no cause of anything.
    """
    found = [reading for ladder in ladders(points) for reading in _readings(ladder)]
    return [
        reading
        for reading in found
        if reading.factor == PAGE_FACTOR and reading.place is not Place.ALONE
    ]


def variant_of(point: EvidencePoint) -> Variant | None:
    """Give the factors that are on in a case; None where its name is not one of a ladder."""
    name = point.settings.get(VARIANT, "").strip("'\"")
    factors = [] if name == "none" else name.split("+")
    in_order = [factor for factor in FACTORS if factor in factors]
    return frozenset(factors) if factors == in_order else None


def _readings(ladder: Ladder) -> list[LadderReading]:
    found = []
    for index, factor in enumerate(FACTORS):
        below = frozenset(FACTORS[:index])
        pairs = {
            Place.IN_ORDER: (below, below | {factor}),
            Place.ALONE: (SLOW_END, SLOW_END | {factor}),
            Place.REMOVED: (FAST_END - {factor}, FAST_END),
        }
        for place, (without, with_factor) in pairs.items():
            before, after = ladder.rungs.get(without), ladder.rungs.get(with_factor)
            if before is not None and after is not None:
                ratio = ratio_of(before, after, MARGIN)
                found.append(LadderReading(ladder.label, factor, place, before, after, ratio))
    return found
