"""The ladder as a table, without asv: ``python -m benchmarks._ladder_table [--contexts N ...]``.

For each context the variants as they were measured in turns, then what each factor is worth: how
many times faster it makes the variant before it in the fixed order, the slow end alone, and the
fast end that lacks it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import TYPE_CHECKING

from benchmarks._interleaved import Absent, Contestant, measure
from benchmarks.ladder import FACTORS, NUM_ROUNDS, ROPE_DIM, VALUE_DIM, name_of, visited

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Samples = Mapping[str, Sequence[float]]  # seconds of each variant, a sample a round

INCIDENT_CONTEXTS = (1024, 65536, 189440)


def table(entries: Sequence[Contestant | Absent], samples_s: Samples) -> str:
    """Return the variants of one context and what each factor is worth, as text."""
    lines = ["variant                                     median µs   MAD µs     GB/s  programs"]
    for one in entries:
        if isinstance(one, Absent):
            lines.append(f"{one.name:42} {one.reason}")
            continue
        median_s = statistics.median(samples_s[one.name])
        spread_s = statistics.median(abs(value - median_s) for value in samples_s[one.name])
        rate = (one.facts.kv_bytes or 0) / median_s / 1e9
        lines.append(
            f"{one.name:42} {median_s * 1e6:10.1f} {spread_s * 1e6:8.2f} {rate:8.1f} "
            f"{one.facts.programs or 0:9}"
        )
    lines += ["", "factor        in order      alone    removed"]
    lines += [
        f"{factor:10}" + "".join(_times(samples_s, *pair) for pair in readings(factor))
        for factor in FACTORS
    ]
    return "\n".join(lines) + "\n"


def readings(factor: str) -> list[tuple[str, str]]:
    """Return the three pairs (without, with) of variants between which only `factor` differs."""
    place = FACTORS.index(factor)
    others = [other for other in FACTORS if other != factor]
    return [
        (name_of(FACTORS[:place]), name_of(FACTORS[: place + 1])),
        (name_of([]), name_of([factor])),
        (name_of(others), name_of(FACTORS)),
    ]


def _times(samples_s: Samples, without: str, with_it: str) -> str:
    """Return how many times faster a variant is, round by round; nothing if one was not timed."""
    if without not in samples_s or with_it not in samples_s:
        return f"{'-':>11}"
    pairs = zip(samples_s[without], samples_s[with_it], strict=True)
    return f"{statistics.median(slow / fast for slow, fast in pairs):10.3f}x"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the ladders of the contexts that were asked for."""
    parser = argparse.ArgumentParser(description="what each factor of tree attention is worth")
    parser.add_argument("--contexts", type=int, nargs="+", default=INCIDENT_CONTEXTS)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    asked = parser.parse_args(arguments)
    for context_tokens in asked.contexts:
        try:
            text = measured(context_tokens, asked.rounds, (VALUE_DIM, ROPE_DIM))
        except NotImplementedError as reason:
            parser.error(str(reason))
        sys.stdout.write(f"{context_tokens} committed rows\n{text}\n")
        sys.stdout.flush()
    return 0


def measured(context_tokens: int, num_rounds: int, widths: tuple[int, int]) -> str:
    """Measure one ladder in this process and return its table."""
    from benchmarks._device import DEVICE  # noqa: PLC0415 - imports torch
    from benchmarks._ladder_rungs import Problem, rungs  # noqa: PLC0415

    entries = rungs(Problem(context_tokens, *widths), visited())
    racing = [one for one in entries if isinstance(one, Contestant)]
    return table(entries, measure(racing, device=DEVICE, num_rounds=num_rounds))


if __name__ == "__main__":
    sys.exit(main())
