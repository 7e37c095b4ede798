"""Record series of our own suites: of one commit, or with the engine changed under them.

    python -m tests.record_series SERIES.json --bench '^tree' [--results 110] [--seconds 240]
    python -m tests.record_series SERIES.json --bench '^tree' --then FOLDER --at 60

A result is the median of a case's samples, as a run would store it, with how far their quartiles
lie apart. A new process serves every `--restart` results: on a GPU a start takes seconds, so it is
seldom there. With `--then`, results from number `--at` on are of the engine in FOLDER, which is how
a commit changes a series. What a machine does over minutes is in such series, what days do is not.
`python -m tests.replay SERIES.json` reads what this writes.
"""

import itertools
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from dashboard.asv_runs import PROFILES
from dashboard.sides import Side
from dashboard.words import case_name

ROOT = Path(__file__).parent.parent
TURN_S, LEAST = 0.1, 10  # of a result's samples
DIGITS = 6  # kept of a number


class Recorder:
    """Processes that serve the cases one after the other, and what they gave."""

    def __init__(self, bench, profile, folder):
        self.bench, self.folder = bench, folder
        self.told = {
            "DDTREE_BENCH_PROFILE": profile,
            "DDTREE_BENCH_RUN_ID": "series",
            "DDTREE_BENCH_SIDECAR_DIR": str(folder),
        }
        self.side, self.engine, self.left = None, None, 0
        self.cases = {}  # (benchmark, parameters) to its results; None of one that is not there

    def serve(self, engine, restart):
        """Have a process with the engine of a folder, a new one every so many results."""
        if self.engine == engine and self.left:
            self.left -= 1
            return
        self.end()
        told = os.environ | self.told | {"PYTHONPATH": str(engine)}
        self.side = Side.start(ROOT / "benchmarks", told, (), self.folder / "complaints.txt")
        self.side.hear()
        self.engine, self.left = engine, restart - 1
        self.cases = self.cases or {case: [] for case in self._selected()}

    def end(self):
        """End the process."""
        if self.side is not None:
            self.side.end()

    def measure(self):
        """Give every case one more result; forget one that this machine lacks."""
        found = {case: self._result(*case) for case in self.cases}
        self.cases = {
            case: [*self.cases[case], one] for case, one in found.items() if one is not None
        }

    def _selected(self):
        """Names the cases that a process has and the pattern selects."""
        return [
            (benchmark, cell)
            for benchmark, one in self.side.ask("list")["cases"].items()
            for cell in itertools.product(*one["params"])
            if re.search(self.bench, case_name(benchmark, ", ".join(cell)))
        ]

    def _result(self, benchmark, params):
        """Measure a case once: its median, and how far the quartiles lie apart."""
        if "absent" in self.side.ask("open", benchmark=benchmark, params=list(params)):
            return None
        samples = self.side.ask("take", seconds=TURN_S, least=LEAST)["samples_s"]
        self.side.ask("close")
        low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
        return middle, high - low


def record(recorder, num, seconds, restart, then):
    """Give the cases with their results, all cases in turn for each, until there are enough.

    `then` is a folder and the number of the first result that is of its engine.
    """
    folder, at = then
    end_s = time.monotonic() + seconds
    try:
        for number in range(num):
            if time.monotonic() >= end_s:
                break
            recorder.serve(ROOT if folder is None or number < at else folder, restart)
            recorder.measure()
    finally:
        recorder.end()
    return {
        case_name(benchmark, ", ".join(params)): results
        for (benchmark, params), results in recorder.cases.items()
    }


def document(cases, at):
    """Give plain values for JSON."""
    return {
        "commit": _output("git", "rev-parse", "HEAD"),
        "device": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "CPU",
        "switched_at": at,
        "cases": {
            name: {
                "values": [float(f"{value:.{DIGITS}g}") for value, _ in results],
                "spread": [float(f"{spread:.{DIGITS - 3}g}") for _, spread in results],
            }
            for name, results in cases.items()
        },
    }


def _output(*command):
    """Give the first line that a command prints; nothing where there is no such command."""
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return next(iter(told.stdout.splitlines()), "")


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--bench", required=True, metavar="REGEX")
@click.option("--profile", type=click.Choice(PROFILES), default="history", show_default=True)
@click.option("--results", "num", type=click.IntRange(1), default=110, show_default=True)
@click.option("--seconds", type=float, default=240.0, show_default=True, help="At most.")
@click.option("--restart", type=click.IntRange(1), default=1, show_default=True)
@click.option("--then", type=click.Path(exists=True, path_type=Path), help="Has an `engine`.")
@click.option("--at", type=click.IntRange(1), default=60, show_default=True)
def main(path, bench, profile, num, seconds, restart, then, at):
    """Record the selected cases into PATH."""
    folder = None if then is None else then.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        recorder = Recorder(bench, profile, Path(scratch))
        cases = record(recorder, num, seconds, restart, (folder, at))
    found = document(cases, None if then is None else at)
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    click.echo(f"{len(cases)} series of {len(next(iter(cases.values()), []))} results")


if __name__ == "__main__":
    main()
