"""Results of one case, as comparisons meet them."""

from dataclasses import replace

import numpy as np

from db.compare import CaseKey, CaseResult, compare

KEY = CaseKey("step.Step.time_step", "1", "context=1024, page_size=16", "time", "h200", "py3.11")


def case(samples=(1.0, 1.01, 0.99, 1.0), **changes):
    """A result of KEY whose samples are process medians unless said otherwise."""
    samples = tuple(float(sample) for sample in samples)
    value = float(np.median(samples)) if samples else None
    fields = {
        "key": KEY,
        "unit": "s",
        "direction": "lower",
        "status": "ok",
        "value": value,
        "samples": samples,
        "n": 10 * len(samples),
        "num_processes": len(samples),
    }
    return CaseResult(**{**fields, **changes})


def named(name, result):
    return replace(result, key=replace(KEY, benchmark=name))


def only(base, head, policy=None):
    (found,) = compare([base], [head], policy).cases
    return found


def processes(seed, n=6, level=1.0, noise=0.005):
    rng = np.random.default_rng(seed)
    return tuple(level * np.exp(noise * rng.standard_normal(n)))


FAILED = case((), status="failed", value=None, n=0)
SKIPPED = case((), status="skipped", value=None, n=0)
