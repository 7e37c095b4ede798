"""Findings in the order in which a reader with two minutes should see them, and one line on them.

Arranges and counts records of `db.queries`; judges nothing anew.
"""

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dashboard.units import change_text, commit_text
from dashboard.words import case_name, count_text, escaped
from db.queries import Finding

# A level change that is put down to noise is shown after everything that has an owner.
_LAST_CAUSE = "noise"


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """All findings that begin at one commit, the worst first."""

    commit: str
    findings: tuple[Finding, ...]

    @property
    def commit_date(self) -> dt.datetime:
        """When it was committed."""
        return self.findings[0].commit_date

    @property
    def subject(self) -> str | None:
        """First line of the commit's message; None without its repository."""
        return self.findings[0].subject

    @property
    def summary(self) -> str:
        """How many cases got worse and better."""
        return counted(self.findings)


@dataclass(frozen=True, slots=True)
class VerdictLine:
    """The first thing a reader is told, in Markdown."""

    text: str
    is_alarming: bool


def group_findings(findings: Sequence[Finding]) -> list[FindingGroup]:
    """Group findings by commit, the group with the worst regression first."""
    by_commit: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_commit[finding.commit].append(finding)
    groups = [
        FindingGroup(commit, tuple(sorted(found, key=_urgency)))
        for commit, found in by_commit.items()
    ]
    return sorted(groups, key=lambda group: _urgency(group.findings[0]))


def standing(findings: Sequence[Finding]) -> list[Finding]:
    """Keep the latest finding of each series: what a later change replaced stands no more."""
    of_series: dict[int, list[Finding]] = defaultdict(list)
    for finding in sorted(findings, key=lambda one: one.commit_date):
        of_series[finding.series_id].append(finding)
    latest = {series_id: _latest(found) for series_id, found in of_series.items()}
    return [finding for finding in findings if latest[finding.series_id] is finding]


def replaced(findings: Sequence[Finding]) -> list[Finding]:
    """Keep the findings that a later one of their series took the place of."""
    stands = {(one.series_id, one.commit) for one in standing(findings)}
    return [one for one in findings if (one.series_id, one.commit) not in stands]


def verdict_line(findings: Sequence[Finding]) -> VerdictLine:
    """Say in one line what stands."""
    if not findings:
        return VerdictLine(
            "No change point is stored. `ddtree-bench detect` looks for them in every series.",
            is_alarming=False,
        )
    latest = standing(findings)
    regressions = [finding for finding in latest if finding.is_regression]
    if not regressions:
        return VerdictLine(f"No regression stands: {counted(latest)}.", is_alarming=False)
    worst = min(regressions, key=_urgency)
    case = case_name(worst.benchmark, worst.params)
    return VerdictLine(
        f"**{counted(latest)}** {'stands' if len(latest) == 1 else 'stand'}. "
        f"Worst: **{change_text(worst.relative_change)}** in "
        f"**{escaped(case)}** on {escaped(worst.machine)} since `{commit_text(worst.commit)}` "
        f"(cause: {worst.cause}).",
        is_alarming=True,
    )


def _latest(by_date: Sequence[Finding]) -> Finding:
    """Give the last by the rank of its commit, as histories have it; by date where one has none."""
    last = by_date[-1]
    for finding in by_date:
        if finding.position is None or last.position is None:
            return by_date[-1]
        if finding.position > last.position:
            last = finding
    return last


def counted(findings: Sequence[Finding]) -> str:
    """Count regressions and improvements: "2 regressions, 1 improvement"."""
    num_worse = sum(finding.is_regression for finding in findings)
    counts = ((num_worse, "regression"), (len(findings) - num_worse, "improvement"))
    return ", ".join(count_text(count, word) for count, word in counts if count)


def _urgency(finding: Finding) -> tuple[bool, bool, float]:
    return (
        finding.cause == _LAST_CAUSE,
        not finding.is_regression,
        -abs(finding.relative_change),
    )
