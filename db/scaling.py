"""What cases that differ in their context alone say together: growth, and what leaves the line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from db.case_groups import grouped
from db.evidence import Claim, Status
from db.line_fit import fit_line, fixed_part, off_the_line, straight_line
from db.numbers import digits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from db.evidence import EvidencePoint, LineFit

CONTEXT_NAMES = frozenset({"context", "context_len", "context_tokens"})
MIN_CONTEXTS = 3  # fewer are no series over context
MIN_FIXED_SHARE = 0.5  # of the shortest context's time: what does not grow must be most of it
SHORT_CONTEXT = 1.0 / 16.0  # of the longest, from where that may be expected


@dataclass(frozen=True, slots=True)
class Sweep:
    """One case over its contexts, shortest first."""

    label: str
    points: tuple[EvidencePoint, ...]
    num_bytes: NDArray[np.float64]  # what grows with the context
    times_s: NDArray[np.float64]

    @property
    def t0_ms(self) -> float:
        """Where the plain straight line begins."""
        return straight_line(self.num_bytes, self.times_s)[0] * 1e3


def context_findings(points: Sequence[EvidencePoint]) -> tuple[list[LineFit], list[Claim]]:
    """Fit every case over its contexts, and name what does not fit."""
    fits, claims = [], []
    for sweep in sweeps(points):
        fit = fit_line(sweep.label, sweep.num_bytes, sweep.times_s)
        fits.append(fit)
        claims += [_fit_claim(sweep, fit), _excess(sweep), _suspect(sweep, fit)]
    return fits, [claim for claim in claims if claim is not None]


def _fit_claim(sweep: Sweep, fit: LineFit) -> Claim:
    if fit.refused is not None:
        return Claim(
            name="context_fit",
            statement=f"no straight line over context: {fit.refused}",
            value=sweep.t0_ms,
            unit="ms at no context, by the refused line",
            evidence=f"{sweep.label}: {_times(sweep)}",
            status=Status.SUPPORTED if len(sweep.points) > MIN_CONTEXTS else Status.UNTESTED,
        )
    return Claim(
        name="context_fit",
        statement=(
            f"{digits(fit.t0_ms, 3)} ms [{digits(fit.t0_low_ms, 3)}, {digits(fit.t0_high_ms, 3)}] "
            f"do not grow with context, the rest runs at {digits(fit.bandwidth_gb_s, 3)} GB/s"
        ),
        value=fit.bandwidth_gb_s or 0.0,
        unit="GB/s",
        evidence=f"{sweep.label}: line through {fit.n_points} contexts",
        status=Status.SUPPORTED,
    )


def _excess(sweep: Sweep) -> Claim | None:
    """Name the one context that leaves the line of the others."""
    off = off_the_line(sweep.num_bytes, sweep.times_s)
    if off is None:
        return None
    point, others = sweep.points[off.index], len(sweep.points) - 1
    side = "above" if off.ratio > 1.0 else "below"
    return Claim(
        name="excess_over_line",
        statement=(
            f"{_ms(point)} at {point.context_tokens:,} tokens lies {off.ratio:.2g} times the line "
            f"of the other {others} points, {side} it: something else begins there"
        ),
        value=off.ratio,
        unit="times the line of the others",
        evidence=f"{sweep.label}: {_times(sweep)}",
        status=Status.SUPPORTED,
        case=point.name,
        is_alarm=True,
    )


def _suspect(sweep: Sweep, fit: LineFit) -> Claim | None:
    """Doubt a shortest context that leaves next to nothing for what does not grow."""
    point = sweep.points[0]
    if fit.refused is None or sweep.t0_ms >= 0.0:
        return None
    fixed_ms = fixed_part(sweep.num_bytes, sweep.times_s) * 1e3
    is_short = sweep.num_bytes[0] <= SHORT_CONTEXT * sweep.num_bytes[-1]
    if not is_short or fixed_ms >= MIN_FIXED_SHARE * point.time_s * 1e3:
        return None
    return Claim(
        name="suspect_point",
        statement=(
            f"{_ms(point)} at {point.context_tokens:,} tokens is suspect: it leaves "
            f"{max(fixed_ms, 0.0):.2g} ms for weights, launches and all else that does not grow"
            + _per_token(point)
        ),
        value=point.time_s * 1e3,
        unit="ms",
        evidence=f"{sweep.label}: {_times(sweep)}, each weighed by its own time",
        status=Status.UNTESTED,
        case=point.name,
        is_alarm=True,
    )


def _per_token(point: EvidencePoint) -> str:
    length = point.commit_length
    if length is None or length <= 1.0:
        return ""
    per_step = point.time_s * length * 1e3
    return f"; as a time per token it would be {digits(per_step, 3)} ms a step of {length:g} tokens"


def sweeps(points: Sequence[EvidencePoint]) -> list[Sweep]:
    """Group the cases that differ in context alone."""
    sweeps = []
    grown = [point for point in points if point.context_tokens and _growing_bytes(point)]
    for label, group in grouped(grown, CONTEXT_NAMES.__contains__).items():
        ordered = tuple(sorted(group, key=lambda point: point.context_tokens or 0))
        num_bytes = np.asarray([_growing_bytes(point) for point in ordered], dtype=np.float64)
        if len(np.unique(num_bytes)) >= MIN_CONTEXTS:
            times_s = np.asarray([point.time_s for point in ordered], dtype=np.float64)
            sweeps.append(Sweep(label, ordered, num_bytes, times_s))
    return sweeps


def _growing_bytes(point: EvidencePoint) -> int | None:
    return point.bytes if point.kv_bytes is None else point.kv_bytes


def _ms(point: EvidencePoint) -> str:
    return f"{digits(point.time_s * 1e3, 4)} ms"


def _times(sweep: Sweep) -> str:
    return ", ".join(f"{_ms(point)} at {point.context_tokens:,}" for point in sweep.points)
