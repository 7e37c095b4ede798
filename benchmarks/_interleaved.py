"""Suites whose cases are compared with each other: measured in one process, in turns.

asv gives each case a process of its own, minutes apart from the next, and clocks and temperature
move meanwhile. Here one process, asv's `setup_cache`, measures all contestants of a group in turns,
and the process of a case only hands asv the samples that were stored for it::

    setup_cache   measured() → for each group: contestants → rounds → sidecar lines
    each case     setup → [timer() → time_cold → timer()] for each stored sample → sidecar line

A suite declares params, `groups` and `contestants`. Its params are those of the group, then the
contestant's name; a suite with another order says so in `place`. One that has no cases in a profile
has an empty axis: asv then knows its name and runs nothing of it. The process of a case imports no
torch, and neither may the module of such a suite: a start costs seconds with it, tenths without.

A sidecar line says `interleaved`: its start and end are those of the handing over.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from benchmarks._case_end import at_case_end
from benchmarks._identity import Identity, SuiteError
from benchmarks._sidecar import CaseFacts, CaseRecord, append_line, handed_over, sidecar_line

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from benchmarks._ceilings import Ceilings
    from benchmarks._meters import Telemetry
    from benchmarks._suite import Clock

WARM_UP_ROUNDS: Final = 2  # the first run compiles, the second one is the first like all others


@dataclass(frozen=True, slots=True)
class Contestant:
    """One of those measured in turns; `body` only queues work where the device is a GPU."""

    name: str
    body: Callable[[], object]  # a captured graph's replay on CUDA
    facts: CaseFacts = field(default_factory=CaseFacts)


@dataclass(frozen=True, slots=True)
class Absent:
    """One that is not measured: not installed, not made for the cell, or found to be wrong."""

    name: str
    reason: str
    is_failure: bool = False  # asv then calls the case failed, else skipped


@dataclass(frozen=True, slots=True)
class Instruments:
    """What contestants are timed with: what empties the caches, and a clock for each."""

    flush: Callable[[], object]
    clocks: Mapping[str, Clock]

    @classmethod
    def of(cls, contestants: Sequence[Contestant], device: str) -> Self:
        """Make them for "cpu" (wall time) or "cuda" (device time); runs each body."""
        from benchmarks._suite import WallClock  # noqa: PLC0415 - imports torch
        from benchmarks._timing import CacheFlush, CudaQueue, settled_clock  # noqa: PLC0415

        flush = CacheFlush.of(device)
        if device == "cpu":
            return cls(flush, {one.name: WallClock() for one in contestants})
        queue = CudaQueue()
        return cls(flush, {one.name: settled_clock(queue, one.body) for one in contestants})


def measure(
    contestants: Sequence[Contestant],
    *,
    device: str,
    num_rounds: int,
    instruments: Instruments | None = None,
) -> dict[str, list[float]]:
    """Return each contestant's seconds, one sample a round, caches flushed before each.

    Parameters
    ----------
    contestants : no two of the same name
    device : "cpu" or "cuda"
    num_rounds : samples of each; a multiple of twice the number of contestants balances who
        follows whom
    instruments : made for the contestants if absent; their clocks say what was wrong with samples
    """
    if len({one.name for one in contestants}) != len(contestants):
        raise SuiteError(f"contestants: expected different names, got {contestants}")
    if instruments is None:
        instruments = Instruments.of(contestants, device)
    samples_s: dict[str, list[float]] = {one.name: [] for one in contestants}
    for one in list(contestants) * WARM_UP_ROUNDS:
        instruments.flush()
        one.body()
    with _no_collection():
        for number in range(num_rounds):
            for index in visiting_order(len(contestants), number):
                one = contestants[index]
                instruments.flush()
                clock = instruments.clocks[one.name]
                clock.start()
                one.body()
                samples_s[one.name].append(clock.stop())
    return samples_s


def visiting_order(num_contestants: int, round_number: int) -> list[int]:
    """Return who is visited when in a round: a zigzag, rotated by one each round.

    Over n rounds each stands once in each place. What ran before matters too (it heats, and it
    moves clocks): over n rounds, or 2 n if n is odd, each follows each other equally often.
    Source: Williams, Australian Journal of Scientific Research 2 (1949), 149-168.
    """
    n = num_contestants
    zigzag = [place // 2 if place % 2 == 0 else n - 1 - place // 2 for place in range(n)]
    if n % 2 and round_number // n % 2:
        zigzag.reverse()
    return [(place + round_number) % n for place in zigzag]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the cycle collector out of the samples, as asv does."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Stored:
    """What `setup_cache` found of a case: a sidecar line with all samples, or why there is none."""

    line: dict[str, Any] | None = None
    absent: Absent | None = None


@dataclass(slots=True)
class _Handing:
    """What the process of a case has given asv so far."""

    line: Mapping[str, Any]
    started_at: float
    is_running: bool = False  # between the two readings of a sample
    samples_s: list[float] = field(default_factory=list)


class _InterleavedSuite(ABC):
    """Base of every suite measured in turns; asv skips it because its name starts with _."""

    version: ClassVar[str]  # explicit in every suite; bump only when the number changes meaning
    params: ClassVar[Any]
    param_names: ClassVar[list[str]]
    num_rounds: ClassVar[int] = 30
    window_s: ClassVar[float] = 0.0  # telemetry window of each contestant; 0 = none

    number = 1
    warmup_time = 0.0  # asv runs nothing but the samples
    rounds = 1  # a second round would hand over the same samples
    repeat = 1  # set for each case to the number of its samples
    timeout = 900.0  # of `setup_cache`

    _identity: ClassVar[Identity]
    _handing: _Handing | None = None

    def __init_subclass__(cls) -> None:
        """Name the suite; refuse one that shares its store."""
        super().__init_subclass__()
        if cls.__name__.startswith("_"):
            return  # shared by several suites, itself none
        cls._identity = Identity.of(cls)
        if "setup_cache" not in vars(cls):
            raise SuiteError(
                f"{cls.__name__}.setup_cache: expected one of its own that returns "
                "self.measured(), got none (asv knows a cache by the line it is defined in)"
            )

    @classmethod
    def axes(cls) -> list[list[Any]]:
        """Return the values of each parameter, as asv reads `params`."""
        several = bool(cls.params) and isinstance(cls.params[0], (list, tuple))
        return [list(axis) for axis in (cls.params if several else [cls.params])]

    def place(self, *params: Any) -> tuple[Hashable, str]:
        """Return the group a case is measured in and its contestant's name there."""
        return params[:-1], str(params[-1])

    def groups(self) -> Sequence[Hashable]:
        """Return what is measured together, in the order it is measured: all that cases need."""
        cases = itertools.product(*self.axes())
        return list(dict.fromkeys(self.place(*case)[0] for case in cases))

    @abstractmethod
    def contestants(self, group: Any) -> Sequence[Contestant | Absent]:
        """Build a group; those that nobody mentions are skipped.

        Raises
        ------
        NotImplementedError
            The group cannot be measured here; all its cases are skipped.
        """

    def setup(self, stored: Mapping[tuple[Any, ...], Stored], *params: Any) -> None:
        """Find the samples of the case; asv calls it for each of them."""
        found = stored[params]
        if found.absent is not None:
            if found.absent.is_failure:
                raise SuiteError(f"{found.absent.name}: {found.absent.reason}")
            raise NotImplementedError(found.absent.reason)
        if self._handing is None and found.line is not None:
            self._handing = _Handing(found.line, time.time())
            self.repeat = len(found.line["samples_s"])
            at_case_end(partial(self._write, self._handing))

    def timer(self) -> float:
        """The clock asv reads in pairs: 0.0 before the body, the next stored sample after it."""
        handing = self._handing
        if handing is None:
            raise SuiteError(f"{self._identity.benchmark}: expected setup before the timer")
        handing.is_running = not handing.is_running
        if handing.is_running:
            return 0.0
        handing.samples_s.append(handing.line["samples_s"][len(handing.samples_s)])
        return handing.samples_s[-1]

    def time_cold(self, stored: Mapping[tuple[Any, ...], Stored], *params: Any) -> None:  # noqa: B027
        """Do nothing: the case was measured in `setup_cache`."""

    def measured(self) -> dict[tuple[Any, ...], Stored]:
        """Measure all groups; what `setup_cache` of a suite returns."""
        import torch  # noqa: PLC0415 - the process of a case goes without

        from benchmarks._ceilings import measure_ceilings  # noqa: PLC0415
        from benchmarks._device import DEVICE  # noqa: PLC0415

        if DEVICE == "cpu":
            torch.set_num_threads(1)  # a case must not depend on how many cores are idle
        ceilings = measure_ceilings()
        found: dict[tuple[Any, ...], Stored] = {}
        for group in self.groups():
            places = {case: self.place(*case) for case in itertools.product(*self.axes())}
            cases = {name: case for case, (held, name) in places.items() if held == group}
            found |= self._of_group(group, cases, ceilings, DEVICE)
            gc.collect()  # the contestants' tensors and graphs
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
        return found

    def _of_group(
        self,
        group: Any,
        cases: Mapping[str, tuple[Any, ...]],
        ceilings: Ceilings,
        device: str,
    ) -> dict[tuple[Any, ...], Stored]:
        """Measure one group; return what came of those of its contestants that are cases."""
        try:
            entries = self.contestants(group)
        except NotImplementedError as reason:
            entries = [Absent(name, str(reason)) for name in cases]
        racing = [one for one in entries if isinstance(one, Contestant)]
        instruments = Instruments.of(racing, device)
        samples_s = measure(
            racing, device=device, num_rounds=self.num_rounds, instruments=instruments
        )
        lines = {
            one.name: self._line(
                one, instruments.clocks[one.name], samples_s[one.name], ceilings, device
            )
            for one in racing
        }
        absent = {one.name: one for one in entries if isinstance(one, Absent)}
        return {
            case: Stored({**lines[name], "params": [repr(value) for value in case]})
            if name in lines
            else Stored(absent=absent.get(name, Absent(name, f"no such contestant in {group}")))
            for name, case in cases.items()
        }

    def _line(
        self,
        one: Contestant,
        clock: Clock,
        samples_s: Sequence[float],
        ceilings: Ceilings,
        device: str,
    ) -> dict[str, Any]:
        """Return the sidecar line of a contestant, but for its case and who hands it over."""
        telemetry = self._watched(one, device)
        now = time.time()
        record = CaseRecord(
            benchmark=self._identity.benchmark,
            params=(),
            version=self.version,
            timer=clock.kind,
            samples_s=tuple(samples_s),
            started_at=now,
            ended_at=now,
            facts=one.facts,
            telemetry=replace(
                telemetry, validity=(*telemetry.validity, "interleaved", *clock.validity())
            ),
            ceilings=ceilings,
        )
        return sidecar_line(record, os.environ)

    def _watched(self, one: Contestant, device: str) -> Telemetry:
        """Watch a contestant through a telemetry window, if the suite has one; caches stay warm."""
        from benchmarks._meters import identify, observe  # noqa: PLC0415 - imports torch

        if not self.window_s:
            return identify(device)
        found = observe(_nothing, one.body, device=device, window_s=self.window_s)
        warm = ("warm_window",) if device == "cuda" else ()
        return replace(found, validity=(*found.validity, *warm))

    def _write(self, handing: _Handing) -> None:
        """Append the sidecar line of a case whose samples asv has; asv spawns, so we exit."""
        if handing.is_running or not handing.samples_s:
            return
        append_line(handed_over(handing.line, handing.samples_s, handing.started_at, time.time()))


def _nothing() -> None:
    """Put nothing back: a flush moves more bytes than the shorter bodies, and would be counted."""
