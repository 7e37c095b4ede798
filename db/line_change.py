"""What changed of time = t0 + bytes / bandwidth between two runs of a case: t0, the rate, or both.

Both lines are fitted with their intervals over the contexts that both sides measured; where either
is refused nothing is compared. A part that did not move is said to be as before only where the
whole interval of its change is too small to matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from db.evidence import Claim, Outcome, Status
from db.line_fit import fit_line
from db.numbers import digits
from db.ratios import POLICY

if TYPE_CHECKING:
    from db.evidence import LineFit
    from db.scaling import Sweep

RELEVANT: Final = POLICY.relevance_rel  # of the rate; of the shortest time before, for t0
T0, RATE, LINE = "change_of_t0", "change_of_bandwidth", "change_of_line"


@dataclass(frozen=True, slots=True)
class _Change:
    """How far one part of the line moved, with the interval of that, in its own unit."""

    value: float
    low: float
    high: float
    nothing: float  # the value that means no change
    margin: float  # around it, that does not matter

    @property
    def outcome(self) -> Outcome:
        """Whether it moved, did not, or is not known to have."""
        low, high = self.low - self.nothing, self.high - self.nothing
        if (low > 0.0 or high < 0.0) and abs(self.value - self.nothing) >= self.margin:
            return Outcome.MATTERS
        is_small = -self.margin <= low and high <= self.margin
        return Outcome.NO_MATTER if is_small else Outcome.UNDECIDED


def line_claims(before: Sweep, after: Sweep) -> list[Claim]:
    """Say of one case over its contexts what moved: the rate, t0, or why that is not known."""
    shared = {point.context_tokens for point in before.points} & {
        point.context_tokens for point in after.points
    }
    (old, shortest_s), (new, _) = (_fit(side, shared) for side in (before, after))
    refusals = [fit.refused for fit in (old, new) if fit.refused is not None]
    if refusals:
        sides = ("before", old), ("after", new)
        told = "; ".join(f"{name}: {fit.refused}" for name, fit in sides if fit.refused)
        return [
            Claim(
                name=LINE,
                statement=f"t0 and bandwidth cannot be told apart: {told}",
                value=float(len(shared)),
                unit="contexts on both sides",
                evidence=after.label,
                status=Status.UNTESTED,
            )
        ]
    evidence = f"{after.label}: lines through {len(shared)} contexts, before and after"
    return [_rate(old, new, evidence), _t0(old, new, shortest_s * 1e3, evidence)]


def _fit(sweep: Sweep, contexts: set[int | None]) -> tuple[LineFit, float]:
    """Fit a side over the shared contexts; the shortest of its times stands beside the line."""
    kept = np.asarray([point.context_tokens in contexts for point in sweep.points])
    times_s = sweep.times_s[kept]
    shortest_s = float(times_s.min()) if len(times_s) else math.nan
    return fit_line(sweep.label, sweep.num_bytes[kept], times_s), shortest_s


def _rate(old: LineFit, new: LineFit, evidence: str) -> Claim:
    (was, was_half), (now, now_half) = _slope(old), _slope(new)
    ratio = was / now  # of the bandwidths
    half = math.hypot(was_half / was, now_half / now)
    found = _Change(ratio, ratio * math.exp(-half), ratio * math.exp(half), 1.0, RELEVANT)
    return Claim(
        name=RATE,
        statement=(
            f"{_told('the bandwidth', found.outcome)}: {_bandwidth(old)} → {_bandwidth(new)} GB/s, "
            f"{digits(ratio, 3)} [{digits(found.low, 3)}, {digits(found.high, 3)}] times"
        ),
        value=ratio,
        unit="times the bandwidth before",
        evidence=evidence,
        status=_status(found.outcome),
        is_alarm=found.outcome is Outcome.MATTERS,
    )


def _t0(old: LineFit, new: LineFit, shortest_ms: float, evidence: str) -> Claim:
    was, now = old.t0_ms or 0.0, new.t0_ms or 0.0
    half = math.hypot(_half(old.t0_low_ms, old.t0_high_ms), _half(new.t0_low_ms, new.t0_high_ms))
    moved = now - was
    found = _Change(moved, moved - half, moved + half, 0.0, RELEVANT * shortest_ms)
    return Claim(
        name=T0,
        statement=(
            f"{_told('t0', found.outcome)}: {_fixed(old)} → {_fixed(new)} ms, by "
            f"{digits(moved, 3)} [{digits(found.low, 3)}, {digits(found.high, 3)}] ms"
        ),
        value=moved,
        unit="ms at no context",
        evidence=evidence,
        status=_status(found.outcome),
        is_alarm=found.outcome is Outcome.MATTERS,
    )


def _slope(fit: LineFit) -> tuple[float, float]:
    """Give the seconds for each GB and half of their interval, which is even in them."""
    slope = 1.0 / (fit.bandwidth_gb_s or math.nan)
    return slope, 1.0 / (fit.bandwidth_low_gb_s or math.nan) - slope


def _half(low: float | None, high: float | None) -> float:
    return math.nan if low is None or high is None else (high - low) / 2.0


def _bandwidth(fit: LineFit) -> str:
    low, high = digits(fit.bandwidth_low_gb_s, 3), digits(fit.bandwidth_high_gb_s, 3)
    return f"{digits(fit.bandwidth_gb_s, 3)} [{low}, {high}]"


def _fixed(fit: LineFit) -> str:
    return f"{digits(fit.t0_ms, 3)} [{digits(fit.t0_low_ms, 3)}, {digits(fit.t0_high_ms, 3)}]"


def _told(what: str, outcome: Outcome) -> str:
    words = {
        Outcome.MATTERS: "changed",
        Outcome.NO_MATTER: "is as before",
        Outcome.UNDECIDED: "may be as before",
    }
    return f"{what} {words[outcome]}"


def _status(outcome: Outcome) -> Status:
    return Status.UNTESTED if outcome is Outcome.UNDECIDED else Status.SUPPORTED
