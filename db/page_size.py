"""Whether the page size matters, tested on every pair of cases that differ in it alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Final

from db.case_groups import grouped
from db.evidence import Claim, Outcome, Status
from db.ladder import page_size_readings
from db.numbers import count_text, digits
from db.ratios import judged, ratio_of, with_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from db.evidence import EvidencePoint, Ratio

PAGE_NAME: Final = "page_size"
PAGE_SIZE_MATTERS: Final = 1.1  # times, above the few percent that kernels of peers lose to it
UNIT: Final = "times, the slower over the faster page size"


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Two cases that differ in their page size alone."""

    shared: str  # the benchmark and every other parameter
    sizes: str  # the slower over the faster: "page 1 over page 64"
    slow: EvidencePoint
    fast: EvidencePoint
    ratio: Ratio
    is_of_ladder: bool = False  # kernels made to differ, which nobody serves

    @property
    def evidence(self) -> str:
        """The two times, and what their comparison rests on."""
        times = f"{_ms(self.slow)} against {_ms(self.fast)}, all else equal"
        return f"{self.shared}: {self.sizes}, {times}, by {self.ratio.ground}"


def page_size_claim(slow: Sequence[EvidencePoint], points: Sequence[EvidencePoint]) -> Claim | None:
    """Say what page size is worth, or that nothing here tells; nothing where nothing is slow."""
    if not any(point.kv_bytes for point in slow):
        return None
    found = _comparisons(points)
    return _tested(found) if found else _untested(points)


def _tested(found: Sequence[_Comparison]) -> Claim:
    """Sum up: one pair beyond the margin is enough to matter, all within it not to."""
    counts = Counter(one.ratio.outcome for one in found)
    matters, nothing = counts[Outcome.MATTERS], counts[Outcome.NO_MATTER]
    beyond = [one for one in found if one.ratio.outcome is Outcome.MATTERS]
    told = max(beyond or found, key=_distance)
    worth = f"{with_interval(told.ratio)} times, {told.sizes}"
    total = count_text(len(found), "comparison")
    tally = f"{matters} of {total} beyond {PAGE_SIZE_MATTERS} times, {nothing} within"
    if matters:
        statement, status = f"page_size matters: it is worth {worth}", Status.SUPPORTED
    elif nothing == len(found):
        statement = f"page_size is not the cause: it is worth at most {worth}"
        status = Status.SUPPORTED
    else:
        statement = f"page_size as the cause: inconclusive, the largest difference is {worth}"
        status = Status.UNTESTED
    return Claim(
        name="page_size",
        statement=statement,
        value=told.ratio.value,
        unit=UNIT,
        evidence=f"{told.evidence}{_q(told.ratio)}; {tally}",
        status=status,
        is_alarm=any(not one.is_of_ladder for one in beyond),
    )


def _untested(points: Sequence[EvidencePoint]) -> Claim:
    sizes = {point.settings[PAGE_NAME] for point in points if PAGE_NAME in point.settings}
    measured = f"page_size {', '.join(sorted(sizes))}" if sizes else "no page_size"
    how = "a single page size was measured" if len(sizes) == 1 else "it was not varied alone"
    return Claim(
        name="page_size",
        statement=f"page_size as the cause: untested here, {how}",
        value=float(len(sizes)),
        unit="page sizes measured",
        evidence=f"{measured} recorded over {count_text(len(points), 'case')}",
        status=Status.UNTESTED,
    )


def _comparisons(points: Sequence[EvidencePoint]) -> list[_Comparison]:
    """Compare every two page sizes of every group, and the rungs of a ladder that differ in it."""
    found = []
    for shared, group in grouped(points, lambda name: name == PAGE_NAME).items():
        sized = [point for point in group if PAGE_NAME in point.settings]
        for pair in combinations(sized, 2):
            slow, fast = sorted(pair, key=_time, reverse=True)
            sizes = f"page {slow.settings[PAGE_NAME]} over page {fast.settings[PAGE_NAME]}"
            ratio = ratio_of(slow, fast, PAGE_SIZE_MATTERS)
            found.append(_Comparison(shared, sizes, slow, fast, ratio))
    for one in page_size_readings(points):
        slow, fast = sorted((one.before, one.after), key=_time, reverse=True)
        sizes = "page 1 over page 64" if slow is one.before else "page 64 over page 1"
        ratio = ratio_of(slow, fast, PAGE_SIZE_MATTERS)
        found.append(
            _Comparison(one.ladder, f"{sizes}, {one.place}", slow, fast, ratio, is_of_ladder=True)
        )
    ratios = judged([one.ratio for one in found], PAGE_SIZE_MATTERS)
    return [replace(one, ratio=ratio) for one, ratio in zip(found, ratios, strict=True)]


def _distance(one: _Comparison) -> float:
    return abs(math.log(one.ratio.value))


def _q(ratio: Ratio) -> str:
    return "" if ratio.q_value is None else f", q = {ratio.q_value:.2g}"


def _time(point: EvidencePoint) -> float:
    return point.time_s


def _ms(point: EvidencePoint) -> str:
    return f"{digits(point.time_s * 1e3, 4)} ms"
