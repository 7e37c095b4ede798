"""What changed between two runs of the same cases: the code's rates, or what it ran on and with.

Two runs alone test no cause: what moved by the ratio of the times is consistent with being it. What
did not move is supported: it could have, and it was read.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final

from db.change_points import RESTLESS
from db.evidence import Claim, Status
from db.explained import CLOCK_EXPLAINS, CLOCK_MOVE
from db.line_change import line_claims
from db.numbers import count_text, digits, with_sign
from db.scaling import sweeps

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from db.change_points import Cause
    from db.evidence import Evidence, EvidencePoint

    Pair = tuple[EvidencePoint, EvidencePoint]

CLOCKS: Final = {"sm_clock_mhz": "the SM clock", "memory_clock_mhz": "the memory clock"}
SPREAD_SAMPLES: Final = 8  # of a side, from where quartiles say how far they scatter
MOST_OF_IT: Final = 0.5  # of a change that one stage must take to be named
NAMED: Final = "change_of_"
OUTSIDE: Final = ("dependency", "environment", "hardware", "clock", "noise")
NOT_IT: Final = {  # what is said of the rest in few words
    "dependency": "dependencies",
    "environment": "driver and limits",
    "hardware": "another device",
    "clock": "clocks",
    "noise": "restless samples",
    "bandwidth": "bandwidth",
    "t0": "t0",
}
INSIDE: Final = ("bandwidth", "t0", "stage", "work", "line")


def change_claims(before: Evidence, after: Evidence, cases: Collection[str]) -> list[Claim]:
    """Say what changed for these cases, what moved first; nothing where a side lacks them."""
    old = {(point.name, point.version): point for point in before.points if point.time_s > 0.0}
    pairs = [
        (old[point.name, point.version], point)
        for point in after.points
        if point.name in cases and point.time_s > 0.0 and (point.name, point.version) in old
    ]
    if not pairs:
        return []
    found = [
        *_surroundings(before, after),
        *(one for name in CLOCKS if (one := _clock(name, pairs)) is not None),
        *(one for one in (_noise(pairs), _stage(pairs), _work(pairs)) if one is not None),
        *_lines(before, after, pairs),
    ]
    kinds = [f"{NAMED}{kind}" for kind in (*OUTSIDE, *INSIDE)]
    return sorted(found, key=lambda claim: (not claim.is_alarm, kinds.index(claim.name)))


def summary(claims: Sequence[Claim]) -> str:
    """Say in one sentence what moved, and in another what it is not; empty without claims."""
    moved = "; ".join(claim.statement for claim in claims if claim.is_alarm)
    kinds = {
        claim.name.removeprefix(NAMED)
        for claim in claims
        if not claim.is_alarm and claim.status is Status.SUPPORTED
    }
    held = ", ".join(words for kind, words in NOT_IT.items() if kind in kinds)
    told = [moved or "nothing that was recorded moved with it", f"not it: {held}" if held else ""]
    return " ".join(f"{one[0].upper()}{one[1:]}." for one in told if one) if claims else ""


def likely_cause(cause: Cause, claims: Sequence[Claim]) -> Cause:
    """Let what moved with the times decide between the causes that results alone cannot tell.

    Results of two environments differ by what the machine imposes or by what the commit declares;
    those of one may have moved with a clock, or only have become restless.
    """
    moved = {claim.name.removeprefix(NAMED) for claim in claims if claim.is_alarm}
    if cause == "environment" and moved.isdisjoint({"environment", "hardware"}):
        return "dependency" if "dependency" in moved else cause
    if cause != "code":
        return cause
    kinds: tuple[Cause, ...] = ("dependency", "environment", "hardware", "clock", "noise")
    return next((kind for kind in kinds if kind in moved), cause)


def _surroundings(before: Evidence, after: Evidence) -> list[Claim]:
    """Hold what a commit declares, what the machine imposes and which device it was apart."""
    sides = {
        "dependency": ("what it runs with", before.runs_with, after.runs_with),
        "environment": ("what the machine imposes", before.imposed, after.imposed),
        "hardware": ("the device", before.device, after.device),
    }
    return [
        _named(kind, what, old, new)
        for kind, (what, old, new) in sides.items()
        if old is not None and new is not None
    ]


def _named(kind: str, what: str, old: str, new: str) -> Claim:
    has_moved = old != new
    return Claim(
        name=f"{NAMED}{kind}",
        statement=f"{what} changed: {old} → {new}" if has_moved else f"{what} is as before",
        value=float(has_moved),
        unit="1 where it changed",
        evidence=new,
        status=Status.CONSISTENT if has_moved else Status.SUPPORTED,
        is_alarm=has_moved,
    )


def _clock(name: str, pairs: Sequence[Pair]) -> Claim | None:
    """Say whether a clock moved against the time; a clock by itself changes nothing by more."""
    both = [
        (old.counters[name], new.counters[name], _log_change(old, new))
        for old, new in pairs
        if old.counters.get(name, 0.0) > 0.0 and new.counters.get(name, 0.0) > 0.0
    ]
    if not both:
        return None
    was, now = (statistics.median(side) for side in list(zip(*both, strict=True))[:2])
    moved = statistics.median(math.log(new / old) for old, new, _ in both)
    change = statistics.median(log for _, _, log in both)
    change_pct = with_sign(f"{100.0 * math.expm1(change):+.1f}")
    has_moved = abs(moved) >= CLOCK_MOVE
    left = abs(change + moved)
    explains = has_moved and left <= (1.0 - CLOCK_EXPLAINS) * abs(change)
    said = f"{CLOCKS[name]} is as before, {digits(now, 4)} MHz"
    if has_moved:
        share = "by as much as the time" if explains else "by less than the time"
        said = f"{CLOCKS[name]} changed {share}: {digits(was, 4)} → {digits(now, 4)} MHz"
    return Claim(
        name=f"{NAMED}clock",
        statement=said,
        value=100.0 * math.expm1(moved),
        unit="% of the clock",
        evidence=f"the time {change_pct} %, median of {count_text(len(both), 'case')}",
        status=Status.CONSISTENT if explains else Status.SUPPORTED,
        is_alarm=explains,
    )


def _noise(pairs: Sequence[Pair]) -> Claim | None:
    """Say whether samples scatter by as much as the level moved, and did not before."""
    spreads = [
        (spread, _spread(new), _log_change(old, new))
        for old, new in pairs
        if (spread := _spread(old)) is not None and _spread(new) is not None
    ]
    if not spreads:
        return None
    was, now, change = (statistics.median(side) for side in zip(*spreads, strict=True))
    is_noise = now >= RESTLESS * was and now >= abs(change)
    told = f"half of its samples lie within {100.0 * now:.2g} %, {100.0 * was:.2g} % before"
    return Claim(
        name=f"{NAMED}noise",
        statement=f"it became restless: {told}" if is_noise else f"it is no more restless: {told}",
        value=100.0 * now,
        unit="% between the quartiles",
        evidence=f"samples of {count_text(len(spreads), 'case')}",
        status=Status.CONSISTENT if is_noise else Status.SUPPORTED,
        is_alarm=is_noise,
    )


def _spread(point: EvidencePoint) -> float | None:
    """Give the distance of the quartiles as a share of the median."""
    samples = [one for process in point.process_samples_s for one in process]
    if len(samples) < SPREAD_SAMPLES:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle


def _stage(pairs: Sequence[Pair]) -> Claim | None:
    """Name the stage of a step that took most of the change."""
    staged = [(old, new) for old, new in pairs if old.stage_seconds and new.stage_seconds]
    if not staged:
        return None
    old, new = max(staged, key=lambda pair: abs(_log_change(*pair)))
    was, now = old.stage_seconds or {}, new.stage_seconds or {}
    moved = {name: now[name] - was[name] for name in was if name in now}
    total = new.time_s - old.time_s
    stage = max(moved, key=lambda name: moved[name] / total if total else 0.0, default=None)
    if stage is None or not total or moved[stage] / total < MOST_OF_IT:
        return None
    return Claim(
        name=f"{NAMED}stage",
        statement=(
            f"{stage} takes {moved[stage] / total:.0%} of the change: "
            f"{digits(was[stage] * 1e3, 3)} → {digits(now[stage] * 1e3, 3)} ms"
        ),
        value=100.0 * moved[stage] / total,
        unit="% of the change",
        evidence=new.name,
        status=Status.SUPPORTED,
        is_alarm=True,
    )


def _work(pairs: Sequence[Pair]) -> Claim | None:
    """Say so where a case does other work than before, or is launched otherwise."""
    told = {
        "bytes it must move": [(old.bytes, new.bytes) for old, new in pairs],
        "FLOP it must do": [(old.flops, new.flops) for old, new in pairs],
        "programs of its kernel": [(old.programs, new.programs) for old, new in pairs],
    }
    for what, sides in told.items():
        other = [(old, new) for old, new in sides if old and new and old != new]
        if other:
            old, new = max(other, key=lambda side: abs(math.log(side[1] / side[0])))
            return Claim(
                name=f"{NAMED}work",
                statement=f"the {what} changed: {digits(old, 4)} → {digits(new, 4)}",
                value=new / old,
                unit="times before",
                evidence=f"in {len(other):,} of {count_text(len(pairs), 'case')}",
                status=Status.CONSISTENT,
                is_alarm=True,
            )
    return None


def _lines(before: Evidence, after: Evidence, pairs: Sequence[Pair]) -> list[Claim]:
    """Compare the lines over context of the sweeps that these cases belong to."""
    named = {new.name for _, new in pairs}
    old = {sweep.label: sweep for sweep in sweeps(before.points)}
    return [
        claim
        for sweep in sweeps(after.points)
        if sweep.label in old and any(point.name in named for point in sweep.points)
        for claim in line_claims(old[sweep.label], sweep)
    ]


def _log_change(old: EvidencePoint, new: EvidencePoint) -> float:
    return math.log(new.time_s / old.time_s)
