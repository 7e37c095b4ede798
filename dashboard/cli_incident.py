"""What `ddtree-bench diagnose --incident` prints: the incident beside the run that repeated it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.table import Table
from rich.text import Text

from dashboard.cli_exit import MissingResultsError
from dashboard.terminal import STATUS_STYLES
from db.errors import UnknownSeriesError
from db.queries import evidence
from db.reproduction import LADDER, ORIGINAL, REPEATED, side_by_side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from sqlalchemy.orm import Session

    from db.evidence import Evidence, Status
    from db.incident_sides import Line
    from db.reproduction import SideBySide

HOW: Final = "`ddtree-bench ingest benchmarks/recorded` stores both"


def stored_incident(session: Session, machine: str | None) -> SideBySide:
    """Lay the stored incident beside its newest reproduction, on a machine if one is named.

    Raises
    ------
    MissingResultsError
        One of the two is not stored.
    """
    originals = _measured(session, ORIGINAL, None)
    if not originals:
        raise MissingResultsError(f"incident: expected its recording, found none ({HOW})")
    found = side_by_side(
        originals[0], _measured(session, REPEATED, machine), _measured(session, LADDER, machine)
    )
    if found is None:
        raise MissingResultsError(f"incident: expected a run that repeated it, found none ({HOW})")
    return found


def print_incident(to: Console, found: SideBySide) -> None:
    """Print the measurements, the counters and the claims, original on the left."""
    for side, source in found.sources:
        to.print(Text.assemble((f"{side}: ", "bold"), source))
    to.print()
    to.print(_numbers(found.measured))
    to.print()
    to.print(_counters(found.counters))
    to.print()
    table = _table("what is known", "original", "", "repeated", "")
    for one in found.known:
        table.add_row(
            one.what,
            _status(one.original),
            one.original_says,
            _status(one.repeated),
            one.repeated_says,
        )
    to.print(table)
    to.print()
    for line in found.summary:
        to.print(line)


def _measured(session: Session, benchmarks: str, machine: str | None) -> list[Evidence]:
    """Read the runs of some benchmarks, the newest first; none where nobody stored them."""
    try:
        return evidence(session, series=benchmarks, machine=machine)
    except UnknownSeriesError:
        return []


def _numbers(lines: Sequence[Line]) -> Table:
    table = _table("what was measured", "original", "repeated", "the fast kernel there")
    for line in lines:
        table.add_row(line.what, line.original, line.repeated, line.fast)
    return table


def _counters(lines: Sequence[Line]) -> Table:
    titles = ("counter", "original", "repeated", "the fast kernel there", "taken alone", "worth")
    table = _table(*titles)
    for line in lines:
        table.add_row(line.what, line.original, line.repeated, line.fast, line.alone, line.worth)
    return table


def _status(status: Status) -> Text:
    return Text(status.value, STATUS_STYLES[status])


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table
