"""Record series of our own suites that no commit changed, for detectors to be quiet on.

    python -m tests.record_series SERIES.npz --bench '^tree' [--results 110] [--restart 1]

A result is the median of a case's samples, as the profile `history` would store it; a new process
serves every `--restart` results. What a machine does over minutes is in it, what days do is not.
`python -m tests.replay SERIES.npz` reads what this writes; a later call for the same file adds to
it. On a GPU a start takes seconds, so restart seldom there.
"""

import itertools
import os
import re
import tempfile
from pathlib import Path

import click
import numpy as np

from dashboard.sides import Side
from dashboard.words import case_name

SUITES = Path(__file__).parent.parent / "benchmarks"
TURN_S, LEAST = 0.25, 10  # of a result's samples


def selected(side, bench):
    """Names the cases that a process has and a pattern selects."""
    return [
        (benchmark, cell)
        for benchmark, one in side.ask("list")["cases"].items()
        for cell in itertools.product(*one["params"])
        if re.search(bench, case_name(benchmark, ", ".join(cell)))
    ]


def result(side, benchmark, params):
    """Measure a case once; None where this machine lacks it."""
    if "absent" in side.ask("open", benchmark=benchmark, params=list(params)):
        return None
    samples = side.ask("take", seconds=TURN_S, least=LEAST)["samples_s"]
    side.ask("close")
    return float(np.median(samples))


def record(bench, num, restart, folder):
    """Give the series of every case, all cases in turn for each result."""
    told = {
        "PYTHONPATH": str(SUITES.parent),
        "DDTREE_BENCH_PROFILE": "history",
        "DDTREE_BENCH_RUN_ID": "series",
        "DDTREE_BENCH_SIDECAR_DIR": str(folder),
    }
    side, found = None, {}
    try:
        for number in range(num):
            if side is None or number % restart == 0:
                if side is not None:
                    side.end()
                side = Side.start(SUITES, os.environ | told, (), folder / "complaints.txt")
                side.hear()
            for case in found or selected(side, bench):
                found.setdefault(case, []).append(result(side, *case))
    finally:
        if side is not None:
            side.end()
    return [np.array(values) for values in found.values() if None not in values]


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--bench", required=True, metavar="REGEX")
@click.option("--results", "num", type=click.IntRange(1), default=110, show_default=True)
@click.option("--restart", type=click.IntRange(1), default=1, show_default=True)
def main(path, bench, num, restart):
    """Record the selected cases into PATH."""
    with tempfile.TemporaryDirectory() as folder:
        series = record(bench, num, restart, Path(folder))
    if path.exists():
        with np.load(path) as data:
            series = [*np.split(data["values"], np.cumsum(data["lengths"])[:-1]), *series]
    np.savez_compressed(
        path, values=np.concatenate(series), lengths=np.array([len(one) for one in series])
    )
    click.echo(f"{len(series)} series, {sum(map(len, series))} results")


if __name__ == "__main__":
    main()
