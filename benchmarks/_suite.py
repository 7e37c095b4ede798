"""What all suites share: state once a case, samples by asv, one sidecar line at its end.

asv (launch method `spawn`) runs each case of each round in a fresh process, which has imported
torch before it knows its case; short profiles have one for all cases of a round (`_asv_ahead`)::

    setup → [teardown → setup → timer() → time_*() → timer()] for each sample → teardown → end
      │         └ `reset` puts the state back                 └ a sample             └ sidecar line
      └ first call: `build`, warm-up, telemetry window (unless the run has one), `facts`

A suite fills in `build` and, where it needs them, `reset`, `facts` and `make_clock`, and declares
one `time_*` method. It never defines `setup` or `teardown`. The telemetry window is closed before
the first sample, so nothing but the body runs while asv's clock does.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch

from benchmarks._case_end import at_case_end
from benchmarks._ceilings import Ceilings, measure_ceilings
from benchmarks._device import DEVICE
from benchmarks._identity import Identity, SuiteError
from benchmarks._meters import Telemetry, identify, is_watched, observe
from benchmarks._regimes import PROFILE
from benchmarks._sidecar import CaseFacts, CaseRecord, append_record, earlier_lines

__all__ = ["CaseFacts", "Clock", "WallClock", "_Suite"]

WARM_UP_S = 0.1
WARM_UP_RUNS = 2  # the first run compiles, the second one is the first like all others


class Clock(Protocol):
    """Times one body. `kind` is written to the sidecar as the timer of the samples."""

    kind: str  # "wall" or "cuda_events"

    def start(self) -> None:
        """Begin a sample; the last thing it does is to read the time or record an event."""

    def stop(self) -> float:
        """End the sample and return its seconds."""

    def validity(self) -> tuple[str, ...]:
        """Codes for what was wrong with the samples so far; empty if nothing was."""


class WallClock:
    """Wall time of a body that talks to the host; on CUDA the device is idle at both ends."""

    kind = "wall"

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        self._synchronize = synchronize
        self._started_s = 0.0

    def start(self) -> None:
        """Wait for the device, then read the time."""
        self._synchronize()
        self._started_s = time.perf_counter()

    def stop(self) -> float:
        """Wait for the device and return the seconds since `start`."""
        self._synchronize()
        return time.perf_counter() - self._started_s

    def validity(self) -> tuple[str, ...]:
        """Nothing can be wrong with it."""
        return ()


@dataclass(slots=True)
class _Session:
    """What the process of one case gathers until it exits."""

    params: tuple[Any, ...]
    clock: Clock
    facts: CaseFacts
    telemetry: Telemetry
    ceilings: Ceilings
    started_at: float
    ended_at: float
    samples_s: list[float] = field(default_factory=list)
    sound: bool = True  # False while a sample or a reset is under way: an exit then is a failure


class _Suite(ABC):
    """Base of every suite; asv skips it because its name starts with an underscore."""

    version: ClassVar[str]  # explicit in every suite; bump only when the number changes meaning
    params: ClassVar[Any]
    param_names: ClassVar[list[str]]

    number = 1  # asv resolves to 1 with a setup anyway; said here, it also drops asv's own warm-up
    warmup_time = 0.0  # so asv's samples are exactly the ones in the sidecar
    rounds = PROFILE.rounds
    repeat = PROFILE.repeat
    timeout = 300.0
    window_validity: ClassVar[tuple[str, ...]] = ()  # codes for how the window differs from samples

    def __init_subclass__(cls) -> None:
        """Refuse a suite without its own version or with more than one timed method."""
        super().__init_subclass__()
        if cls.__name__.startswith("_"):
            return  # shared by several suites, itself none
        identity = Identity.of(cls)
        cls._method, cls._benchmark = identity.method, identity.benchmark

    _method: ClassVar[str]
    _benchmark: ClassVar[str]
    _session: _Session | None = None

    @abstractmethod
    def build(self, *params: Any, **named: Any) -> None:
        """Make the state of a case; called once in a process, never while the clock runs.

        A suite names its own parameters; asv passes them by position.
        """

    def reset(self) -> None:  # noqa: B027 - a hook; most cases have nothing to put back
        """Bring the state back to where every sample starts; called before each run."""

    def reset_in_window(self) -> None:
        """Put back what a run of the telemetry window needs; work left out here is not counted.

        The counters are to be those of the body. A suite whose `reset` gives the device work, such
        as a flush of its caches, leaves that out and says so in `window_validity`.
        """
        self.reset()

    def facts(self) -> CaseFacts:
        """Say what the case is made of; called once, after the warm-up, and may run the body."""
        return CaseFacts()

    def make_clock(self) -> Clock:
        """Return the clock of the samples; wall time unless the body is one device kernel."""
        return WallClock(_wait_for(DEVICE))

    def setup(self, *params: Any) -> None:
        """Build on the first call of the process, reset on all; asv calls it for each sample."""
        if self._session is None or self._session.params != params:
            self._open(params)
        session = self._opened
        session.sound = False
        self.reset()
        session.sound = True

    def timer(self) -> float:
        """The clock asv reads in pairs: 0.0 before the body, the body's seconds after it."""
        session = self._opened
        if session.sound:
            session.sound = False
            session.clock.start()
            return 0.0
        seconds = session.clock.stop()
        session.samples_s.append(seconds)
        session.ended_at = time.time()
        session.sound = True
        return seconds

    @property
    def _opened(self) -> _Session:
        if self._session is None:
            raise SuiteError(f"{self._benchmark}: expected setup before the timer, got none")
        return self._session

    def _open(self, params: tuple[Any, ...]) -> None:
        """Build the case, warm it up, watch it through a telemetry window, ask for its facts.

        One sound window of a run will do: its later processes go on to their samples.
        """
        if DEVICE == "cpu":
            torch.set_num_threads(1)  # a case must not depend on how many cores are idle
        self.build(*params)
        ceilings = measure_ceilings()  # it empties torch's cache, which the warm-up fills again
        body = partial(getattr(self, self._method), *params)
        _warm_up(self.reset, body, _wait_for(DEVICE))
        started_at = time.time()
        if is_watched(earlier_lines(self._benchmark, _texts(params), self.version)):
            telemetry = identify(DEVICE)
        else:
            telemetry = observe(
                self.reset_in_window, body, device=DEVICE, window_s=PROFILE.window_s
            )
        self.reset()
        facts = self.facts()
        self._session = _Session(
            params=params,
            clock=self.make_clock(),
            facts=facts,
            telemetry=telemetry,
            ceilings=ceilings,
            started_at=started_at,
            ended_at=time.time(),
        )
        at_case_end(partial(self._write, self._session))

    def _write(self, session: _Session) -> None:
        """Append the sidecar line of a case whose every sample ended."""
        if not session.sound or not session.samples_s:
            return
        append_record(
            CaseRecord(
                benchmark=self._benchmark,
                params=_texts(session.params),
                version=self.version,
                timer=session.clock.kind,
                samples_s=tuple(session.samples_s),
                started_at=session.started_at,
                ended_at=session.ended_at,
                facts=session.facts,
                telemetry=replace(
                    session.telemetry,
                    validity=(
                        *session.telemetry.validity,
                        *self.window_validity,
                        *session.clock.validity(),
                    ),
                ),
                ceilings=session.ceilings,
            )
        )


def _texts(params: tuple[Any, ...]) -> tuple[str, ...]:
    """Write parameters as asv does."""
    return tuple(map(repr, params))


def _warm_up(
    reset: Callable[[], None], body: Callable[[], object], wait: Callable[[], None]
) -> None:
    """Run the body until it compiled what it compiles and caches hold what they hold.

    Each run ends before the next one begins: a queue of those that only queue work holds hundreds,
    and hundreds of slow ones are minutes.
    """
    end_s = time.perf_counter() + WARM_UP_S
    runs = 0
    while runs < WARM_UP_RUNS or time.perf_counter() < end_s:
        reset()
        body()
        wait()
        runs += 1


def _wait_for(device: str) -> Callable[[], None]:
    """Return what waits for the work queued on a device."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None
