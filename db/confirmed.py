"""A comparison in which fresh pairs of the two commits decide what screening flagged.

Screening looks at all cases once and says where to look; only what was measured again, in turns,
may be told to anybody.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from db.cases import Comparison, Verdict
from db.compare import SEVERITY
from db.errors import DbError
from db.sequential import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from db.cases import CaseComparison

DECIDED = (Verdict.REGRESSION, Verdict.IMPROVEMENT, Verdict.NO_CHANGE, Verdict.INCONCLUSIVE)
NUMBERS = ("relative_change", "low", "high")
LARGEST = 1e9  # relative change; what is larger is no measurement


class ConfirmationError(DbError):
    """What says that cases were confirmed is not what `confirm` writes."""


def confirmed(comparison: Comparison, decisions: Mapping[str, Decision]) -> Comparison:
    """Let the decisions, by asv's names of cases, stand where both commits have a value.

    A case that failed or is gone stays so, whatever somebody says of pairs of it.
    """
    cases = [
        _confirmed(case, decisions[name])
        if case.unit == "seconds"
        and case.base_value is not None
        and case.head_value is not None
        and (name := asv_name(case.key.benchmark, case.key.params)) in decisions
        else case
        for case in comparison.cases
    ]
    return arranged(comparison, cases)


def arranged(comparison: Comparison, cases: Sequence[CaseComparison]) -> Comparison:
    """Give the comparison other cases: the gravest first, counted, with the verdict on them all."""
    ordered = sorted(cases, key=lambda case: SEVERITY.index(case.verdict))
    tally = Counter(case.verdict for case in ordered)
    verdict = min(tally, key=SEVERITY.index, default=comparison.verdict)
    counts = {one: tally[one] for one in Verdict}
    return Comparison(tuple(ordered), counts, verdict, comparison.policy)


def asv_name(benchmark: str, params: str) -> str:
    """Name a stored case as asv does: its values without their names."""
    values = [part.split("=", 1)[1] for part in params.split(", ") if "=" in part]
    return f"{benchmark}({', '.join(values)})" if values else benchmark


def _confirmed(case: CaseComparison, decision: Decision) -> CaseComparison:
    return replace(
        case,
        verdict=decision.verdict,
        relative_change=decision.relative_change,
        interval_low=decision.low,
        interval_high=decision.high,
        n_base=decision.pairs,
        n_head=decision.pairs,
        needed_processes=None,
        reason=f"{decision.pairs} fresh pairs in turns",
        confirmed=True,
    )


def read_decisions(found: object, base: str, head: str) -> dict[str, Decision]:
    """Read what `confirm --json` wrote for these two commits.

    Raises
    ------
    ConfirmationError
        It is something else, of other commits, or a number in it is none.
    """
    if not isinstance(found, dict) or not isinstance(found.get("cases"), dict):
        raise ConfirmationError("confirmation: expected an object with cases, got something else")
    if (found.get("base"), found.get("head")) != (base, head):
        raise ConfirmationError(
            f"confirmation: expected one of {base[:12]} and {head[:12]}, got other commits"
        )
    return {str(name): _decision(one) for name, one in found["cases"].items()}


def _decision(found: Any) -> Decision:  # noqa: ANN401 - JSON holds anything
    values = found if isinstance(found, dict) else {}
    numbers = [float(one) for name in NUMBERS if _is_finite(one := values.get(name, math.nan))]
    pairs, verdict = values.get("pairs"), values.get("verdict")
    if len(numbers) < len(NUMBERS):
        raise ConfirmationError(f"confirmation: expected finite {', '.join(NUMBERS)}, got others")
    if type(pairs) is not int or not 0 < pairs <= 10_000:
        raise ConfirmationError(f"confirmation: pairs: expected 1..10000, got {pairs!r:.40}")
    if verdict not in DECIDED:
        raise ConfirmationError(f"confirmation: expected a verdict, got {verdict!r:.40}")
    change, low, high = numbers
    if not (-1.0 <= low <= change <= high and change > -1.0):
        raise ConfirmationError(
            f"confirmation: expected a change above -1 within its interval, got {change:g} in "
            f"[{low:g}, {high:g}]"
        )
    is_slower = {Verdict.REGRESSION: True, Verdict.IMPROVEMENT: False}.get(Verdict(verdict))
    if is_slower is not None and is_slower != (change > 0.0):
        raise ConfirmationError(
            f"confirmation: expected no {verdict} of {change:g} (it is seconds)"
        )
    return Decision(Verdict(verdict), pairs, change, low, high)


def _is_finite(value: Any) -> bool:  # noqa: ANN401 - JSON holds anything
    return type(value) in {int, float} and abs(value) < LARGEST
