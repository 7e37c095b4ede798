"""A comparison as a check run: a conclusion, a line, and annotations where benchmarks stand.

Pure. What is annotated is the benchmark's file, as nobody knows the guilty line of the engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from dashboard.markdown import one_line
from dashboard.units import change_text
from dashboard.verdicts import headline, why
from db.compare import SEVERITY, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from db.compare import CaseComparison, CaseKey, Comparison
    from db.gate import Gate

NAME: Final = "ddtree-bench"
MOST_ANNOTATIONS: Final = 500  # GitHub takes 50 a call, and nobody reads more than this
LONGEST_SUMMARY: Final = 65_535

_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_LEVELS: Final[dict[Verdict, Literal["failure", "warning", "notice"]]] = {
    Verdict.REGRESSION: "failure",
    Verdict.FAILED: "failure",
    Verdict.REMOVED: "warning",
    Verdict.SKIPPED: "warning",
    Verdict.INCONCLUSIVE: "warning",
}

Conclusion = Literal["success", "failure", "neutral"]


@dataclass(frozen=True, slots=True)
class CheckRun:
    """What a check says of a commit."""

    head: str
    conclusion: Conclusion
    title: str
    summary: str  # Markdown
    annotations: tuple[dict[str, object], ...]


def check_run(comparison: Comparison, head: str, summary: str, gate: Gate | None) -> CheckRun:
    """Return the check of a comparison; without a gate nothing fails, and bad news is neutral."""
    answered = () if gate is None else tuple(one.case.key for one in gate.acknowledged)
    encoded = summary.encode()[:LONGEST_SUMMARY].decode(errors="ignore")
    notes = tuple(_annotations(comparison, answered))[:MOST_ANNOTATIONS]
    conclusion = _conclusion(comparison, gate, answered)
    return CheckRun(head, conclusion, headline(comparison), encoded, notes)


def _conclusion(
    comparison: Comparison, gate: Gate | None, answered: Collection[CaseKey]
) -> Conclusion:
    if gate is not None and not gate.passes:
        return "failure"
    good = {Verdict.NO_CHANGE, Verdict.IMPROVEMENT}
    left = [case.verdict for case in comparison.cases if case.key not in answered]
    gravest = min(left, key=SEVERITY.index, default=comparison.verdict)
    return "success" if gravest in good or (answered and not left) else "neutral"


def _annotations(
    comparison: Comparison, answered: Collection[CaseKey]
) -> Iterator[dict[str, object]]:
    for case in comparison.cases:
        level = _LEVELS.get(case.verdict)
        if level == "failure" and case.verdict is Verdict.REGRESSION and not case.confirmed:
            level = "warning"
        if case.verdict is Verdict.SKIPPED and not case.was_at_base:
            continue  # as before
        if case.key in answered:
            level = "notice"
        module = case.key.benchmark.split(".")[0]
        if level is not None and _MODULE.fullmatch(module):
            yield {
                "path": f"benchmarks/{module}.py",
                "start_line": 1,
                "end_line": 1,
                "annotation_level": level,
                "title": one_line(case.key.name)[:255],
                "message": _message(case),
            }


def _message(case: CaseComparison) -> str:
    change = change_text(case.relative_change)
    low, high = change_text(case.interval_low), change_text(case.interval_high)
    numbers = "" if case.interval_low is None else f" {change} [{low}, {high}]"
    note = one_line(why(case))
    return f"{case.verdict}{numbers}{f': {note}' if note else ''} on {one_line(case.key.machine)}"
