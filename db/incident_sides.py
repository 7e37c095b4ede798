"""One side of the incident: a case in its run, its fast twin, and what is written of it.

Every writer gives text for one cell; what was not recorded is a dash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from db.case_groups import grouped
from db.diagnose import diagnose
from db.numbers import MISSING, count_text, digits
from db.page_size import PAGE_NAME
from db.scaling import CONTEXT_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from db.evidence import CaseDiagnosis, Claim, Diagnosis, Evidence, EvidencePoint

BACKEND: Final = "attention_backend"
WALK: Final = "triton_serial"  # the incident's walk over the prefix, kept as an exhibit


@dataclass(frozen=True, slots=True)
class Line:
    """One thing on both sides, as text; the third is the fast kernel in the run that repeated."""

    what: str
    original: str
    repeated: str
    fast: str = ""
    alone: str = ""  # counters: what one would take from it
    worth: str = ""  # counters: what it is worth


@dataclass(frozen=True, slots=True)
class Side:
    """One case in its run, and what was concluded there."""

    evidence: Evidence
    diagnosis: Diagnosis
    point: EvidencePoint

    @property
    def case(self) -> CaseDiagnosis:
        """The case against its floors."""
        return next(
            case
            for case in self.diagnosis.cases
            if (case.benchmark, case.params) == (self.point.benchmark, self.point.params)
        )

    @property
    def sweep(self) -> str:
        """What the case is called without its context."""
        return next(iter(grouped([self.point], CONTEXT_NAMES.__contains__)))

    def claim(self, name: str) -> Claim | None:
        """Give the claim about the case, else the one about its sweep or the whole run."""
        found = [one for one in self.diagnosis.claims if one.name == name]
        own = [one for one in found if one.case == self.point.name]
        swept = [one for one in found if one.evidence.startswith(f"{self.sweep}:")]
        return next(iter([*own, *swept]), None)


def walk_of(evidence: Evidence, original: EvidencePoint) -> Side | None:
    """Find the same walk over as many rows, with pages of the same size."""
    for point in evidence.points:
        settings = point.settings
        is_walk = settings.get(BACKEND, "").strip("'\"") == WALK and bool(point.counters)
        is_alike = settings.get(PAGE_NAME) == original.settings.get(PAGE_NAME)
        if is_walk and is_alike and point.context_tokens == original.context_tokens:
            return Side(evidence, diagnose(evidence), point)
    return None


def fast_twin(side: Side) -> Side | None:
    """Give the fastest case of the same run that differs in its backend alone."""
    label = next(iter(grouped([side.point], BACKEND.__eq__)))
    alike = [
        point
        for name, points in grouped(side.evidence.points, BACKEND.__eq__).items()
        if name == label
        for point in points
        if point.params != side.point.params
    ]
    fast = min(alike, key=lambda point: point.time_s, default=None)
    return None if fast is None else Side(side.evidence, side.diagnosis, fast)


def measured_lines(first: Side, second: Side, twin: Side | None) -> Iterable[Line]:
    """Give time, rate, distance, growth and programs, side by side."""
    sides = (first, second, twin)
    yield Line("case", *("" if side is None else side.point.name for side in sides))
    yield Line("time", *(_cell(side, _time) for side in sides))
    scale = _scale(first, second)
    if scale is not None:
        times = [MISSING if one is None else _ms(one.point.time_s * scale) for one in sides[1:]]
        yield Line(f"the same for {digits(scale, 3)} layers", _ms(first.point.time_s), *times)
    yield Line("KV rows read at", *(_cell(side, _rate) for side in sides))
    yield Line("over its KV-read floor", *(_cell(side, _distance) for side in sides))
    yield Line("over context", *(_cell(side, _fit) for side in sides))
    yield Line("programs", *(_cell(side, _programs) for side in sides))


def _cell(side: Side | None, write: Callable[[Side], str]) -> str:
    return "" if side is None else write(side)


def _time(side: Side) -> str:
    return _ms(side.point.time_s)


def _ms(seconds: float) -> str:
    return f"{digits(seconds * 1e3, 4)} ms"


def _scale(first: Side, second: Side) -> float | None:
    """Count in how many of the repeated case the original's rows would be read."""
    if not first.point.kv_bytes or not second.point.kv_bytes:
        return None
    return first.point.kv_bytes / second.point.kv_bytes


def _rate(side: Side) -> str:
    rate, peak = side.evidence.ceilings.read_bytes_per_s, side.evidence.peak_source
    if side.point.kv_bytes is None or rate is None:
        return MISSING
    achieved = side.point.kv_bytes / side.point.time_s
    return (
        f"{digits(achieved / 1e9, 3)} GB/s, {digits(100 * achieved / rate, 2)} % of the {peak} peak"
    )


def _distance(side: Side) -> str:
    ratio = side.case.kv_floor_ratio
    return MISSING if ratio is None else f"{digits(ratio, 3)} times"


def _fit(side: Side) -> str:
    """Write the line over context; the original's sweep is another benchmark than its probe."""
    own = [fit for fit in side.diagnosis.fits if fit.label == side.sweep]
    fit = next(iter(own), side.diagnosis.fit)
    if fit is None:
        return MISSING
    if fit.refused is not None:
        return f"no line: {fit.refused}"
    return (
        f"{digits(fit.t0_ms, 3)} ms [{digits(fit.t0_low_ms, 3)}, {digits(fit.t0_high_ms, 3)}], the "
        f"rest at {digits(fit.bandwidth_gb_s, 3)} GB/s [{digits(fit.bandwidth_low_gb_s, 3)}, "
        f"{digits(fit.bandwidth_high_gb_s, 3)}], {fit.n_points} contexts"
    )


def _programs(side: Side) -> str:
    programs, sms = side.point.programs, side.point.num_sms
    if programs is None or not sms:
        return MISSING
    few = "" if programs >= sms else f": at most {digits(100 * programs / sms, 2)} % of them"
    return f"{programs} on {count_text(sms, 'SM')}{few}"
