"""The detectors that are judged side by side, each asked about several beginnings of one series.

asv's and Otava's are imported when they are asked for. Otava needs a folder of its own::

    pip install --no-deps --target FOLDER apache-otava==0.8.0   # its pins are older than ours
    PYTHONPATH=FOLDER python -m tests.replay …
"""

import importlib
from itertools import pairwise

from db.change_points import Observed, detect_many

RELEVANT_REL = 0.02  # least change that Otava and asv may call one; ours has it built in


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
