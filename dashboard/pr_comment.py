"""A comparison as the Markdown of one pull-request comment.

Pure: the same comparison and context give the same text. One line says the verdict, the gravest
table stands open, everything else is folded, and the whole stays under GitHub's limit by leaving
out folded rows and saying how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlencode

from dashboard.markdown import code, escape, head, row
from dashboard.units import change_text, commit_text, display_unit
from dashboard.verdicts import counted, headline, is_screened, told, why
from db.compare import Verdict
from db.numbers import MISSING, digits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from db.change_queries import ExplainedCases
    from db.compare import CaseComparison, Comparison

MARKER: Final = "<!-- ddtree-bench:suite -->"
LIMIT_BYTES: Final = 65_536  # GitHub's limit is as many characters; no text has more of them
OPEN_ROWS: Final = 15  # of a table that is not folded
OPEN_FINDINGS: Final = 3  # whose change is said in words

_WITHOUT_NUMBERS: Final = frozenset({Verdict.FAILED, Verdict.NEW, Verdict.REMOVED, Verdict.SKIPPED})
_WITH_REASON: Final = frozenset({Verdict.INCONCLUSIVE, Verdict.NOT_ENOUGH_HISTORY})
_FIRST_SHOWN: Final = (
    (Verdict.REGRESSION, Verdict.FAILED, Verdict.REMOVED),
    (Verdict.IMPROVEMENT,),
    (Verdict.INCONCLUSIVE,),
)
_NUMBERS: Final = ("base → head", "change", "interval", "noise", "n")


@dataclass(frozen=True, slots=True)
class CommentContext:
    """What the comment says about where its numbers come from."""

    base: str  # full commit hashes
    head: str
    profile: str = "full"  # of the suite, for the command that measures again
    newest: str | None = None  # the pull request's newest commit, where it is not `head`
    dashboard: str | None = None  # where it is served, for links
    policy: str = "the gate's policy file"  # where regressions are acknowledged


@dataclass(frozen=True, slots=True)
class _Section:
    """One table: its title, whether it is folded, and the cases in it."""

    verdict: Verdict
    cases: tuple[CaseComparison, ...]
    folded: bool
    title: str
    dashboard: str | None = None  # where a case's name leads to; None: nowhere

    def rows(self, *, show_machine: bool) -> Iterator[str]:
        return (
            _row(case, show_machine=show_machine, dashboard=self.dashboard) for case in self.cases
        )

    def wrap(self, rows: Sequence[str], *, show_machine: bool) -> str:
        titles = _titles(self.verdict, show_machine=show_machine)
        table = "\n".join([head(titles, right=_NUMBERS), *rows])
        if not self.folded:
            return f"**{self.title}**\n\n{table}\n"
        summary = f"<summary>{self.title}</summary>"
        return f"<details>{summary}\n\n{table}\n\n</details>\n"


def render(
    comparison: Comparison,
    context: CommentContext,
    found: Sequence[ExplainedCases] = (),
    limit_bytes: int = LIMIT_BYTES,
) -> str:
    """Return the comment's Markdown, marker included, under the forge's limit.

    `found` are the groups of flagged cases, the largest first; what changed with them is said.
    """
    opening = "\n".join((*_opening(comparison, context), *_why(found)))
    closing = "\n".join(_closing(comparison, context))
    sections = _sections(comparison.cases, context.dashboard)
    longest_note = _left_out({section.verdict: len(comparison.cases) for section in sections})
    room = limit_bytes - sum(map(_size, (opening, closing, longest_note)))
    tables, left_out = _fill(sections, room, show_machine=_machines(comparison.cases) > 1)
    note = _left_out(left_out)
    return "\n".join(part for part in (opening, *tables, note, closing) if part)


def _opening(comparison: Comparison, context: CommentContext) -> Iterator[str]:
    commits = f"{code(commit_text(context.base))} → {code(commit_text(context.head))}"
    yield f"**{headline(comparison)}** ({commits})\n"
    if context.newest is not None:
        yield (
            f"> [!WARNING]\n> Stale: the newest commit is {code(commit_text(context.newest))}, and "
            f"these are results of {code(commit_text(context.head))}. Ask for a new measurement.\n"
        )
    if is_confirmed(comparison):
        yield "Confirmed: both commits were measured again, fresh and in turns.\n"
    elif is_screened(comparison):
        yield (
            "Screened, not confirmed: one pass over all cases, at a false-discovery rate of "
            f"{_percent(comparison.policy.fdr)}. Only a fresh, interleaved re-run confirms.\n"
        )
    moved = sum(case.environment_differs for case in comparison.cases)
    if moved:
        yield (
            f"> [!WARNING]\n> The runner environment (GPU, driver, clocks) differs between base "
            f"and head in {moved} of {len(comparison.cases)} cases, marked †: a difference there "
            "may belong to the runner and not to the commit.\n"
        )


def is_confirmed(comparison: Comparison) -> bool:
    """Return whether fresh pairs decided every case that is called changed, and any at all."""
    changed = {Verdict.REGRESSION, Verdict.IMPROVEMENT}
    cases = comparison.cases
    return any(case.confirmed for case in cases) and all(
        case.confirmed for case in cases if case.verdict in changed
    )


def _why(found: Sequence[ExplainedCases]) -> Iterator[str]:
    """Say of the first groups what moved with them; nothing where nothing is known."""
    for one in found[:OPEN_FINDINGS]:
        if one.claims:
            yield f"{escape(told(one.moved))}. {escape(one.summary)}\n"


def _closing(comparison: Comparison, context: CommentContext) -> Iterator[str]:
    policy = comparison.policy
    run = f"ddtree-bench run --profile {context.profile} --commits"
    yield (
        "<details><summary>How to measure again, and how to read this</summary>\n\n```sh\n"
        f"{run} '{context.base}^!'\n{run} '{context.head}^!'\n"
        f"ddtree-bench compare {context.base} {context.head}\n"
        f"ddtree-bench confirm {context.base} {context.head} --profile {context.profile}\n"
        "```\n\n"
        f"A change counts from {_percent(policy.relevance_rel)} on; intervals are at "
        f"{_percent(policy.confidence)}; noise is what the series shows without a cause; "
        "n is the number of samples at base and at head.\n\n</details>\n"
    )
    if any(case.verdict is Verdict.REGRESSION for case in comparison.cases):
        yield (
            "Meant to be slower? Somebody who answers for it adds an `[[acknowledged]]` entry to "
            f"{context.policy}, with a day until which it counts. `ddtree-bench bisect` names the "
            "commit where several are new.\n"
        )
    yield MARKER


def _sections(cases: Sequence[CaseComparison], dashboard: str | None) -> list[_Section]:
    """Return the tables, the gravest open and first."""
    present = {case.verdict for case in cases}
    shown = next((group for group in _FIRST_SHOWN if present.intersection(group)), ())
    sections = [
        _Section(
            verdict,
            group[:OPEN_ROWS],
            folded=False,
            title=counted(verdict, len(group)),
            dashboard=dashboard,
        )
        for verdict in shown
        if (group := _of(cases, verdict))
    ]
    for verdict in Verdict:
        rest = _of(cases, verdict)[OPEN_ROWS if verdict in shown else 0 :]
        if rest:
            more = "further " if verdict in shown else ""
            title = counted(verdict, len(rest), more)
            sections.append(_Section(verdict, rest, folded=True, title=title))
    return sections


def _of(cases: Iterable[CaseComparison], verdict: Verdict) -> tuple[CaseComparison, ...]:
    return tuple(case for case in cases if case.verdict is verdict)


def _titles(verdict: Verdict, *, show_machine: bool) -> tuple[str, ...]:
    case = ("case", "machine") if show_machine else ("case",)
    if verdict in _WITHOUT_NUMBERS:
        return (*case, "why")
    return (*case, *_NUMBERS, *(("what would decide it",) if verdict in _WITH_REASON else ()))


def _row(case: CaseComparison, *, show_machine: bool, dashboard: str | None) -> str:
    shown = code(case.key.name)
    if dashboard is not None:
        shown = f"[{shown}]({_history(dashboard, case)})"
    name = (shown, code(case.key.machine)) if show_machine else (shown,)
    if case.verdict in _WITHOUT_NUMBERS:
        return row((*name, escape(why(case))))
    reason = (escape(why(case)),) if case.verdict in _WITH_REASON else ()
    return row((*name, *_numbers(case), *reason))


def _history(dashboard: str, case: CaseComparison) -> str:
    """Return the address of the page that draws a case's series; all of it is percent-encoded."""
    asked = urlencode(
        {"benchmark": case.key.benchmark, "machine": case.key.machine},
        quote_via=quote,
        safe="",
        errors="replace",
    )
    return f"{dashboard.rstrip('/')}/history?{asked}"


def _numbers(case: CaseComparison) -> tuple[str, ...]:
    unit = display_unit(case.unit, case.head_value or case.base_value)
    values = f"{escape(unit.text(case.base_value))} → {escape(unit.text(case.head_value))}"
    better = " (higher is better)" if case.direction == "higher" else ""
    mark = " †" if case.environment_differs else ""
    low, high = change_text(case.interval_low), change_text(case.interval_high)
    interval = MISSING if case.interval_low is None else f"{low} … {high}"
    noise = MISSING if case.noise_rel is None else f"±{_percent(case.noise_rel)}"
    change = f"{change_text(case.relative_change)}{better}{mark}"
    return values, change, interval, noise, f"{case.n_base} / {case.n_head}"


def _fill(
    sections: Sequence[_Section], room: int, *, show_machine: bool
) -> tuple[list[str], dict[Verdict, int]]:
    """Return the tables that fit into `room` bytes and the number of cases that did not."""
    tables: list[str] = []
    left_out: dict[Verdict, int] = {}
    for section in sections:
        rows: list[str] = []
        used = _size(section.wrap((), show_machine=show_machine))
        for line in section.rows(show_machine=show_machine):
            used += _size(line)
            if used > room:
                break
            rows.append(line)
        missing = len(section.cases) - len(rows)
        if missing:
            left_out[section.verdict] = left_out.get(section.verdict, 0) + missing
        if rows:
            tables.append(section.wrap(rows, show_machine=show_machine))
            room -= _size(tables[-1])
    return tables, left_out


def _left_out(counts: dict[Verdict, int]) -> str:
    if not counts:
        return ""
    parts = ", ".join(counted(verdict, count) for verdict, count in counts.items())
    return f"Left out, for GitHub's limit on a comment: {parts}.\n"


def _percent(ratio: float) -> str:
    return f"{digits(100 * ratio, 2)} %"


def _machines(cases: Iterable[CaseComparison]) -> int:
    return len({case.key.machine for case in cases})


def _size(text: str) -> int:
    """Return the bytes of a part and the line end after it."""
    return len(text.encode()) + 1


__all__ = ["LIMIT_BYTES", "MARKER", "CommentContext", "is_confirmed", "render"]
