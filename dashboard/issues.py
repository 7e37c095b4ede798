"""One issue for each finding: opened, edited when it is seen again, closed when its level returns.

Found by marker and author, whatever it is called. What people close stays closed. Knows no forge:
it works on whatever lists, writes and edits issues.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from dashboard.forge_errors import ConnectionFailedError, ServerError
from dashboard.links import history_url
from dashboard.markdown import code, escape, fenced, head, one_line, row
from dashboard.pictures import levels_text
from dashboard.reproduce import bench_option
from dashboard.units import change_text, commit_text, display_unit
from dashboard.words import count_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dashboard.finding_reports import FindingReport, MovedCase, Reports
    from dashboard.forge_answers import Issue

MOST_NEW: Final = 10  # opened by one call: a broken night must not bury people
SHOWN_CASES: Final = 15
LONGEST_TITLE: Final = 200
LABEL: Final = "performance"
RUNNER_LABEL: Final = "runner"  # its keeper answers, not a commit's author
CLOSED_BY_US: Final = "<!-- ddtree-bench:closed -->"

Action = Literal["opened", "reopened", "updated", "closed", "unchanged", "left closed", "held back"]


class Issues(Protocol):
    """The issues of one repository, on any forge."""

    def read(self, author: str) -> Iterator[Issue]:
        """Yield those that an account opened, in any state."""

    def create(self, title: str, body: str, labels: Sequence[str]) -> Issue:
        """Open one more."""

    def edit(self, issue: Issue, changes: Mapping[str, str]) -> Issue:
        """Change title, body or state of one."""


@dataclass(frozen=True, slots=True)
class Told:
    """What became of a finding's issue."""

    action: Action
    finding: FindingReport
    url: str  # empty where there is none


@dataclass(slots=True)
class Teller:
    """Writes findings into issues, each into its own."""

    issues: Issues
    author: str
    dashboard: str | None = None

    def tell(self, reports: Reports) -> list[Told]:
        """Bring every finding's issue up to date; the newest findings stand first in `reports`."""
        ours = self._ours()
        told: list[Told] = []
        for finding in reports.findings:
            known = ours.get(finding.key)
            if known is not None:
                told.append(self._update(known, finding, reports.head))
            elif finding.is_live and finding.is_told:
                num_new = sum(one.action == "opened" for one in told)
                told.append(
                    self._open(finding, reports.head)
                    if num_new < MOST_NEW
                    else Told("held back", finding, "")
                )
        return told

    def _ours(self) -> dict[str, Issue]:
        """Give the oldest issue of each marker; of anybody else's a marker says nothing."""
        found: dict[str, Issue] = {}
        wanted = self.author.lower()
        for issue in self.issues.read(self.author):
            key = _key_in(issue.body)
            if key is None or issue.author.lower() != wanted:
                continue
            if key not in found or issue.number < found[key].number:
                found[key] = issue
        return found

    def _open(self, finding: FindingReport, seen: str) -> Told:
        text = body(finding, seen=seen, dashboard=self.dashboard)
        labels = [LABEL, *([RUNNER_LABEL] if finding.owner.startswith("runner ") else [])]
        try:
            made = self.issues.create(title(finding), text, labels)
        except (ServerError, ConnectionFailedError):
            # Nobody knows whether it was opened; a second one would be worse than an error.
            lost = self._ours().get(finding.key)
            if lost is None:
                raise
            made = lost
        return Told("opened", finding, made.url)

    def _update(self, issue: Issue, finding: FindingReport, seen: str) -> Told:
        by_us = CLOSED_BY_US in issue.body
        if not issue.is_open and (not finding.is_live or not by_us):
            return Told("left closed", finding, issue.url)
        wanted = {
            "title": title(finding),
            "body": body(finding, seen=seen, dashboard=self.dashboard),
        }
        if not finding.is_live:
            reason = "completed" if finding.said.startswith("fixed") else "not_planned"
            wanted |= {"state": "closed", "state_reason": reason}
        elif not issue.is_open:
            wanted |= {"state": "open"}
        elif (_plain(issue.body), issue.title) == (_plain(wanted["body"]), wanted["title"]):
            return Told("unchanged", finding, issue.url)
        action: Action = "updated" if finding.is_live else "closed"
        if finding.is_live and not issue.is_open:
            action = "reopened"
        return Told(action, finding, self.issues.edit(issue, wanted).url)


def title(finding: FindingReport) -> str:
    """Return one line of plain text; titles hold no Markdown, but mentions would be sent."""
    first = finding.cases[0]
    cases = first.name if finding.num_cases == 1 else count_text(finding.num_cases, "case")
    change = change_text(first.relative_change)
    about = f"up to {change}" if finding.num_cases > 1 else change
    text = f"{cases} slower on {finding.machine} since {finding.commit[:10]}: {about}"
    return one_line(text.replace("@", "@\u200b"))[:LONGEST_TITLE]


def body(finding: FindingReport, *, seen: str, dashboard: str | None = None) -> str:
    """Return an issue's Markdown, marker included; the same finding gives the same text."""
    parts = [
        _verdict(finding, seen),
        f"{escape(finding.summary)}\n" if finding.summary else "",
        *_table(finding.cases, dashboard, finding.machine),
        _rest(finding),
        _picture(finding),
        *_what_to_do(finding),
        f"<!-- ddtree-bench:finding:{finding.key} -->",
    ]
    if not finding.is_live:
        parts.append(CLOSED_BY_US)
    return "\n".join(part for part in parts if part)


def _verdict(finding: FindingReport, seen: str) -> str:
    cases = count_text(finding.num_cases, "case")
    where = f"on {code(finding.machine)} since {code(commit_text(finding.commit))}"
    word = "slower" if finding.is_live else "were slower"
    state = (
        f"Still so at {code(commit_text(seen))}, measured last."
        if finding.is_live
        else f"Closed: {escape(finding.said)}."
    )
    said = f"Last said of it: {escape(finding.said)}. " if finding.is_live else ""
    return (
        f"**{cases} {word} {where}** (likely cause {escape(finding.cause)}, owner "
        f"{escape(finding.owner)}). {said}{state}\n"
    )


def _table(cases: Sequence[MovedCase], dashboard: str | None, machine: str) -> Iterator[str]:
    yield head(("case", "before → after", "change"), right=("before → after", "change"))
    for case in cases[:SHOWN_CASES]:
        unit = display_unit(case.unit, case.after)
        values = f"{escape(unit.text(case.before))} → {escape(unit.text(case.after))}"
        name = code(case.name)
        if dashboard is not None:
            name = f"[{name}]({history_url(dashboard, case.benchmark, case.params, machine)})"
        yield row((name, values, change_text(case.relative_change)))


def _rest(finding: FindingReport) -> str:
    left = finding.num_cases - min(len(finding.cases), SHOWN_CASES)
    return f"\nAnd {count_text(left, 'case')} more.\n" if left else ""


def _picture(finding: FindingReport) -> str:
    """Draw the first case's results over the commits, in characters that every forge shows."""
    if len(finding.levels) < 2:
        return ""
    drawn = levels_text(finding.levels)
    return f"\n`{drawn}` {code(finding.cases[0].name)}, oldest first\n"


def _what_to_do(finding: FindingReport) -> Iterator[str]:
    numbers = " ".join(str(number) for number in finding.numbers)
    number = finding.numbers[0] if finding.numbers else "NUMBER"
    if not finding.is_live:
        return
    if finding.previous is not None:
        first = finding.cases[0]
        ends = f"{finding.previous} {finding.commit}"
        case = bench_option(first.benchmark, first.params)
        again = f"ddtree-bench confirm {ends} --profile full{case}"
        between = f"git log --oneline {finding.previous}..{finding.commit}"
        yield "\nMeasure it again, both commits in turns, and see what lies between:\n"
        yield f"{fenced(again, between)}\n"
    yield (
        f"Its alerts are {numbers}. Meant, or no regression? "
        f'`ddtree-bench alerts set {number} expected --author YOU --note WHY` (or `"false '
        'positive"`) closes this issue the next night, and so does the return of the level. '
        "Closed by hand, it stays closed.\n"
    )


def _key_in(text: str) -> str | None:
    start = text.rfind("<!-- ddtree-bench:finding:")
    key = text[start + 26 : start + 42] if start >= 0 else ""
    return key if len(key) == 16 and text[start + 42 : start + 46] == " -->" else None


def _plain(text: str) -> str:
    return "\n".join(text.split("\r\n")).strip()


def counted(told: Sequence[Told]) -> str:
    """Count what was done: "1 opened, 2 updated"."""
    tally = Counter(one.action for one in told)
    return ", ".join(f"{count} {action}" for action, count in tally.items()) or "nothing to tell"
