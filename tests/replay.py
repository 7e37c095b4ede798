"""Judge detectors the way people meet them: commit by commit, an alarm is an alarm for good.

    python -m tests.replay SERIES.npz [--detector ours --detector asv --detector otava] [--tuning]

SERIES may also be the root of an asv results tree, or what `tests.record_series` wrote. A planted step is found if an alarm within
`NEAR` results of it is raised at most `WITHIN` commits after it. Otava is needed for its own column
only (`pip install --no-deps --target FOLDER apache-otava==0.8.0`, with FOLDER on PYTHONPATH).
"""

import importlib
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
from scipy.stats import beta

from db.change_points import Observed, detect_many
from tests.replay_series import (
    GPU_NOISES,
    WINDOW,
    Noise,
    flat_windows,
    series_of,
    shuffled,
)

NEAR = 3  # results between a step and an alarm that is about it
WITHIN = 5  # commits after a step
RELEVANT_REL = 0.02  # least change that Otava and asv may call one; ours has it built in
STEPS_REL = (0.03, 0.05, 0.10)
FIRST, LAST = 30, 90  # where in a window steps are planted
GPU_SIZE, GPU_STEP, GPU_STEP_REL = 80, 60, 0.03
DELAY_NOISE_REL, DELAY_STEP_REL = 0.005, 0.02
CONFIDENCE = 0.95
SEED = 20261130


@dataclass
class Count:
    """How many of how many."""

    hits: int = 0
    total: int = 0

    def add(self, is_hit):
        self.hits += bool(is_hit)
        self.total += 1

    def __str__(self):
        low = beta.ppf((1.0 - CONFIDENCE), self.hits, self.total - self.hits + 1)
        return f"{self.hits / self.total:.3f} (at least {np.nan_to_num(low):.3f})"


@dataclass
class Alarms:
    """What was raised over a series that grows; a withdrawn alarm was an alarm."""

    raised: list = field(default_factory=list)  # (index of the change, results known by then)

    def see(self, found, known):
        for index in found:
            if all(abs(index - earlier) > NEAR for earlier, _ in self.raised):
                self.raised.append((index, known))


def ours(noise, sizes):
    """Find the change points of each beginning of a series."""
    found = detect_many([Observed(noise.values[:size], **noise.told_until(size)) for size in sizes])
    return [[point.index for point in points] for points in found]


def asv(noise, sizes):
    """Take the boundaries of asv's steps."""
    detect_steps = importlib.import_module("asv.step_detect").detect_steps
    every = (pairwise(detect_steps(noise.values[:size].tolist(), None)) for size in sizes)
    return [
        [after[0] for before, after in steps if abs(after[2] / before[2] - 1.0) >= RELEVANT_REL]
        for steps in every
    ]


def otava(noise, sizes):
    """Take Otava's change points, window and p-value as it comes."""
    compute = importlib.import_module("otava.analysis").compute_change_points
    every = (
        compute(
            noise.values[:size].tolist(),
            window_len=50,
            max_pvalue=0.001,
            min_magnitude=RELEVANT_REL,
        )[0]
        for size in sizes
    )
    return [[point.index for point in points] for points in every]


DETECTORS = {"ours": ours, "asv": asv, "otava": otava}


def alarms(detector, noise):
    """Replay a whole series."""
    seen, sizes = Alarms(), range(2, len(noise.values) + 1)
    for size, found in zip(sizes, detector(noise, sizes), strict=True):
        seen.see(found, size)
    return seen.raised


def is_found(detector, noise, step):
    """Replay only the commits at which a planted step can be found in time."""
    sizes = range(step, min(step + 1 + WITHIN, len(noise.values)) + 1)
    before, *later = detector(noise, sizes)
    return any(
        abs(index - step) <= NEAR and index not in before for found in later for index in found
    )


def stepped(noise, step, change_rel):
    """Plant a step."""
    ratios = np.where(np.arange(len(noise.values)) >= step, 1.0 + change_rel, 1.0)
    return Noise(noise.values * ratios, noise.told)


def recall_on(windows, detector, change_rel):
    """Plant one step into each window, up or down."""
    rng, count = np.random.default_rng(SEED), Count()
    for window in windows:
        step, sign = int(rng.integers(FIRST, LAST)), rng.choice((-1.0, 1.0))
        change = change_rel if sign > 0 else 1.0 / (1.0 + change_rel) - 1.0
        count.add(is_found(detector, stepped(Noise(window), step, change), step))
    return count


def alarms_on(noises, detector):
    """Count the alarms of a hundred commits."""
    raised = sum(len(alarms(detector, noise)) for noise in noises)
    return 100.0 * raised / sum(len(noise.values) for noise in noises)


def gpu_noise(kind, detector, num):
    """Give recall of a step and alarms of a series without one."""
    rng, count, raised = np.random.default_rng(SEED), Count(), 0
    for _ in range(num):
        noise = GPU_NOISES[kind](rng, GPU_SIZE)
        raised += len(alarms(detector, noise))
        count.add(is_found(detector, stepped(noise, GPU_STEP, GPU_STEP_REL), GPU_STEP))
    return count, raised / num


def delay(detector, num):
    """Give the median number of commits, the step's own included, until a small step is found."""
    rng, delays = np.random.default_rng(SEED), []
    sizes = range(GPU_STEP + 1, WINDOW + 1)
    for _ in range(num):
        values = np.exp(DELAY_NOISE_REL * rng.standard_normal(WINDOW))
        noise = stepped(Noise(values), GPU_STEP, DELAY_STEP_REL)
        found = zip(sizes, detector(noise, sizes), strict=True)
        near = (
            size - GPU_STEP
            for size, points in found
            if any(abs(index - GPU_STEP) <= NEAR for index in points)
        )
        delays.append(next(near, WINDOW))
    return float(np.median(delays))


def rate(series, name):
    """Give results a second; ours takes all series at once, the others have no such way."""
    began = time.perf_counter()
    if name == "ours":
        detect_many([Observed(values) for values in series])
    else:
        for values in series:
            DETECTORS[name](Noise(values), [len(values)])
    return sum(map(len, series)) / (time.perf_counter() - began)


def report(series, name, num, echo=click.echo):
    """Judge one detector and say all that the targets ask."""
    detector, rng = DETECTORS[name], np.random.default_rng(SEED)
    windows = flat_windows(series)
    if not windows:
        raise click.ClickException(f"no flat window of {WINDOW} results in {len(series)} series")
    kept = sorted(rng.permutation(len(windows))[:num].tolist())
    windows = [windows[index] for index in kept]
    echo(f"{name}: {len(windows)} flat windows of {len(series)} series")
    for change in STEPS_REL:
        echo(f"  found {change:.0%}: {recall_on(windows, detector, change)}")
    echo(f"  alarms per 100 commits: {alarms_on([Noise(w) for w in windows], detector):.3f}")
    mixed = [Noise(shuffled(window, rng)) for window in windows]
    echo(f"  alarms per 100 commits, shuffled: {alarms_on(mixed, detector):.3f}")
    for kind in GPU_NOISES:
        found, raised = gpu_noise(kind, detector, max(num // 4, 1))
        echo(f"  {kind}: found {found}, {raised:.3f} alarms")
    echo(f"  delay of +{DELAY_STEP_REL:.0%}: {delay(detector, max(num // 4, 1)):.0f} commits")
    echo(f"  {rate(series if name == 'ours' else series[:40], name):,.0f} points/s")


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--detector", "names", type=click.Choice(sorted(DETECTORS)), multiple=True)
@click.option("--tuning", is_flag=True, help="The series that may be looked at while tuning.")
@click.option("--windows", "num", type=click.IntRange(1), default=400, show_default=True)
def main(path, names, tuning, num):
    """Judge detectors on the series of PATH."""
    chosen = series_of(path)[0 if tuning else 1 :: 2]
    for name in names or ["ours"]:
        report(chosen, name, num)


if __name__ == "__main__":
    main()
