"""Points a second of ours, of asv's step_detect and of Otava, on the same series.

    python -m tests.replay_speed SERIES.npz [--detector ours --detector asv --detector otava]

One series at a time for all of them, and for ours also all together, which the others cannot. The
detectors take turns, so that what else a machine does meets all of them; CPU time is this process's
own. What each needs is told in `tests.replay`. Takes about a minute where nothing else runs.
"""

import time
from pathlib import Path
from statistics import median

import click

from db.change_points import Observed, detect, detect_many
from tests.replay_detectors import DETECTORS
from tests.replay_series import Noise, series_of

TURNS = 7
SERIES = 80  # at regular places of all that there are


def one_by_one(name):
    """Have a detector look at each series by itself."""
    if name == "ours":
        return lambda series: [detect(values) for values in series]
    return lambda series: [DETECTORS[name](Noise(one), [len(one)]) for one in series]


def together(series):
    """Have ours look at all of them."""
    detect_many([Observed(values) for values in series])


def seconds(act, series):
    """Time an act by the clock and by our own CPU time."""
    began, cpu = time.perf_counter(), time.process_time()
    act(series)
    return time.perf_counter() - began, time.process_time() - cpu


def spread_over(points, every):
    """Say the median rate, and between which all lie."""
    rates = [points / one for one in every]
    return f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def table(series, names, turns=TURNS):
    """Give the rates of each detector as lines of Markdown."""
    ways = {f"{name}, one at a time": one_by_one(name) for name in names}
    if "ours" in names:
        ways["ours, all together"] = together
    taken = {way: [] for way in ways}
    for act in ways.values():
        act(series[:2])  # what is imported or made once
    for _ in range(turns):
        for way, act in ways.items():
            taken[way].append(seconds(act, series))
    points = sum(map(len, series))
    yield f"{points:,} results in {len(series)} series, {turns} turns: median (lowest to highest)"
    yield ""
    yield "| | points/s | points/s of CPU time |"
    yield "|---|---|---|"
    for way, every in taken.items():
        wall, cpu = zip(*every, strict=True)
        yield f"| {way} | {spread_over(points, wall)} | {spread_over(points, cpu)} |"


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--detector", "names", type=click.Choice(sorted(DETECTORS)), multiple=True)
@click.option("--series", "num", type=click.IntRange(1), default=SERIES, show_default=True)
@click.option("--turns", type=click.IntRange(1), default=TURNS, show_default=True)
def main(path, names, num, turns):
    """Time detectors on some series of PATH."""
    series = series_of(path)
    for line in table(series[:: max(len(series) // num, 1)][:num], names or ["ours"], turns):
        click.echo(line)


if __name__ == "__main__":
    main()
