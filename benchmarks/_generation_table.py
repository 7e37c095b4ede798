"""What decoding a text costs, by mode: tokens a second, tokens a step, energy a token.

`python -m benchmarks._generation_table` reads the sidecars of this checkout (or the files it is
given) and prints the newest run's cases of `generation.Generation`, each text's modes beside each
other: `ar` without drafts, `dflash` with a chain of them, `ddtree` with a tree. Energy is that of
the telemetry window over its runs, of the whole GPU, idle parts included; `-` without one.
"""

import argparse
import ast
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks._readings import ENERGY_PER_RUN
from benchmarks._run_spread import TELEMETRY, SpreadError, read

BENCHMARK: Final = "generation.Generation.time_generate"
PLAIN: Final = "ar"  # what the others are set against


@dataclass(frozen=True, slots=True)
class Decoding:
    """One case: a text in a mode."""

    text: str
    mode: str
    temperature: float
    cache_layout: str
    tokens_per_s: float
    tokens_per_step: float
    joule_per_token: float | None


def newest(lines: Iterable[Mapping[str, Any]]) -> list[Decoding]:
    """Return the cases of the newest run that has some, in the order of their parameters."""
    runs: dict[str, dict[tuple[str, ...], list[Mapping[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    began: dict[str, float] = {}
    for line in lines:
        if line["benchmark"] == BENCHMARK and line.get("new_tokens"):
            run = str(line["run_id"])
            runs[run][tuple(line["params"])].append(line)
            began[run] = min(began.get(run, line["started_at"]), line["started_at"])
    if not runs:
        raise SpreadError(f"sidecars: expected a run of {BENCHMARK} with its tokens, got none")
    found = runs[max(runs, key=began.__getitem__)]
    return [_decoding(params, found[params]) for params in sorted(found)]


def _decoding(params: tuple[str, ...], lines: Sequence[Mapping[str, Any]]) -> Decoding:
    """Take the median over the processes of a case, and the energy of those that watched."""
    tokens = lines[0]["new_tokens"]
    energies = [
        line["counters"][ENERGY_PER_RUN]["median"]
        for line in lines
        if ENERGY_PER_RUN in line["counters"]
    ]
    text, mode, temperature, cache_layout = map(ast.literal_eval, params)
    return Decoding(
        text=text,
        mode=mode,
        temperature=temperature,
        cache_layout=cache_layout,
        tokens_per_s=tokens / statistics.median(line["median_s"] for line in lines),
        tokens_per_step=lines[0]["commit_length"],
        joule_per_token=statistics.median(energies) / tokens if energies else None,
    )


def table(found: Sequence[Decoding]) -> list[str]:
    """Write the cases, and how they stand to the same text without drafts where that is there."""
    plain = {_setting(one): one for one in found if one.mode == PLAIN}
    head = ("text", "temperature", "cache", "mode", "tokens/s", "of ar", "tokens/step", "J/token")
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in found:
        beside = plain.get(_setting(one))
        times = "-" if beside is None else f"{one.tokens_per_s / beside.tokens_per_s:.2f}"
        joule = "-" if one.joule_per_token is None else f"{one.joule_per_token:.3g}"
        cells = (one.text, f"{one.temperature:g}", one.cache_layout, one.mode)
        figures = (f"{one.tokens_per_s:.1f}", times, f"{one.tokens_per_step:.2f}", joule)
        rows.append("| " + " | ".join((*cells, *figures)) + " |")
    return rows


def _setting(one: Decoding) -> tuple[str, float, str]:
    return one.text, one.temperature, one.cache_layout


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="what decoding a text costs, by mode")
    parser.add_argument("paths", type=Path, nargs="*", default=[TELEMETRY])
    asked = parser.parse_args(arguments)
    try:
        found = newest(read(asked.paths))
    except SpreadError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join(table(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
