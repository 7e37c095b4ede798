"""How far two runs of the same code lie apart: what a measurement says where nothing changed.

`python -m benchmarks._run_spread` reads the sidecars of this checkout (or the files it is given),
takes the two newest runs of one commit and profile, and prints each case that both measured: the
median of its processes in either run and how far they differ. At the end: the median and the worst
difference over cases, and how many a threshold of 5 % would have called a change.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks._sidecar import ROOT

THRESHOLD_REL: Final = 0.05  # the naive one
TELEMETRY: Final = ROOT / ".asv" / "results" / "telemetry"

Case = tuple[str, tuple[str, ...]]  # benchmark and parameters


class SpreadError(Exception):
    """There are no two runs to compare; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class CaseSpread:
    """One case in two runs, oldest first."""

    benchmark: str
    params: tuple[str, ...]
    first_s: float
    second_s: float

    @property
    def relative(self) -> float:
        """The second run against the first."""
        return self.second_s / self.first_s - 1.0


@dataclass(frozen=True, slots=True)
class RunSpread:
    """Two runs of one commit, the cases both measured."""

    commit: str
    runs: tuple[str, str]
    cases: tuple[CaseSpread, ...]

    @property
    def median_rel(self) -> float:
        """The middle of the distances of all cases."""
        return statistics.median(abs(case.relative) for case in self.cases)

    @property
    def worst(self) -> CaseSpread:
        """The case that lies farthest apart."""
        return max(self.cases, key=lambda case: abs(case.relative))

    @property
    def num_flagged(self) -> int:
        """How many cases the naive threshold would have called a change."""
        return sum(abs(case.relative) > THRESHOLD_REL for case in self.cases)


def newest_pair(lines: Iterable[Mapping[str, Any]]) -> RunSpread:
    """Compare the two newest runs of the newest commit that has two with cases in common."""
    runs: dict[tuple[str, str], dict[Case, list[float]]] = defaultdict(lambda: defaultdict(list))
    began: dict[tuple[str, str], float] = {}
    for line in lines:
        key = (str(line["commit"]), str(line["run_id"]))
        runs[key][line["benchmark"], tuple(line["params"])].append(line["median_s"])
        began[key] = min(began.get(key, line["started_at"]), line["started_at"])
    ordered = sorted(runs, key=began.__getitem__, reverse=True)
    for place, second in enumerate(ordered):
        for first in ordered[place + 1 :]:
            if first[0] == second[0] and (cases := _both(runs[first], runs[second])):
                return RunSpread(second[0], (first[1], second[1]), tuple(cases))
    raise SpreadError("runs: expected two of one commit with cases in common, got none")


def _both(
    first: Mapping[Case, Sequence[float]], second: Mapping[Case, Sequence[float]]
) -> list[CaseSpread]:
    """Give the cases of both runs, each by the median of its processes."""
    return [
        CaseSpread(*case, statistics.median(first[case]), statistics.median(second[case]))
        for case in sorted(first.keys() & second.keys())
    ]


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the lines of sidecar files, and of those in folders."""
    files = [one for path in paths for one in (sorted(path.glob("*.jsonl")) or [path])]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise SpreadError(f"sidecars: expected files of lines, found none at {missing[0]}")
    texts = [text for file in files for text in file.read_text(encoding="utf-8").splitlines()]
    return [json.loads(text) for text in texts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the two newest runs of one commit beside each other."""
    parser = argparse.ArgumentParser(description="how far two runs of the same code lie apart")
    parser.add_argument("paths", type=Path, nargs="*", default=[TELEMETRY])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    try:
        found = newest_pair(read(asked.paths))
    except SpreadError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join(_json(found) if asked.json else _lines(found)) + "\n")
    return 0


def _lines(found: RunSpread) -> list[str]:
    cases = sorted(found.cases, key=lambda case: abs(case.relative), reverse=True)
    worst = found.worst
    last = f"median {found.median_rel:.2%}, worst {worst.relative:+.2%} ({_name(worst)}); "
    return [
        f"{found.commit[:12]}: {' and '.join(found.runs)}, {len(cases)} cases",
        *(
            f"{_name(case):88} {case.first_s * 1e3:11.4f} {case.second_s * 1e3:11.4f} ms "
            f"{case.relative:+8.2%}"
            for case in cases
        ),
        last + f"{found.num_flagged} of {len(cases)} beyond {THRESHOLD_REL:.0%}",
    ]


def _json(found: RunSpread) -> list[str]:
    cases = [{**asdict(case), "relative": case.relative} for case in found.cases]
    told = {
        "commit": found.commit,
        "runs": found.runs,
        "cases": cases,
        "median_rel": found.median_rel,
        "worst_rel": found.worst.relative,
        "flagged": found.num_flagged,
    }
    return [json.dumps(told)]


def _name(case: CaseSpread) -> str:
    return f"{case.benchmark}({', '.join(case.params)})"


if __name__ == "__main__":
    sys.exit(main())
