"""Compare two commits case by case: screen all cases, say what is decided and what is not.

Screening tells where to look. It flags a regression with the false discovery rate of all cases
controlled, and every flag stays `screened` until fresh, interleaved data confirm it. "No change"
is a statement too and needs its whole interval within the relevance margin; the rest is
inconclusive, with what would decide it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from db.case_shift import Estimate, estimate, missing_history, noise_floor
from db.cases import (
    CaseComparison,
    CaseKey,
    CaseResult,
    Comparison,
    DuplicateCaseError,
    Policy,
    Verdict,
)
from db.two_samples import false_discovery_rates, needed_samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "SEVERITY",
    "CaseComparison",
    "CaseKey",
    "CaseResult",
    "Comparison",
    "Policy",
    "Verdict",
    "compare",
]

LARGEST_RATIO = 1e9  # of two values of a case; a float tells no change of more than 2**53 from -1
# The gravest first. What nobody knows is graver than good news: it must not hide behind it.
SEVERITY = (
    Verdict.REGRESSION,
    Verdict.FAILED,
    Verdict.REMOVED,
    Verdict.INCONCLUSIVE,
    Verdict.NOT_ENOUGH_HISTORY,
    Verdict.IMPROVEMENT,
    Verdict.NO_CHANGE,
    Verdict.NEW,
    Verdict.SKIPPED,
)


def compare(
    baseline: Sequence[CaseResult],
    contender: Sequence[CaseResult],
    policy: Policy | None = None,
) -> Comparison:
    """Compare two commits; the gravest cases come first.

    Raises
    ------
    DuplicateCaseError
        One side holds two results of one case.
    """
    policy = Policy() if policy is None else policy
    base, head = _by_key(baseline, "baseline"), _by_key(contender, "contender")
    pairs = [(base[key], head[key]) for key in base if key in head]
    cases = [*_screen(pairs, policy), *_removed(base, head), *_new(base, head)]
    cases = [_naming_environments(case, base, head) for case in cases]
    cases.sort(key=lambda case: (SEVERITY.index(case.verdict), -_magnitude(case), case.key))
    tally = Counter(case.verdict for case in cases)
    overall = min(tally, key=SEVERITY.index, default=Verdict.NOT_ENOUGH_HISTORY)
    counts = {verdict: tally[verdict] for verdict in Verdict}
    return Comparison(tuple(cases), counts, overall, policy)


def _by_key(results: Iterable[CaseResult], side: str) -> dict[CaseKey, CaseResult]:
    found: dict[CaseKey, CaseResult] = {}
    for result in results:
        if result.key in found:
            raise DuplicateCaseError(
                f"{side}: expected one result of {result.key.name}, got two (merge them first)"
            )
        found[result.key] = result
    return found


def _magnitude(case: CaseComparison) -> float:
    return abs(case.relative_change or 0.0)


def _screen(pairs: Sequence[tuple[CaseResult, CaseResult]], policy: Policy) -> list[CaseComparison]:
    """Judge the cases both sides have: those with an estimate together, the others alone."""
    settled, open_cases = [], []
    for base, head in pairs:
        blank = _blank(base, head)
        verdict = _without_estimate(base, head, policy)
        if verdict is None:
            open_cases.append((blank, estimate(base, head, policy)))
        else:
            settled.append(_settle(blank, *verdict))
    q_values = false_discovery_rates([found.shift.p_value for _, found in open_cases])
    judged = [
        _judge(_fill(blank, found, q_value), found, policy)
        for (blank, found), q_value in zip(open_cases, q_values, strict=True)
    ]
    return [*settled, *judged]


def _blank(base: CaseResult, head: CaseResult) -> CaseComparison:
    """Describe a case as far as it is known before anything is concluded."""
    base_value, head_value = _number(base), _number(head)
    return CaseComparison(
        key=head.key,
        unit=head.unit,
        direction=head.direction,
        verdict=Verdict.INCONCLUSIVE,
        base_value=base_value,
        head_value=head_value,
        relative_change=_relative_change(base_value, head_value),
        interval_low=None,
        interval_high=None,
        noise_rel=noise_floor(base, head),
        n_base=base.n,
        n_head=head.n,
        p_value=None,
        q_value=None,
        needed_processes=None,
        environment_differs=False,
        reason="",
    )


def _number(result: CaseResult) -> float | None:
    """Give the value if something was measured."""
    measured = result.status in {"ok", "single-sample"} and result.value is not None
    return result.value if measured and math.isfinite(result.value or 0.0) else None


def _relative_change(base: float | None, head: float | None) -> float | None:
    if base is None or head is None or base <= 0.0:
        return None
    return head / base - 1.0


def _without_estimate(
    base: CaseResult, head: CaseResult, policy: Policy
) -> tuple[Verdict, str] | None:
    """Conclude where no change can be estimated; None where it can."""
    if head.status == "skipped":
        return Verdict.SKIPPED, f"skipped on the contender; the baseline is {base.status}"
    if _number(head) is None:
        return Verdict.FAILED, f"failed on the contender; the baseline is {base.status}"
    if base.status == "skipped":
        return Verdict.NEW, "measured on the contender, skipped on the baseline"
    if _number(base) is None:
        return Verdict.NOT_ENOUGH_HISTORY, "measured on the contender, failed on the baseline"
    return _without_ratio(base, head, policy)


def _without_ratio(
    base: CaseResult, head: CaseResult, policy: Policy
) -> tuple[Verdict, str] | None:
    """Conclude where both sides hold a number and no interval can be put on their ratio."""
    if base.value == head.value and base.samples == head.samples:
        return Verdict.NO_CHANGE, "both sides hold the same values"
    numbers = (base.value or 0.0, head.value or 0.0, *base.samples, *head.samples)
    if not all(0.0 < number < math.inf for number in numbers):
        return Verdict.INCONCLUSIVE, "a value is not finite and above 0, so there is no ratio"
    if max(numbers) / min(numbers) > LARGEST_RATIO:
        return Verdict.INCONCLUSIVE, "values lie so far apart that one of them measures nothing"
    missing = missing_history(base, head, policy)
    return None if missing is None else (Verdict.NOT_ENOUGH_HISTORY, missing)


def _settle(blank: CaseComparison, verdict: Verdict, reason: str) -> CaseComparison:
    """Close a case that needs no estimate; equal values differ by exactly nothing."""
    exact = 0.0 if verdict is Verdict.NO_CHANGE else None
    change = exact if verdict is Verdict.NO_CHANGE else blank.relative_change
    return replace(
        blank,
        verdict=verdict,
        relative_change=change,
        interval_low=exact,
        interval_high=exact,
        reason=reason,
    )


def _fill(blank: CaseComparison, found: Estimate, q_value: float) -> CaseComparison:
    return replace(
        blank,
        interval_low=math.expm1(found.shift.low),
        interval_high=math.expm1(found.shift.high),
        p_value=found.shift.p_value,
        q_value=q_value,
    )


def _judge(case: CaseComparison, found: Estimate, policy: Policy) -> CaseComparison:
    """Call a case changed, unchanged or undecided."""
    change, q_value = case.relative_change or 0.0, case.q_value or 0.0
    margin = policy.relevance_rel
    low, high = math.expm1(found.shift.low), math.expm1(found.shift.high)
    span = f"{change:+.1%} ({policy.confidence:.0%} interval {low:+.1%} to {high:+.1%})"
    if -margin <= low and high <= margin:
        reason = f"{span} lies within ±{margin:.1%}, by {found.ground}"
        return replace(case, verdict=Verdict.NO_CHANGE, reason=reason)
    if q_value <= policy.fdr and abs(change) >= margin:
        worse = (change > 0.0) == (case.direction == "lower")
        verdict = Verdict.REGRESSION if worse else Verdict.IMPROVEMENT
        reason = f"{span}, q = {q_value:.2g}, by {found.ground}; screened, not yet confirmed"
        return replace(case, verdict=verdict, reason=reason)
    needed = _needed_processes(change, found, policy)
    reason = (
        f"n = {case.n_base} and {case.n_head}: {span}, q = {q_value:.2g}, by {found.ground}; "
        f"{_what_would_decide(needed, policy)}"
    )
    return replace(case, needed_processes=needed, reason=reason)


def _needed_processes(change: float, found: Estimate, policy: Policy) -> int | None:
    """Count the processes a side that decide a case, if its change stays what it is now."""
    log_change = math.log1p(change)
    if abs(change) >= policy.relevance_rel:
        distance = abs(log_change)
    else:
        to_top = math.log1p(policy.relevance_rel) - log_change
        distance = min(to_top, log_change - math.log1p(-policy.relevance_rel))
    return needed_samples(found.deviation, distance, policy.confidence, policy.max_processes)


def _what_would_decide(needed: int | None, policy: Policy) -> str:
    if needed is None:
        return (
            f"even {policy.max_processes} interleaved processes a side would not decide it: "
            "the change sits on the margin or the noise is too large"
        )
    return f"about {needed} interleaved processes a side would decide it"


def _removed(
    base: dict[CaseKey, CaseResult], head: dict[CaseKey, CaseResult]
) -> list[CaseComparison]:
    """List the cases that only the baseline has."""
    found = []
    versions = _versions(head)
    for key, result in base.items():
        if key not in head:
            absent = replace(result, status="skipped", value=None, samples=(), n=0)
            reason = (
                _version_note(key, versions) or f"only on the baseline, where it is {result.status}"
            )
            found.append(_settle(_blank(result, absent), Verdict.REMOVED, reason))
    return found


def _new(base: dict[CaseKey, CaseResult], head: dict[CaseKey, CaseResult]) -> list[CaseComparison]:
    """List the cases that only the contender has; what failed or was skipped is called that."""
    verdicts = {"failed": Verdict.FAILED, "skipped": Verdict.SKIPPED}
    found = []
    versions = _versions(base)
    for key, result in head.items():
        if key not in base:
            absent = replace(result, status="skipped", value=None, samples=(), n=0)
            reason = (
                _version_note(key, versions)
                or f"only on the contender, where it is {result.status}"
            )
            verdict = verdicts.get(result.status, Verdict.NEW)
            found.append(_settle(_blank(absent, result), verdict, reason))
    return found


def _versions(keys: Iterable[CaseKey]) -> dict[tuple[str, ...], str]:
    """Give the version of each case under what else it is; the first one where it has several."""
    found: dict[tuple[str, ...], str] = {}
    for key in keys:
        found.setdefault(_but_for_version(key), key.version)
    return found


def _but_for_version(key: CaseKey) -> tuple[str, ...]:
    return key.benchmark, key.params, key.metric, key.machine, key.variant


def _version_note(key: CaseKey, versions: dict[tuple[str, ...], str]) -> str | None:
    """Say so where a case is one-sided only because its benchmark's version changed."""
    other = versions.get(_but_for_version(key))
    if other is None:
        return None
    return f"benchmark version {key.version} here, {other} on the other side"


def _naming_environments(
    case: CaseComparison,
    base: dict[CaseKey, CaseResult],
    head: dict[CaseKey, CaseResult],
) -> CaseComparison:
    """Say where the two sides ran under different runner environments."""
    sides = [side[case.key].environment for side in (base, head) if case.key in side]
    if len(sides) < 2 or None in sides or sides[0] == sides[1]:
        return case
    note = f"runner environments differ ({sides[0]} and {sides[1]}): the change may be the runner's"
    return replace(case, environment_differs=True, reason=f"{case.reason}; {note}")
