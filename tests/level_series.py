"""Series of known levels, calm and noisy, and what was found in them."""

import numpy as np

RIPPLE = np.array([0.0, 0.004, -0.003, 0.001, -0.004, 0.003, -0.001, 0.002])  # calm, repeats


def rippled(levels):
    """A series at the given levels, with a small ripple that never repeats a value exactly."""
    steps = np.arange(len(levels))
    return np.asarray(levels) * np.exp(RIPPLE[steps % len(RIPPLE)] + 1e-5 * steps)


def levels_of(*parts):
    return np.concatenate([np.full(count, level, dtype=float) for level, count in parts])


def noisy(seed, size, noise=0.005):
    return np.exp(noise * np.random.default_rng(seed).standard_normal(size))


def indices(points):
    return [point.index for point in points]
