"""The incident beside the run that repeated it: what each supports, what counters would have said.

One side was reported and not measured here, the other measured and not on that card. Every line
keeps the two apart and says of each how far it carries; a cause that was tested on one card is not
supported on the other by that.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from db.cases import jsonable
from db.diagnose import diagnose
from db.evidence import Outcome, Place, Status
from db.incident_counters import counter_lines
from db.incident_sides import Line, Side, fast_twin, measured_lines, walk_of
from db.ladder import FACTORS
from db.ladder_claims import AT_THE_SLOW_END
from db.numbers import digits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from db.evidence import Claim, Evidence, EvidencePoint, LadderReading

ORIGINAL: Final = "incident."  # of the benchmarks that were transcribed from the report
REPEATED: Final = "attention."  # of those that repeated its attention
LADDER: Final = "ladder."
NOT_VARIED: Final = "no factor was varied"
WHOLE_STEP: Final = "one layer's attention was repeated, not the step around it"


@dataclass(frozen=True, slots=True)
class KnownCause:
    """One claim with its status on either side."""

    what: str
    original: Status
    original_says: str
    repeated: Status
    repeated_says: str
    factor: str | None = None  # of a ladder, where it is the cause that was looked for
    worth: float | None = None  # in times, in the fixed order; None where nobody read it
    alone: float | None = None  # in times at the slow end, where it matters there
    is_cause: bool | None = None  # where the walk was repeated; None where that is undecided


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The incident and its reproduction; sources say where every number of a side stands."""

    sources: tuple[tuple[str, str], ...]
    measured: tuple[Line, ...]
    counters: tuple[Line, ...]
    known: tuple[KnownCause, ...]

    @property
    def summary(self) -> tuple[str, ...]:
        """Say what of the original is supported, consistent and untested, and what was tested."""
        by_status = {
            status: [one.what for one in self.known if one.original is status] for status in Status
        }
        said = [
            f"of the original, {status}: {'; '.join(names)}"
            for status, names in by_status.items()
            if names
        ]
        causes = [
            f"{one.what} ({digits(one.worth, 3)} times)" for one in self.known if one.is_cause
        ]
        others = [
            one.what + ("" if one.alone is None else f" ({digits(one.alone, 3)} times alone)")
            for one in self.known
            if one.is_cause is False
        ]
        tested = [
            f"{words} {', '.join(names)}"
            for words, names in (("a cause:", causes), ("none:", others))
            if names
        ]
        elsewhere = [f"tested where it was repeated, {'; '.join(tested)}"] if tested else []
        return tuple(f"{line[0].upper()}{line[1:]}." for line in (*said, *elsewhere))

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        plain: dict[str, Any] = jsonable(asdict(self))
        return {"summary": list(self.summary), **plain}


def side_by_side(
    original: Evidence, repeated: Iterable[Evidence], ladders: Iterable[Evidence]
) -> SideBySide | None:
    """Lay the incident beside the newest runs that repeated its walk and climbed a ladder of it.

    None where no run repeated the walk at the context of the original's most telling case.
    """
    first = Side(original, diagnose(original), max(original.points, key=_telling))
    second = next((side for one in repeated if (side := walk_of(one, first.point))), None)
    if second is None:
        return None
    twin = fast_twin(second)
    climbed = next(
        (
            (one, found)
            for one in ladders
            if (found := _at(diagnose(one).ladder, first.point.context_tokens))
        ),
        None,
    )
    readings = () if climbed is None else climbed[1]
    return SideBySide(
        sources=tuple(_sources(first, second, None if climbed is None else climbed[0])),
        measured=tuple(measured_lines(first, second, twin)),
        counters=tuple(counter_lines(first, second, twin)),
        known=(*_known(first, second), *_causes(first, readings)),
    )


def _telling(point: EvidencePoint) -> tuple[int, int]:
    return len(point.counters), point.context_tokens or 0


def _at(readings: Sequence[LadderReading], context_tokens: int | None) -> tuple[LadderReading, ...]:
    return tuple(one for one in readings if one.context_tokens == context_tokens)


def _sources(first: Side, second: Side, ladder: Evidence | None) -> Iterable[tuple[str, str]]:
    source = first.evidence.source or "a run of ours"
    yield "original", f"{first.evidence.gpu}: {first.evidence.label}, {source}"
    yield "repeated", f"{second.evidence.gpu}: {second.evidence.label}, n = {second.point.n}"
    if ladder is not None:
        yield "ladder", f"{ladder.gpu}: {ladder.label}"


def _known(first: Side, second: Side) -> Iterable[KnownCause]:
    """Hold what is claimed of the original against what was measured where it was repeated."""
    for name, what in (
        ("distance_from_floor", "far from its floor"),
        ("gpu_utilization_misleads", "utilization.gpu misleads"),
        ("dram_idle", "DRAM was idle"),
        ("starvation", "too few programs for the SMs"),
    ):
        yield _pair(what, first.claim(name), second.claim(name), NOT_VARIED)
    yield _line_over_context(first, second)
    partial = next((one for one in first.diagnosis.claims if one.name == "floor_is_partial"), None)
    if partial is not None:
        yield _pair("the whole step's floor", partial, None, WHOLE_STEP)


def _line_over_context(first: Side, second: Side) -> KnownCause:
    """Say whether the time is a line over context, and which point left it where it was not."""
    off = next((one for one in first.diagnosis.claims if one.name == "excess_over_line"), None)
    fit = next((one for one in first.diagnosis.claims if one.name == "context_fit"), None)
    told = _pair("the time leaves its line over context", off or fit, None, WHOLE_STEP)
    own = second.claim("context_fit")
    if own is None:
        return told
    has_line = any(fit.label == second.sweep and not fit.refused for fit in second.diagnosis.fits)
    said = f"not repeated: {own.statement}" if has_line and off is not None else own.statement
    return replace(told, repeated=own.status, repeated_says=said)


def _causes(first: Side, readings: Sequence[LadderReading]) -> Iterable[KnownCause]:
    """Rank what a ladder attributed; of the original it says nothing, as nothing was varied."""
    told = {"page_64": "page_size", "split": "starvation"}
    in_order = {one.factor: one for one in readings if one.place is Place.IN_ORDER}
    for factor in sorted(in_order, key=lambda name: -in_order[name].ratio.value):
        claims = [one for one in first.diagnosis.claims if one.name == told.get(factor)]
        claim = next(iter(claims), None)
        found = [one for one in readings if one.factor == factor]
        is_decided = in_order[factor].ratio.outcome is not Outcome.UNDECIDED
        place = in_order[factor]
        yield KnownCause(
            what=AT_THE_SLOW_END[factor],
            original=Status.UNTESTED if claim is None else claim.status,
            original_says=NOT_VARIED if claim is None else claim.statement,
            repeated=Status.SUPPORTED if is_decided else Status.UNTESTED,
            repeated_says=_worth(found),
            factor=factor,
            worth=place.ratio.value,
            alone=next(
                (one.ratio.value for one in found if one.place is Place.ALONE and _is_worth(one)),
                None,
            ),
            is_cause=_is_worth(place) if is_decided else None,
        )
    for factor in FACTORS if not readings else ():
        yield _pair(AT_THE_SLOW_END[factor], None, None, NOT_VARIED)


def _is_worth(reading: LadderReading) -> bool:
    return reading.ratio.outcome is Outcome.MATTERS and reading.ratio.value > 1.0


def _worth(readings: Sequence[LadderReading]) -> str:
    """Say whether a factor is a cause, and give its three readings with their intervals."""
    (place,) = (one for one in readings if one.place is Place.IN_ORDER)
    verdict = "a cause" if _is_worth(place) else "no cause in the fixed order"
    if place.ratio.outcome is Outcome.UNDECIDED:
        verdict = "undecided"
    told = ", ".join(
        f"{digits(one.ratio.value, 3)} [{digits(one.ratio.low, 3)}, {digits(one.ratio.high, 3)}] "
        f"times {one.place}"
        for one in readings
    )
    return f"{verdict}, {place.factor} is worth {told}"


def _pair(what: str, first: Claim | None, second: Claim | None, absent: str) -> KnownCause:
    return KnownCause(
        what,
        Status.UNTESTED if first is None else first.status,
        NOT_VARIED if first is None else first.statement,
        Status.UNTESTED if second is None else second.status,
        absent if second is None else second.statement,
    )
