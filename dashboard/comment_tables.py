"""The tables of a pull request's comment, and which of their rows fit under a forge's limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dashboard.links import history_url
from dashboard.markdown import code, escape, head, row
from dashboard.pictures import axis_of, interval_text
from dashboard.units import change_text, display_unit
from dashboard.verdicts import why
from db.compare import Verdict
from db.numbers import MISSING, digits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dashboard.pictures import Axis
    from db.compare import CaseComparison

_WITHOUT_NUMBERS: Final = frozenset({Verdict.FAILED, Verdict.NEW, Verdict.REMOVED, Verdict.SKIPPED})
_WITH_REASON: Final = frozenset({Verdict.INCONCLUSIVE, Verdict.NOT_ENOUGH_HISTORY})
_NUMBERS: Final = ("base → head", "change", "interval", "noise", "n")


@dataclass(frozen=True, slots=True)
class Look:
    """How the tables of one comment are drawn."""

    show_machine: bool
    relevance_rel: float
    dashboard: str | None = None  # where a case's name leads to; None: nowhere


@dataclass(frozen=True, slots=True)
class Section:
    """One table of cases with one verdict, and what stands around it."""

    verdict: Verdict
    cases: tuple[CaseComparison, ...]
    title: str
    is_folded: bool = True
    before: str = ""  # between title and table
    after: str = ""

    def rows(self, look: Look) -> Iterator[str]:
        """Yield the table's rows; pictures and links only where it stands open."""
        axis = None if self.is_folded else axis_of(self.cases, look.relevance_rel)
        dashboard = None if self.is_folded else look.dashboard
        for case in self.cases:
            key = case.key
            shown = code(key.name)
            if dashboard is not None:
                url = history_url(dashboard, key.benchmark, key.params, key.machine)
                shown = f"[{shown}]({url})"
            name = (shown, code(case.key.machine)) if look.show_machine else (shown,)
            yield row((*name, *_cells(case, axis)))

    def wrap(self, rows: Sequence[str], look: Look) -> str:
        """Return the section around these rows."""
        titles = ("case", "machine") if look.show_machine else ("case",)
        if self.verdict in _WITHOUT_NUMBERS:
            titles = (*titles, "why")
        else:
            titles = (*titles, *_NUMBERS)
            if not self.is_folded:
                titles = (*titles, _span(axis_of(self.cases, look.relevance_rel)))
            if self.verdict in _WITH_REASON:
                titles = (*titles, "what would decide it")
        table = "\n".join([head(titles, right=_NUMBERS), *rows])
        parts = (self.before, f"{table}\n", self.after)
        text = "\n".join(part for part in parts if part)
        if not self.is_folded:
            return f"**{self.title}**\n\n{text}"
        return f"<details><summary>{self.title}</summary>\n\n{text}\n</details>\n"


def _cells(case: CaseComparison, axis: Axis | None) -> tuple[str, ...]:
    if case.verdict in _WITHOUT_NUMBERS:
        return (escape(why(case)),)
    drawn = "" if axis is None else interval_text(case, axis)
    picture = () if axis is None else (f"`{drawn}`" if drawn else MISSING,)
    reason = (escape(why(case)),) if case.verdict in _WITH_REASON else ()
    return (*_numbers(case), *picture, *reason)


def _numbers(case: CaseComparison) -> tuple[str, ...]:
    unit = display_unit(case.unit, case.head_value or case.base_value)
    values = f"{escape(unit.text(case.base_value))} → {escape(unit.text(case.head_value))}"
    better = " (higher is better)" if case.direction == "higher" else ""
    mark = " †" if case.environment_differs else ""
    low, high = change_text(case.interval_low), change_text(case.interval_high)
    interval = MISSING if case.interval_low is None else f"{low} … {high}"
    noise = MISSING if case.noise_rel is None else f"±{percent(case.noise_rel)}"
    change = f"{change_text(case.relative_change)}{better}{mark}"
    return values, change, interval, noise, f"{case.n_base} / {case.n_head}"


def _span(axis: Axis) -> str:
    return f"{change_text(axis.low)} … {change_text(axis.high)}"


def fill(
    sections: Sequence[Section], room: int, look: Look
) -> tuple[list[str], dict[Verdict, int]]:
    """Return the tables that fit into `room` bytes and the number of cases that did not."""
    tables: list[str] = []
    left_out: dict[Verdict, int] = {}
    for section in sections:
        rows: list[str] = []
        used = size(section.wrap((), look))
        for line in section.rows(look):
            used += size(line)
            if used > room:
                break
            rows.append(line)
        missing = len(section.cases) - len(rows)
        if missing:
            left_out[section.verdict] = left_out.get(section.verdict, 0) + missing
        if rows:
            tables.append(section.wrap(rows, look))
            room -= size(tables[-1])
    return tables, left_out


def percent(ratio: float) -> str:
    """Give a ratio in percent, without a sign."""
    return f"{digits(100 * ratio, 2)} %"


def size(text: str) -> int:
    """Return the bytes of a part and the line end after it."""
    return len(text.encode()) + 1
