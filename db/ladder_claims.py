"""What a ladder says in words: where each factor matters, and what the cause is made of."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from db.evidence import Claim, Outcome, Place, Status
from db.ladder import FACTORS, FAST_END, MARGIN, SLOW_END, ladders
from db.numbers import count_text, digits
from db.ratios import with_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from db.evidence import EvidencePoint, LadderReading
    from db.ladder import Ladder

AT_THE_SLOW_END: Final = {  # what stands there instead of each factor
    "read_once": "V re-read",
    "split": "missing parallelism",
    "packed": "a program for each head",
    "page_64": "page size 1",
    "in_order": "shuffled pages",
}
ORDINALS: Final = ("first", "second", "third", "fourth", "fifth")
WITHIN: Final = f"within {100 * (MARGIN - 1.0):.0f} %"


def ladder_claims(
    points: Sequence[EvidencePoint], readings: Sequence[LadderReading]
) -> list[Claim]:
    """Name the cause at each context, then say of each factor where it matters."""
    causes = [_cause(ladder, _of(readings, ladder)) for ladder in ladders(points)]
    by_factor: dict[str, list[LadderReading]] = defaultdict(list)
    for reading in readings:
        by_factor[reading.factor].append(reading)
    factors = [_factor(name, by_factor[name]) for name in FACTORS if readings]
    return [claim for claim in causes if claim is not None] + factors


def _cause(ladder: Ladder, readings: Sequence[LadderReading]) -> Claim | None:
    """Rank the factors by what they are worth in the fixed order; a missing rung may hide one."""
    in_order = [reading for reading in readings if reading.place is Place.IN_ORDER]
    if not in_order:
        return None
    ranked = sorted(in_order, key=_worth, reverse=True)
    grounds = dict.fromkeys(reading.ratio.ground for reading in ranked)
    is_decided = len(ranked) == len(FACTORS) and _is_decided(ranked[0])
    span = _span(ladder)
    ends = "" if span is None else f", {digits(span, 3)} times between its ends"
    return Claim(
        name="ladder_cause",
        statement=f"at {_tokens(ladder.context_tokens)}{ends}: {_ranking(ranked)}",
        value=ranked[0].ratio.value if span is None else span,
        unit="times, the largest factor" if span is None else "times, slow over fast end",
        evidence=f"{ladder.label}: {_steps(in_order)}; by {', '.join(grounds)}",
        status=Status.SUPPORTED if is_decided else Status.UNTESTED,
    )


def _ranking(ranked: Sequence[LadderReading]) -> str:
    """Tell apart what matters, what does not, what makes it slower and what nobody knows."""
    missing = [name for name in FACTORS if name not in {one.factor for one in ranked}]
    matters = [one for one in ranked if _changes(one)]
    faster = [one for one in matters if one.ratio.value > 1.0]
    first = [
        _named(one) if missing else f"{_named(one)} {ordinal}"
        for one, ordinal in zip(faster, ORDINALS, strict=False)
    ]
    groups = {
        "a slowdown": [_by_itself(one) for one in matters if one.ratio.value <= 1.0],
        WITHIN: [_named(one) for one in ranked if one.ratio.outcome is Outcome.NO_MATTER],
        "undecided": [_named(one) for one in ranked if not _is_decided(one)],
        "untested": [f"{AT_THE_SLOW_END[name]} ({name})" for name in missing],
    }
    rest = [f"{words}: {', '.join(names)}" for words, names in groups.items() if names]
    return "; ".join([*([", ".join(first)] if first else []), *rest])


def _named(reading: LadderReading) -> str:
    worth = digits(reading.ratio.value, 3)
    return f"{AT_THE_SLOW_END[reading.factor]} ({reading.factor}, {worth} times)"


def _by_itself(reading: LadderReading) -> str:
    """Name the factor where it, and not what stood in its place, takes the time."""
    return f"{reading.factor} ({digits(reading.ratio.value, 3)} times)"


def _factor(name: str, readings: Sequence[LadderReading]) -> Claim:
    """Say what one factor is worth at each place of each ladder."""
    by_ladder: dict[str, list[LadderReading]] = defaultdict(list)
    for reading in readings:
        by_ladder[reading.ladder].append(reading)
    contexts = [_at_context(found) for found in by_ladder.values()]
    told = max(readings, key=_prominence, default=None)
    is_decided = any(_is_decided(one) for one in readings)
    where = "" if told is None else f", {told.place} at {_tokens(told.context_tokens)}"
    said = "; ".join(contexts) or "no two rungs differ in it alone"
    return Claim(
        name=f"ladder_{name}",
        statement=f"{name} {_verdict(readings)}: {said}",
        value=0.0 if told is None else told.ratio.value,
        unit=f"times{where}",
        evidence="; ".join(_intervals(found) for found in by_ladder.values()) or "no reading",
        status=Status.SUPPORTED if is_decided else Status.UNTESTED,
    )


def _verdict(readings: Sequence[LadderReading]) -> str:
    """Name the places where a factor matters, and the contexts where not at all of them."""
    if not any(_is_decided(one) for one in readings):
        return "is undecided" if readings else "is untested"
    faster = [_where(readings, place, is_faster=True) for place in Place]
    slower = [_where(readings, place, is_faster=False) for place in Place]
    said = {"matters": [one for one in faster if one], "slows down": [one for one in slower if one]}
    parts = [f"{words} {_listed(places)}" for words, places in said.items() if places]
    if parts:
        return ", ".join(parts)
    is_open = not all(_is_decided(one) for one in readings)
    return f"matters nowhere{' it was decided' if is_open else ''}, {WITHIN}"


def _where(readings: Sequence[LadderReading], place: Place, *, is_faster: bool) -> str:
    """Name a place, and the contexts unless it is true at all that were read there."""
    here = [one for one in readings if one.place is place]
    found = [one for one in here if _changes(one) and (one.ratio.value > 1.0) is is_faster]
    if not found:
        return ""
    known = [f"{one.context_tokens:,}" for one in found if one.context_tokens is not None]
    return f"{place}" if len(found) == len(here) else f"{place} at {_listed(known)}"


def _at_context(readings: Sequence[LadderReading]) -> str:
    """Give what a factor is worth at one context: `22.2 times in the fixed order, 1.1 alone`."""
    found = {reading.place: reading for reading in readings}
    said = ", ".join(_reading(place, found.get(place)) for place in Place)
    return f"at {_tokens(readings[0].context_tokens)} {said}"


def _reading(place: Place, reading: LadderReading | None) -> str:
    if reading is None:
        return f"{place} untested"
    mark = "" if _is_decided(reading) else " (undecided)"
    unit = " times" if place is Place.IN_ORDER else ""
    return f"{digits(reading.ratio.value, 3)}{unit} {place}{mark}"


def _intervals(readings: Sequence[LadderReading]) -> str:
    grounds = dict.fromkeys(reading.ratio.ground for reading in readings)
    told = ", ".join(
        f"{reading.place} {_us(reading.before)} to {_us(reading.after)}, "
        f"{with_interval(reading.ratio)}"
        for reading in readings
    )
    return f"{readings[0].ladder}: {told}; by {', '.join(grounds)}"


def _steps(in_order: Sequence[LadderReading]) -> str:
    """Give the times of the climb, and the programs where a step changes their number."""
    steps = [f"{_us(in_order[0].before)}{_programs(None, in_order[0].before)}"]
    steps += [
        f"{one.factor} {_us(one.after)}{_programs(one.before, one.after)}" for one in in_order
    ]
    return " → ".join(steps)


def _listed(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _programs(before: EvidencePoint | None, after: EvidencePoint) -> str:
    if after.programs is None or (before is not None and before.programs == after.programs):
        return ""
    told = None if before is not None else after.num_sms
    of = "" if told is None else f" on {count_text(told, 'SM')}"
    return f" ({count_text(after.programs, 'program')}{of})"


def _span(ladder: Ladder) -> float | None:
    slow, fast = ladder.rungs.get(SLOW_END), ladder.rungs.get(FAST_END)
    return None if slow is None or fast is None else slow.time_s / fast.time_s


def _of(readings: Sequence[LadderReading], ladder: Ladder) -> list[LadderReading]:
    return [reading for reading in readings if reading.ladder == ladder.label]


def _is_decided(reading: LadderReading) -> bool:
    return reading.ratio.outcome is not Outcome.UNDECIDED


def _changes(reading: LadderReading) -> bool:
    return reading.ratio.outcome is Outcome.MATTERS


def _worth(reading: LadderReading) -> float:
    return reading.ratio.value


def _prominence(reading: LadderReading) -> tuple[bool, int]:
    """Prefer the fixed order, then the longest context."""
    return reading.place is Place.IN_ORDER, reading.context_tokens or 0


def _tokens(context_tokens: int | None) -> str:
    return "unknown context" if context_tokens is None else f"{context_tokens:,} tokens"


def _us(point: EvidencePoint) -> str:
    return f"{digits(point.time_s * 1e6, 4)} µs"
