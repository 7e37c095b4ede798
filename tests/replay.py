"""Judge detectors the way people meet them: commit by commit, an alarm is an alarm for good.

    python -m tests.replay SERIES.npz [--detector ours --detector asv --detector otava] [--tuning]

SERIES may also be the root of an asv results tree, or what `tests.record_series` wrote. A planted
step is found if an alarm within `NEAR` results of it is raised at most `WITHIN` commits after it.
Several detectors see the same windows, steps and shuffles, and end as a table; `--windows` takes
fewer of them. How fast they are: `tests.replay_speed`. Where Otava comes from: `replay_detectors`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
from scipy.stats import beta

from tests.replay_detectors import DETECTORS
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
STEPS_REL = (0.03, 0.05, 0.10)
FIRST, LAST = 30, 90  # where in a window steps are planted
GPU_SIZE, GPU_STEP, GPU_STEP_REL = 80, 60, 0.03
DELAY_NOISE_REL, DELAY_STEP_REL = 0.005, 0.02
CONFIDENCE = 0.95
SHUFFLES, RESAMPLES = 5, 2000  # of each window; of the windows
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


def shuffled_rate(windows, detector, rng, num):
    """Say the rate of alarms over windows that are shuffled several times, and how sure it is.

    The interval is that of other windows: a resample of them, each with all its shuffles.
    """
    raised = np.zeros(len(windows))
    for _ in range(num):
        mixed = [Noise(shuffled(window, rng)) for window in windows]
        raised += [len(alarms(detector, one)) for one in mixed]
    a_hundred = 100.0 * raised / (num * np.array([len(window) for window in windows]))
    chosen = np.random.default_rng(SEED).integers(len(windows), size=(RESAMPLES, len(windows)))
    low, high = np.quantile(
        a_hundred[chosen].mean(axis=1), ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    )
    return f"{a_hundred.mean():.3f} ({low:.3f} to {high:.3f}, {num} shuffles)"


def judged(windows, name, num, shuffles, rng):
    """Judge one detector; yield what is asked of it and how it did."""
    detector = DETECTORS[name]
    for change in STEPS_REL:
        yield f"found {change:.0%}", str(recall_on(windows, detector, change))
    rate = alarms_on([Noise(window) for window in windows], detector)
    yield "alarms per 100 commits", f"{rate:.3f}"
    yield "alarms per 100 commits, shuffled", shuffled_rate(windows, detector, rng, shuffles)
    for kind in GPU_NOISES:
        found, raised = gpu_noise(kind, detector, max(num // 4, 1))
        yield kind, f"found {found}, {raised:.3f} alarms"
    found = delay(detector, max(num // 4, 1))
    yield f"delay of +{DELAY_STEP_REL:.0%}", f"{found:.0f} commits"


def some_windows(series, num):
    """Choose flat windows, the same for every detector, and give what chooses next."""
    windows, rng = flat_windows(series), np.random.default_rng(SEED)
    if not windows:
        raise click.ClickException(f"no flat window of {WINDOW} results in {len(series)} series")
    kept = sorted(rng.permutation(len(windows))[:num].tolist())
    return [windows[index] for index in kept], rng


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--detector", "names", type=click.Choice(sorted(DETECTORS)), multiple=True)
@click.option("--tuning", is_flag=True, help="The series that may be looked at while tuning.")
@click.option("--windows", "num", type=click.IntRange(1), default=400, show_default=True)
@click.option("--shuffles", type=click.IntRange(1), default=SHUFFLES, show_default=True)
def main(path, names, tuning, num, shuffles):
    """Judge detectors on the series of PATH."""
    series, rows = series_of(path)[0 if tuning else 1 :: 2], {}
    names = names or ["ours"]
    for name in names:
        windows, rng = some_windows(series, num)
        click.echo(f"{name}: {len(windows)} flat windows of {len(series)} series")
        for what, told in judged(windows, name, num, shuffles, rng):
            click.echo(f"  {what}: {told}")
            rows.setdefault(what, []).append(told)
    for line in markdown(names, rows) if len(names) > 1 else ():
        click.echo(line)


def markdown(names, rows):
    """Put the detectors side by side."""
    yield "| " + " | ".join(["", *names]) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for what, told in rows.items():
        yield "| " + " | ".join([what, *told]) + " |"


if __name__ == "__main__":
    main()
