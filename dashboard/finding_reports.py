"""Findings of main's history as a file: written where measured, read where issues are written.

Whoever writes issues holds a token and runs nothing that was measured, so the file is checked
before any of it is believed. A finding is what moved at one commit on one machine with one owner.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, cast

from dashboard.words import case_name
from db.alert_queries import OF_THE_RUNNER
from db.alerts import LIVE
from db.columns import AlertState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from db.alert_queries import AlertView

SCHEMA: Final = 1
MOST_REPORTS: Final = 1_000
MOST_CASES: Final = 50  # of a finding; the others are counted
MOST_LEVELS: Final = 40  # of the series that moved most
LONGEST: Final = 2_000  # characters of a text

_COMMIT = re.compile(r"[0-9a-f]{40}")


class ReportError(Exception):
    """A file of findings is not what `alerts findings` writes; nothing of it was used."""


@dataclass(frozen=True, slots=True)
class MovedCase:
    """One case of a finding."""

    benchmark: str
    params: str
    unit: str
    before: float
    after: float
    relative_change: float

    @property
    def name(self) -> str:
        """The benchmark with its parameters."""
        return case_name(self.benchmark, self.params)


@dataclass(frozen=True, slots=True)
class FindingReport:
    """What an issue says of one finding."""

    machine: str
    commit: str  # where the new level begins
    previous: str | None  # the commit before it that was measured
    owner: str  # "runner h200" or "commit 1a2b3c4d5e6f"
    cause: str
    is_live: bool  # some case is as slow as it became
    is_told: bool  # a re-run, a person or the runner's own record stands for it
    said: str  # what was said of it last, and by whom
    summary: str  # what changed with it; empty where nothing was recorded
    numbers: tuple[int, ...]  # of its alerts
    num_cases: int
    cases: tuple[MovedCase, ...]  # the largest change first
    levels: tuple[float, ...]  # of the first case, oldest first

    @property
    def key(self) -> str:
        """What names it in a marker, whatever characters machines are called by."""
        text = f"{self.machine}\0{self.commit}\0{self.owner}"
        return sha256(text.encode(errors="replace")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Reports:
    """All findings, as of one measured commit."""

    head: str
    findings: tuple[FindingReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        return {"schema": SCHEMA, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of a finding beside its alerts."""

    previous: str | None
    summary: str
    levels: tuple[float, ...]


def grouped(views: Sequence[AlertView]) -> list[list[AlertView]]:
    """Put the alerts of one finding together, the largest change first."""
    groups: dict[tuple[str, str, str], list[AlertView]] = {}
    for view in views:
        groups.setdefault((view.machine, view.commit, view.owner), []).append(view)
    return [sorted(one, key=lambda view: -abs(view.relative_change)) for one in groups.values()]


def report(views: Sequence[AlertView], recorded: Recorded) -> FindingReport:
    """Say of the alerts of one finding what an issue needs."""
    live = [view for view in views if AlertState(view.state) in LIVE]
    shown = live or list(views)
    first = shown[0]
    return FindingReport(
        machine=first.machine,
        commit=first.commit,
        previous=recorded.previous,
        owner=first.owner,
        cause=first.cause,
        is_live=bool(live),
        is_told=any(
            view.state == AlertState.CONFIRMED or view.cause in OF_THE_RUNNER for view in live
        ),
        said=_said(shown),
        summary=recorded.summary[:LONGEST],
        numbers=tuple(sorted(view.id for view in shown))[:MOST_CASES],
        num_cases=len(shown),
        cases=tuple(
            MovedCase(
                view.benchmark[:LONGEST],
                view.params[:LONGEST],
                view.unit,
                view.before,
                view.after,
                view.relative_change,
            )
            for view in shown[:MOST_CASES]
        ),
        levels=recorded.levels[-MOST_LEVELS:],
    )


def _said(views: Sequence[AlertView]) -> str:
    """Give the newest step of all: its state, who set it, and the note beside it."""
    step = max((view.history[-1] for view in views if view.history), key=lambda one: one.at)
    note = f": {step.note}" if step.note else ""
    return f"{step.state} by {step.author or 'the service'}{note}"[:LONGEST]


def read_reports(found: object) -> Reports:
    """Read what `to_dict` gave.

    Raises
    ------
    ReportError
        A key is missing or unknown, a value has another type or size, a number is not finite or a
        commit is no full hash.
    """
    values = _table(found, {"schema", "head", "findings"}, "findings")
    if values["schema"] != SCHEMA:
        raise ReportError(f"findings: expected schema {SCHEMA}, got {values['schema']!r:.20}")
    findings = _list(values["findings"], MOST_REPORTS, "findings")
    read = tuple(_finding(one) for one in findings)
    if len({one.key for one in read}) < len(read):
        raise ReportError("findings: expected each once, got one again")
    return Reports(_commit(values["head"]), read)


def _finding(found: object) -> FindingReport:
    names = {one.name for one in fields(FindingReport)}
    values = _table(found, names, "finding")
    previous = values["previous"]
    cases = tuple(_case(one) for one in _list(values["cases"], MOST_CASES, "cases"))
    numbers = _list(values["numbers"], MOST_CASES, "numbers")
    levels = _list(values["levels"], MOST_LEVELS, "levels")
    if not cases:
        raise ReportError("cases: expected at least one, got none")
    return FindingReport(
        machine=_text(values["machine"]),
        commit=_commit(values["commit"]),
        previous=None if previous is None else _commit(previous),
        owner=_text(values["owner"]),
        cause=_text(values["cause"]),
        is_live=_flag(values["is_live"]),
        is_told=_flag(values["is_told"]),
        said=_text(values["said"]),
        summary=_text(values["summary"]),
        numbers=tuple(_whole(one) for one in numbers),
        num_cases=_whole(values["num_cases"]),
        cases=cases,
        levels=tuple(_number(one) for one in levels),
    )


def _case(found: object) -> MovedCase:
    values = _table(found, {one.name for one in fields(MovedCase)}, "case")
    return MovedCase(
        benchmark=_text(values["benchmark"]),
        params=_text(values["params"]),
        unit=_text(values["unit"]),
        before=_number(values["before"]),
        after=_number(values["after"]),
        relative_change=_number(values["relative_change"]),
    )


def _table(found: object, names: set[str], what: str) -> Mapping[str, object]:
    if not isinstance(found, dict) or set(found) != names:
        raise ReportError(f"{what}: expected an object of {', '.join(sorted(names))}, got another")
    return cast("dict[str, object]", found)


def _list(found: object, most: int, what: str) -> Iterator[object]:
    if not isinstance(found, list) or len(found) > most:
        raise ReportError(f"{what}: expected a list of at most {most}, got something else")
    return iter(found)


def _text(found: object) -> str:
    if not isinstance(found, str) or len(found) > LONGEST:
        raise ReportError(f"finding: expected text of at most {LONGEST} characters, got another")
    return found


def _flag(found: object) -> bool:
    if not isinstance(found, bool):
        raise ReportError(f"finding: expected true or false, got {type(found).__name__}")
    return found


def _commit(found: object) -> str:
    if not isinstance(found, str) or not _COMMIT.fullmatch(found):
        raise ReportError(f"commit: expected 40 hexadecimal digits, got {found!r:.60}")
    return found


def _whole(found: object) -> int:
    if type(found) is not int or not 0 < found < 2**31:
        raise ReportError(f"number: expected a positive one, got {found!r:.40}")
    return found


def _number(found: object) -> float:
    if type(found) not in {int, float} or not math.isfinite(value := float(cast("float", found))):
        raise ReportError(f"number: expected a finite one, got {found!r:.40}")
    return value


__all__ = [
    "FindingReport",
    "MovedCase",
    "Recorded",
    "ReportError",
    "Reports",
    "grouped",
    "read_reports",
    "report",
]
