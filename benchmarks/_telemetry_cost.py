"""What telemetry costs the samples: the same cases with it and without, in turns.

`python -m benchmarks._telemetry_cost` on a GPU prints, for each case, how much longer it takes with
telemetry, and the 95 % interval of that, in two arrangements:

before  a telemetry window, then samples, as suites have it, against samples alone
beside  samples while a sampler reads all through them, which suites never do: the harder test

A pair is a block of samples with telemetry and one without, in alternating order, so that a drift
of clocks or heat is in both; the median of a block stands for it.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from scipy import stats

from benchmarks._device import DEVICE, cuda_device
from benchmarks._meters import observe
from benchmarks._sampler import sampling
from benchmarks._suite import _Suite

NUM_PAIRS: Final = 40
LEAST_PAIRS: Final = 6  # whatever the time limit
NUM_ARRANGEMENTS: Final = 2
NUM_SAMPLES: Final = 20  # of a block, at least
BLOCK_S: Final = 0.2  # least length of a block, so that a short kernel has hundreds of samples
WINDOW_S: Final = 1.0
MARGIN_REL: Final = 0.005  # a difference within it is none
CONFIDENCE: Final = 0.95

Telemetry = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Difference:
    """How much longer a case takes with telemetry, relative to without, and its interval."""

    num_pairs: int
    relative: float
    low: float
    high: float

    @property
    def is_within_margin(self) -> bool:
        """Whether the whole interval is."""
        return self.low >= -MARGIN_REL and self.high <= MARGIN_REL


class Trial:
    """One case of a suite in this process, with its clock."""

    def __init__(self, suite: _Suite, params: Sequence[Any]) -> None:
        self._suite = suite
        suite.build(*params)
        self.body = partial(getattr(suite, suite._method), *params)  # noqa: SLF001 - our own base
        for _ in range(NUM_SAMPLES):  # compiles, and fills caches
            suite.reset()
            self.body()
        self._clock = suite.make_clock()

    def block_s(self, num_samples: int, least_s: float = 0.0) -> float:
        """Return the median of so many samples, and of those that fit into `least_s`."""
        end_s = time.monotonic() + least_s
        samples_s: list[float] = []
        while len(samples_s) < num_samples or time.monotonic() < end_s:
            samples_s.append(self._sample_s())
        return statistics.median(samples_s)

    def _sample_s(self) -> float:
        self._suite.reset()
        self._clock.start()
        self.body()
        return self._clock.stop()

    @contextmanager
    def before(self, window_s: float) -> Iterator[None]:
        """Watch the case through a window, then let samples be taken."""
        observe(self._suite.reset_in_window, self.body, device="cuda", window_s=window_s)
        yield

    @contextmanager
    def beside(self, gpu_uuid: str) -> Iterator[None]:
        """Have a sampler read while samples are taken."""
        with sampling(gpu_uuid) as sampler:
            while sampler.is_starting:
                self.block_s(1)
            yield


def compare(
    block_s: Callable[[], float],
    telemetry: Telemetry,
    *,
    num_pairs: int = NUM_PAIRS,
    limit_s: float = math.inf,
) -> Difference:
    """Measure blocks with and without telemetry in turns; `block_s` measures one.

    The interval is Student's for the mean of the logarithms of the pairs' ratios. Past `limit_s`
    no pair begins once there are `LEAST_PAIRS`.
    """
    logs: list[float] = []
    end_s = time.monotonic() + limit_s
    for number in range(num_pairs):
        if number >= LEAST_PAIRS and time.monotonic() > end_s:
            break
        seconds = {}
        for has_telemetry in (True, False) if number % 2 else (False, True):
            if has_telemetry:
                with telemetry():
                    seconds[True] = block_s()
            else:
                seconds[False] = block_s()
        logs.append(math.log(seconds[True] / seconds[False]))
    middle = statistics.fmean(logs)
    count = len(logs)
    quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1))
    half = quantile * statistics.stdev(logs) / math.sqrt(count)
    return Difference(count, *(math.expm1(log) for log in (middle, middle - half, middle + half)))


def differences(
    trial: Trial,
    *,
    num_pairs: int,
    num_samples: int,
    limit_s: float = math.inf,
    least_s: float = BLOCK_S,
    window_s: float = WINDOW_S,
) -> dict[str, Difference]:
    """Compare a case in both arrangements, each within the limit."""
    _, gpu_uuid = cuda_device()
    block_s = partial(trial.block_s, num_samples, least_s)
    ways = {"before": partial(trial.before, window_s), "beside": partial(trial.beside, gpu_uuid)}
    return {
        name: compare(block_s, telemetry, num_pairs=num_pairs, limit_s=limit_s)
        for name, telemetry in ways.items()
    }


def _cases() -> list[tuple[type[_Suite], tuple[Any, ...]]]:
    """Return a long kernel, a short one, and a step that is bound by its launches."""
    from benchmarks.attention import TreeAttention  # noqa: PLC0415 - builds engines
    from benchmarks.step import Step  # noqa: PLC0415

    return [
        (TreeAttention, (65536, "triton_serial", 1)),
        (TreeAttention, (1024, "triton_split", 1)),
        (Step, (1024, 64, 1, "triton_split")),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the cases and print a line for each, or with --json an object."""
    parser = argparse.ArgumentParser(description="what telemetry costs the samples")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES, help="of a block, at least")
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, help="seconds for the blocks of all cases"
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    if DEVICE != "cuda":
        parser.error("device: expected a GPU, got none (without one there is no telemetry)")
    cases = _cases()
    for suite, params in cases:
        found = differences(
            Trial(suite(), params),
            num_pairs=asked.pairs,
            num_samples=asked.samples,
            limit_s=asked.time_limit / (NUM_ARRANGEMENTS * len(cases)),
        )
        for arrangement, difference in found.items():
            name = f"{suite.__name__}{params}"
            sys.stdout.write(_line(name, arrangement, difference, is_json=asked.json) + "\n")
            sys.stdout.flush()
    return 0


def _line(name: str, arrangement: str, found: Difference, *, is_json: bool) -> str:
    if is_json:
        return json.dumps({"case": name, "arrangement": arrangement, **asdict(found)})
    verdict = "within" if found.is_within_margin else "not within"
    return (
        f"{name:48} {arrangement:7} {found.relative:+.3%} [{found.low:+.3%}, {found.high:+.3%}] "
        f"{verdict} ±{MARGIN_REL:.1%}, {found.num_pairs} pairs"
    )


if __name__ == "__main__":
    sys.exit(main())
