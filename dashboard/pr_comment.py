"""A comparison as the Markdown of one pull-request comment.

Pure: the same comparison and context give the same text. One line says the verdict; findings stand
open with their diagnosis and the command that repeats them; what to do follows; the rest is folded,
and the whole stays under GitHub's limit by leaving out rows and saying how many.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dashboard.comment_advice import again, steps
from dashboard.comment_tables import Look, Section, fill, percent, size
from dashboard.markdown import code, escape, fenced, html_code
from dashboard.units import change_text, commit_text
from dashboard.verdicts import counted, headline, is_screened
from dashboard.words import count_text
from db.change_queries import ExplainedCases
from db.compare import SEVERITY, Verdict
from db.moved_cases import findings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from db.compare import CaseComparison, Comparison
    from db.gate import Gate, Stopped

MARKER: Final = "<!-- ddtree-bench:suite -->"
LIMIT_BYTES: Final = 65_536  # GitHub's limit is as many characters; no text has more of them
OPEN_ROWS: Final = 15  # of a table that is not folded
OPEN_FINDINGS: Final = 3  # the others are folded

_GONE: Final = (Verdict.FAILED, Verdict.REMOVED, Verdict.SKIPPED)
_MOVED: Final = {Verdict.REGRESSION: "regressed", Verdict.IMPROVEMENT: "improved"}


@dataclass(frozen=True, slots=True)
class CommentContext:
    """What the comment says about where its numbers come from, and what they come to."""

    base: str  # full commit hashes
    head: str
    profile: str = "full"  # of the suite, for the command that measures again
    newest: str | None = None  # the pull request's newest commit, where it is not `head`
    dashboard: str | None = None  # where it is served, for links
    policy: str = ".github/gate.toml"  # where regressions are acknowledged
    gate: Gate | None = None  # None: nobody asked for one

    def answer(self, case: CaseComparison) -> Stopped | None:
        """Return who answers for a case; None where nobody does."""
        known = () if self.gate is None else self.gate.acknowledged
        return next((one for one in known if one.case.key == case.key), None)

    def is_told_only(self, case: CaseComparison) -> bool:
        """Whether a case that fresh pairs decided is of a suite that nobody requires."""
        known = () if self.gate is None else self.gate.informational
        return case.confirmed and any(one.case.key == case.key for one in known)


def render(
    comparison: Comparison,
    context: CommentContext,
    found: Sequence[ExplainedCases] = (),
    limit_bytes: int = LIMIT_BYTES,
) -> str:
    """Return the comment's Markdown, marker included, under the forge's limit.

    `found` are the groups of flagged cases, the largest first; what changed with them is said.
    """
    groups = list(found) or [ExplainedCases(one, ()) for one in findings(comparison)]
    opening = "\n".join(_opening(comparison, context))
    closing = "\n".join(_closing(comparison, context))
    ending = f"{_reading(comparison)}\n{MARKER}"
    shown, folded = _sections(comparison, context, groups)
    look = Look(
        show_machine=len({case.key.machine for case in comparison.cases}) > 1,
        relevance_rel=comparison.policy.relevance_rel,
        dashboard=context.dashboard,
    )
    longest_note = _left_out({one.verdict: len(comparison.cases) for one in (*shown, *folded)})
    room = limit_bytes - sum(map(size, (opening, closing, longest_note, ending)))
    open_tables, left_out = fill(shown, room, look)
    room -= sum(map(size, open_tables))
    tables, more = fill(folded, room, look)
    for verdict, count in more.items():
        left_out[verdict] = left_out.get(verdict, 0) + count
    parts = (opening, *open_tables, closing, *tables, _left_out(left_out), ending)
    return "\n".join(part for part in parts if part)


def _opening(comparison: Comparison, context: CommentContext) -> Iterator[str]:
    word = headline(comparison, _word(comparison, context))
    yield f"**{word}** ({code(commit_text(context.base))} {said_of(context.head)}\n"
    if context.newest is not None:
        yield (
            f"> [!WARNING]\n> Stale: the newest commit is {code(commit_text(context.newest))}, and "
            f"these are results of {code(commit_text(context.head))}.\n"
        )
    if context.gate is not None:
        yield _gate_line(context.gate)
    if is_confirmed(comparison):
        yield "Confirmed: both commits were measured again, fresh and in turns.\n"
    elif not _changed(comparison) and any(case.confirmed for case in comparison.cases):
        yield (
            "Nothing is confirmed: what one pass flagged was measured again, both commits fresh "
            "and in turns, and no change stood.\n"
        )
    elif is_screened(comparison):
        yield (
            "Screened, not confirmed: one pass over all cases, at a false-discovery rate of "
            f"{percent(comparison.policy.fdr)}. Only a fresh, interleaved re-run confirms.\n"
        )
    moved = sum(case.environment_differs for case in comparison.cases)
    if moved:
        yield (
            f"> [!WARNING]\n> The runner environment (GPU, driver, clocks) differs between base "
            f"and head in {moved} of {len(comparison.cases)} cases, marked †: a difference there "
            "may belong to the runner and not to the commit. Measure both again on one runner.\n"
        )


def said_of(head: str) -> str:
    """Return what stands in the first line of every comment on a commit, and of no other."""
    return f"→ {code(commit_text(head))})"


def is_confirmed(comparison: Comparison) -> bool:
    """Return whether fresh pairs decided every case that is called changed, and any at all."""
    changed = _changed(comparison)
    return bool(changed) and all(case.confirmed for case in changed)


def _changed(comparison: Comparison) -> list[CaseComparison]:
    moved = {Verdict.REGRESSION, Verdict.IMPROVEMENT}
    return [case for case in comparison.cases if case.verdict in moved]


def _word(comparison: Comparison, context: CommentContext) -> str | None:
    """Return another word for the verdict where the case itself says less than it does."""
    worse = [case for case in comparison.cases if case.verdict is Verdict.REGRESSION]
    if not worse:
        return None
    if all(context.answer(case) is not None for case in worse):
        return "Acknowledged"
    if not any(case.confirmed for case in worse):
        return "Suspected"
    return None


def _gate_line(gate: Gate) -> str:
    """Say whether the check lets the change in, and who answers for what."""
    if not gate.passes:
        return f"The check fails: {count_text(len(gate.stopped), 'case')} in the way.\n"
    told = ", ".join(
        f"{len(group)} {words}"
        for group, words in (
            (gate.acknowledged, "acknowledged"),
            (gate.informational, "told only"),
        )
        if group
    )
    return f"The check passes{f': {told}' if told else ''}.\n"


def _sections(
    comparison: Comparison, context: CommentContext, groups: Sequence[ExplainedCases]
) -> tuple[list[Section], list[Section]]:
    """Return the tables that stand open, the gravest first, and those that are folded."""
    cases = comparison.cases
    worse = [one for one in groups if one.moved.verdict == Verdict.REGRESSION]
    better = [one for one in groups if one.moved.verdict != Verdict.REGRESSION]
    grave = [case for case in cases if _is_grave(case)]
    leading = worse if grave else better
    by_name: dict[tuple[str, str, str], list[CaseComparison]] = defaultdict(list)
    for case in cases:
        by_name[case.key.machine, case.key.name, case.verdict.value].append(case)
    found: list[Section] = []
    for number, one in enumerate((*worse, *better), start=1):
        moved = one.moved
        members = [by_name[moved.machine, name, moved.verdict].pop(0) for name in moved.cases]
        is_open = one in leading[:OPEN_FINDINGS]
        title = f"{number}. {_title(one, members, code if is_open else html_code)}"
        found += _finding(title, one, members, context, is_open=is_open)
    told = {id(case) for section in found for case in section.cases}
    is_quiet = not (grave or better)
    for verdict in SEVERITY:
        rest = [case for case in cases if case.verdict is verdict and id(case) not in told]
        is_first = verdict is Verdict.INCONCLUSIVE and is_quiet
        opened = [case for case in rest if is_first or case in grave]
        folded = [case for case in rest if case not in opened]
        found += _plain(verdict, opened[:OPEN_ROWS], is_open=True)
        found += _plain(verdict, opened[OPEN_ROWS:], "further ")
        found += _plain(verdict, folded)
    return [one for one in found if not one.is_folded], [one for one in found if one.is_folded]


def _is_grave(case: CaseComparison) -> bool:
    """Whether a case got worse, failed, or was measured at the base and is no more."""
    is_gone = case.verdict in _GONE and case.was_at_base
    return is_gone or case.verdict in {Verdict.REGRESSION, Verdict.FAILED, Verdict.REMOVED}


def _plain(
    verdict: Verdict, cases: Sequence[CaseComparison], more: str = "", *, is_open: bool = False
) -> Iterator[Section]:
    """Give the table of cases that no finding holds; nothing without any."""
    if cases:
        title = counted(verdict, len(cases), more)
        yield Section(verdict, tuple(cases), title, is_folded=not is_open)


def _title(
    one: ExplainedCases, members: Sequence[CaseComparison], as_code: Callable[[str], str]
) -> str:
    """Say what moved, how far, where, by what, and whether that is certain."""
    moved, first = one.moved, members[0]
    which = as_code(first.key.name) if len(members) == 1 else f"{len(members)} cases"
    change = change_text(moved.relative_change)
    word = _MOVED[Verdict(moved.verdict)]
    if first.unit == "seconds" and first.direction == "lower":
        word = "slower" if moved.relative_change > 0 else "faster"
        change = change.lstrip("+\N{MINUS SIGN}")
    about = "" if len(members) == 1 else "about "
    doubt = "" if all(case.confirmed for case in members) else ", not confirmed"
    return (
        f"{which} {word} by {about}{change} on {as_code(moved.machine)}{doubt}; "
        f"likely cause: {escape(moved.cause)}"
    )


def _finding(
    title: str,
    one: ExplainedCases,
    members: Sequence[CaseComparison],
    context: CommentContext,
    *,
    is_open: bool,
) -> Iterator[Section]:
    """Give a finding's table with diagnosis and command, and what of it does not stand open."""
    verdict = Verdict(one.moved.verdict)
    answers = dict.fromkeys(
        answer.reason for case in members if (answer := context.answer(case)) is not None
    )
    said = [f"{escape(text[:1].upper() + text[1:])}." for text in answers]
    if all(context.is_told_only(case) for case in members):
        said.append("Told only: its suite is not required.")
    said += [escape(one.summary)] if one.summary else []
    before = "".join(f"{text}\n" for text in said)
    if not is_open:
        yield Section(verdict, tuple(members), title, before=before)
        return
    command = again(*_ends(context), members[0], context.profile)
    after = f"{fenced(command)}\n"
    first = tuple(members[:OPEN_ROWS])
    yield Section(verdict, first, title, is_folded=False, before=before, after=after)
    yield from _plain(verdict, members[OPEN_ROWS:], "further ")


def _closing(comparison: Comparison, context: CommentContext) -> Iterator[str]:
    """Say what to do, one step for each kind of news."""
    answered = [
        case
        for case in comparison.cases
        if context.answer(case) is not None or context.is_told_only(case)
    ]
    yield "**What to do**\n"
    if context.newest is not None:
        yield (
            "First label the pull request again: what follows is of an older commit, and the "
            "newest one was not measured.\n"
        )
    yield from steps(comparison, answered, context.policy, _ends(context), context.profile)


def _ends(context: CommentContext) -> tuple[str, str]:
    """Return both commits as people type them."""
    return context.base[:12], context.head[:12]


def _reading(comparison: Comparison) -> str:
    policy = comparison.policy
    return (
        "<details><summary>How to read this</summary>\n\n"
        "Commands run in a checkout of this repository, on the machine that is named: times of two "
        "machines do not compare. "
        f"A change counts from {percent(policy.relevance_rel)} on; intervals are at "
        f"{percent(policy.confidence)}, of confirmed cases higher; noise is what the series shows "
        "without a cause; n is the number of samples at base and at head. A confirmed case has the "
        "change, the interval and the number of its pairs, and the values of the first pass. In "
        "pictures ● is the change, ─ its interval, ░ the noise, │ no change.\n\n"
        "</details>\n"
    )


def _left_out(counts: dict[Verdict, int]) -> str:
    if not counts:
        return ""
    parts = ", ".join(counted(verdict, count) for verdict, count in counts.items())
    return f"Left out, for GitHub's limit on a comment: {parts}.\n"


__all__ = ["LIMIT_BYTES", "MARKER", "CommentContext", "is_confirmed", "render", "said_of"]
