"""Verdicts in words, the same in a terminal and in a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dashboard.units import change_text
from db.compare import SEVERITY, Verdict
from db.numbers import count_text

if TYPE_CHECKING:
    from db.compare import CaseComparison, Comparison
    from db.moved_cases import MovedCases

HEADLINES: Final = {
    Verdict.REGRESSION: "Regressed",
    Verdict.FAILED: "Failed",
    Verdict.REMOVED: "Cases are missing",
    Verdict.INCONCLUSIVE: "Inconclusive",
    Verdict.NOT_ENOUGH_HISTORY: "Not enough history",
    Verdict.IMPROVEMENT: "Improved",
    Verdict.NO_CHANGE: "No change",
    Verdict.NEW: "Nothing to compare",
    Verdict.SKIPPED: "Nothing was measured",
}
_PLURALS: Final = {Verdict.REGRESSION: "regressions", Verdict.IMPROVEMENT: "improvements"}
_COUNTED: Final = {
    Verdict.NO_CHANGE: "unchanged",
    Verdict.NOT_ENOUGH_HISTORY: "without enough history",
}
_BY_NUMBERS: Final = frozenset({Verdict.REGRESSION, Verdict.IMPROVEMENT, Verdict.NO_CHANGE})


def headline(comparison: Comparison, word: str | None = None) -> str:
    """Return the verdict on the whole, or another word for it, and its counts, on one line."""
    word = word or HEADLINES[comparison.verdict]
    counts = [
        counted(verdict, count)
        for verdict in SEVERITY
        if (count := comparison.counts.get(verdict, 0))
    ]
    cases = count_text(len(comparison.cases), "case")
    return f"{word}: {', '.join(counts)} of {cases}" if counts else f"{word}: no cases"


def counted(verdict: Verdict, count: int, more: str = "") -> str:
    """Return a number of cases with their verdict, such as `2 further regressions`."""
    if verdict in _COUNTED:
        return f"{count:,} {more}{_COUNTED[verdict]}"
    word = verdict.value if count == 1 else _PLURALS.get(verdict, verdict.value)
    return f"{count:,} {more}{word}"


def why(case: CaseComparison) -> str:
    """Return what the numbers of a case do not say by themselves; nothing where they do."""
    if case.verdict in _BY_NUMBERS:
        return ""
    if case.confirmed and case.verdict is Verdict.INCONCLUSIVE:
        return f"open after {case.n_head} fresh pairs: only a quieter machine decides it"
    if case.needed_processes is not None:
        return f"about {case.needed_processes} interleaved processes a side would decide it"
    return case.reason


def is_screened(comparison: Comparison) -> bool:
    """Return whether a case was judged by numbers that nothing confirmed yet."""
    return any(not case.confirmed and case.interval_low is not None for case in comparison.cases)


def told(moved: MovedCases) -> str:
    """Return in a line what moved together and what it likely belongs to."""
    cases = count_text(len(moved.cases), "case")
    return (
        f"{moved.verdict}: {cases} on {moved.machine} moved together by about "
        f"{change_text(moved.relative_change)}, likely cause {moved.cause}"
    )
