"""Series that a detector is judged on: flat windows of real series, and noises of GPUs.

Real series stand in an `.npz` with `values` (all of them, one after the other) and `lengths`, in
an asv results tree, or in what `tests.record_series` wrote. A detector is tuned on the even ones and judged on the odd ones.
"""

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

WINDOW = 100  # results
NOISE_REL = (0.002, 0.015)  # robust noise of a window that is used
FLAT_SHARE = 1.0  # of the noise, that the medians of a flat window's quarters may lie apart ...
FLAT_REL = 0.01  # ... and at most
STRETCH = 9  # results whose median ...
STRETCH_SHARE = 2.0  # ... may lie this many times the noise away from the window's
BLOCK = 5  # results that stay together when a window is shuffled
MAD_TO_SIGMA = 1.4826
SAMPLES = 8  # of a result, that its spread is read from


@dataclass(frozen=True)
class Noise:
    """Values around 1, with what a runner would have recorded beside them."""

    values: np.ndarray
    told: dict = field(default_factory=dict)  # keyword arguments of `detect`

    def told_until(self, size):
        """Give what was recorded beside the first results."""
        kept = {name: column[:size] for name, column in self.told.items() if name != "covariates"}
        clocks = self.told.get("covariates")
        if clocks is not None:
            kept["covariates"] = {name: clock[:size] for name, clock in clocks.items()}
        return kept


def series_of_npz(path):
    """Read series of which one follows the other."""
    with np.load(path) as data:
        return np.split(data["values"], np.cumsum(data["lengths"])[:-1])


def series_of(path):
    """Read the series of a file or a tree."""
    if path.is_dir():
        return series_of_asv(path)
    return series_of_npz(path) if path.suffix == ".npz" else series_of_recording(path)


def series_of_recording(path):
    """Read the values of every case that was recorded."""
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return [np.array(one["values"]) for one in cases.values()]


def series_of_asv(root):
    """Read the values of every case of an asv results tree, in the order of its commits."""
    found = defaultdict(list)
    for path in sorted(root.glob("*/*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        names = document.get("result_columns", [])
        for benchmark, row in document.get("results", {}).items():
            by_name = dict(zip(names, row, strict=False)) if isinstance(row, list) else {}
            for case, value in enumerate(by_name.get("result") or []):
                if isinstance(value, float) and math.isfinite(value) and value > 0.0:
                    found[benchmark, case].append((document["date"], value))
    return [
        np.array([value for _, value in sorted(dated)])
        for _, dated in sorted(found.items())
        if len(dated) >= WINDOW
    ]


def noise_rel(values):
    """Give the robust noise of a series, seen between neighbours."""
    steps = np.abs(np.diff(np.log(values)))
    return MAD_TO_SIGMA * float(np.median(steps)) / math.sqrt(2.0)


def is_flat(values):
    """Whether a window has one level; no detector is asked."""
    logs = np.log(values)
    levels = [float(np.median(part)) for part in np.array_split(logs, 4)]
    noise = noise_rel(values)
    apart = max(levels) - min(levels)
    stretches = np.median(sliding_window_view(logs, STRETCH), axis=1)
    stray = float(np.abs(stretches - np.median(logs)).max())
    return (
        NOISE_REL[0] <= noise <= NOISE_REL[1]
        and apart <= min(FLAT_SHARE * noise, FLAT_REL)
        and stray <= STRETCH_SHARE * noise
    )


def flat_windows(series, most_of_one=2):
    """Give the flat windows of every series, at most a few of one that do not overlap."""
    found = []
    for values in series:
        usable = values[np.isfinite(values) & (values > 0.0)]
        start, taken = 0, 0
        while start + WINDOW <= len(usable) and taken < most_of_one:
            window = usable[start : start + WINDOW]
            if is_flat(window):
                found.append(window / np.median(window))
                taken += 1
                start += WINDOW
            else:
                start += WINDOW // 4
    return found


def shuffled(window, rng):
    """Keep what neighbours share and lose every level that is longer."""
    blocks = np.split(window, range(BLOCK, len(window), BLOCK))
    order = rng.permutation(len(blocks))
    return np.concatenate([blocks[index] for index in order])


def _locked(rng, size):
    return Noise(np.exp(0.003 * rng.standard_normal(size)))


def _jitter(rng, size):
    """A boost clock that wanders by a percent, recorded."""
    clock = 1980.0 * np.exp(0.01 * rng.standard_normal(size))
    return Noise(
        1980.0 / clock * np.exp(0.003 * rng.standard_normal(size)),
        {"covariates": {"sm_clock_mhz": clock}},
    )


def _bimodal(rng, size):
    clock = np.where(rng.random(size) < 0.25, 1980.0 / 1.06, 1980.0)
    return Noise(
        1980.0 / clock * np.exp(0.003 * rng.standard_normal(size)),
        {"covariates": {"sm_clock_mhz": clock}},
    )


def _noisy_epochs(rng, size):
    """Stretches of twenty results, noisy and calm in turns, as the spread of their samples says."""
    sigmas = np.where(np.arange(size) // 20 % 2 == 0, 0.02, 0.003)
    samples = np.exp(sigmas * rng.standard_normal((SAMPLES, size)))
    low, high = np.quantile(samples, (0.25, 0.75), axis=0)
    return Noise(np.exp(sigmas * rng.standard_normal(size)), {"spread": high - low})


def _outliers(rng, size):
    values = np.exp(0.003 * rng.standard_normal(size))
    return Noise(np.where(rng.random(size) < 0.05, values * (1.0 + 0.3 * rng.random(size)), values))


def _drift(rng, size):
    return Noise(np.linspace(1.0, 1.02, size) * np.exp(0.003 * rng.standard_normal(size)))


def _runners(rng, size):
    """Three runners that take turns, a percent apart, recorded."""
    runners = rng.integers(0, 3, size)
    offsets = 0.01 * rng.standard_normal(3)
    values = np.exp(offsets[runners] + 0.003 * rng.standard_normal(size))
    return Noise(values, {"runners": runners.tolist()})


GPU_NOISES = {
    "locked": _locked,
    "jitter": _jitter,
    "bimodal": _bimodal,
    "noisy epochs": _noisy_epochs,
    "outliers": _outliers,
    "drift": _drift,
    "runners": _runners,
}
