"""The comparison as a table, and a command that makes one without asv.

``python -m benchmarks._peer_table --cells REGEX`` rehearses, measures and prints the cells whose
label matches (`8x9-c65536-b1-p64-shuffled`: heads x tree tokens, context, sequences, page, order).
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks._peer_cells import IMPLEMENTATIONS, PeerCell, mask_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks._peer_trial import Job, Verdict

COLUMNS: Final = (
    *("heads x tokens", "context", "batch", "page", "order", "implementation", "mask"),
    *("median us", "MAD us", "GB/s", "TFLOP/s", "error"),
)
NUM_ROUNDS: Final = 30


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation in one cell, measured or not."""

    cell: PeerCell
    name: str
    samples_s: Sequence[float] = ()
    bytes: int | None = None  # least it must move
    flops: int | None = None
    error_rel: float | None = None  # of the result, against the definition
    reason: str | None = None  # why it was not measured

    @property
    def texts(self) -> list[str]:
        """The row of one that was measured, a text for each column."""
        cell = self.cell
        median_s = statistics.median(self.samples_s)
        spread_s = statistics.median(abs(one - median_s) for one in self.samples_s)
        return [
            f"{cell.num_heads} x {cell.tree_tokens}",
            str(cell.context_tokens),
            f"{cell.num_seqs}{' uneven' if cell.uneven else ''}",
            str(cell.page_size),
            cell.page_order.replace("_", " "),
            self.name,
            mask_of(self.name),
            f"{median_s * 1e6:.1f}",
            f"{spread_s * 1e6:.1f}",
            "" if self.bytes is None else f"{self.bytes / median_s / 1e9:.0f}",
            "" if self.flops is None else f"{self.flops / median_s / 1e12:.1f}",
            "" if self.error_rel is None else f"{self.error_rel:.1e}",
        ]


def table(rows: Iterable[Row]) -> str:
    """Return a Markdown table of what was measured, and a list of what was not and why."""
    known = list(rows)
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lines += [_line(row.texts) for row in known if row.samples_s]
    absent = [f"- {row.cell.label}: {row.reason}" for row in known if not row.samples_s]
    if absent:
        lines += ["", "Not measured:", "", *absent]
    return "\n".join(lines) + "\n"


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def race(
    cell: PeerCell, names: Sequence[str], verdicts: Mapping[Job, Verdict], *, num_rounds: int
) -> list[Row]:
    """Measure the implementations of a cell in turns; return a row for each."""
    from benchmarks._device import DEVICE  # noqa: PLC0415 - imports torch
    from benchmarks._interleaved import Contestant, measure  # noqa: PLC0415
    from benchmarks._peer_trial import Job, entries  # noqa: PLC0415

    found = entries(cell, names, verdicts)
    racing = [one for one in found if isinstance(one, Contestant)]
    samples_s = measure(racing, device=DEVICE, num_rounds=num_rounds)
    return [
        Row(
            cell,
            one.name,
            samples_s[one.name],
            one.facts.bytes,
            one.facts.flops,
            verdicts[Job(cell, one.name)].error_rel,
        )
        if isinstance(one, Contestant)
        else Row(cell, one.name, reason=one.reason)
        for one in found
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of the cells and implementations that were asked for."""
    from benchmarks._peer_trial import Job, rehearse  # noqa: PLC0415 - imports torch
    from benchmarks.peers import all_cells  # noqa: PLC0415 - imports this module

    asked = _parser().parse_args(arguments)
    cells = [cell for cell in all_cells() if re.search(asked.cells, cell.label)]
    names = [name for name in IMPLEMENTATIONS if re.fullmatch(asked.names, name)]
    verdicts = rehearse([Job(cell, name) for cell in cells for name in names])
    if asked.check:
        sys.stdout.write(_checks(verdicts))
        return 0
    rows = [row for cell in cells for row in race(cell, names, verdicts, num_rounds=asked.rounds)]
    sys.stdout.write(table(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks._peer_table")
    parser.add_argument("--cells", default="", help="regular expression over cell labels")
    parser.add_argument("--names", default=".*", help="regular expression over implementations")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="samples of each")
    parser.add_argument("--check", action="store_true", help="rehearse only, measure nothing")
    return parser


def _checks(verdicts: Mapping[Job, Verdict]) -> str:
    """Return a line for each job: its error, or why it is not measured."""
    return "".join(
        f"{job.cell.label} {job.name}: {verdict.reason or f'error {verdict.error_rel:.1e}'}\n"
        for job, verdict in verdicts.items()
    )


if __name__ == "__main__":
    sys.exit(main())
