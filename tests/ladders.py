"""Ladders to diagnose: the one that took the incident apart on an H200, and made-up whole ones."""

from itertools import accumulate

import numpy as np

from db.diagnose import EvidencePoint
from db.ladder import FACTORS
from tests.recordings import ROW_BYTES

LADDER = "ladder.Ladder.time_cold"
NUM_ROUNDS = 28
ORDER = ["none", *accumulate(FACTORS, "{}+{}".format)]
ALONE = list(FACTORS)
REMOVED = ["+".join(other for other in FACTORS if other != one) for one in FACTORS]
VARIANTS = list(dict.fromkeys(ORDER + ALONE + REMOVED))  # what the suite visits: 14

# measurements.md, section 2: one layer, 9 tokens x 8 heads, us. Of 64k the table of steps, of the
# other contexts the table of kernels; in it `serial` has all three factors off, `split` all on. The
# last rung of 64k follows from the worth that page order has there, 1.01 to 1.02.
MEASURED_US = {
    32768: {
        "none": 3595,
        "in_order": 3555,
        "read_once+split+packed": 65.4,
        "read_once+split+packed+page_64": 62.4,
        "read_once+split+packed+in_order": 63.5,
    },
    65536: {
        "none": 7097,
        "read_once": 2843,
        "read_once+split": 128,
        "read_once+split+packed": 101,
        "read_once+split+packed+page_64": 99,
        "read_once+split+packed+page_64+in_order": 97.5,
    },
    189440: {
        "none": 20726,
        "in_order": 20492,
        "read_once+split+packed": 224.6,
        "read_once+split+packed+page_64": 220.0,
        "read_once+split+packed+in_order": 218.5,
    },
}
PROGRAMS = {"split": 264, "packed": 66}  # by the last of these factors that is on, else 8


def ladder(times_us, context=65536, *, seed=0, noise=0.005, **changes):
    """One ladder's cases from what each variant takes; noise and drift as of rounds in turns."""
    rng = np.random.default_rng([seed, context])
    drift = 1 + 0.02 * np.linspace(0, 1, NUM_ROUNDS)  # of the clocks, the same for all
    points = []
    for variant, time_us in times_us.items():
        noisy = drift * np.exp(noise * rng.standard_normal(NUM_ROUNDS))
        samples = [float(one) for one in time_us / 1e6 * noisy]
        points.append(rung(variant, context, samples, **changes))
    return points


def rung(variant, context, samples_s, **changes):
    """One case of a ladder."""
    on = [factor for factor in PROGRAMS if factor in variant.split("+")]
    fields = {
        "benchmark": LADDER,
        "params": f"context_tokens={context}, variant='{variant}'",
        "context_tokens": context,
        "time_s": float(np.median(samples_s)),
        "n": len(samples_s),
        "bytes": context * ROW_BYTES + 10**5,
        "kv_bytes": context * ROW_BYTES,
        "programs": PROGRAMS[on[-1]] if on else 8,
        "num_sms": 132,
        "validity": ("interleaved",),
        "version": "1",
        "process_samples_s": (tuple(samples_s),),
    }
    return EvidencePoint(**{**fields, **changes})


def measured():
    """Every ladder of `MEASURED_US`."""
    return [
        point for context, times in MEASURED_US.items() for point in ladder(times, context=context)
    ]


def whole(worth, slowest_us=7097.0, **changes):
    """A ladder of all variants whose factors multiply: each is worth what it says, everywhere."""
    times = {}
    for variant in VARIANTS:
        on = variant.split("+")
        times[variant] = slowest_us / np.prod([worth[factor] for factor in FACTORS if factor in on])
    return ladder(times, **changes)
