"""Measure two commits in turns on one machine, each with its own engine, apart from stored results.

Every commit has a worktree, and what it pins; the suites are those of the invoking checkout. A pair
is a fresh process of either commit, both started at once, so that what the start of a process
decides (where memory lies, the seed of hashes) is drawn anew for each pair. Within a pair the two
take turns that are short beside what a machine's load and clocks take to change::

    base   import │ build │ ▇   ▇ ▇   ▇ …        one log ratio of neighbours a round,
    head   import │ build │   ▇ ▇   ▇ ▇ …        their median is the pair's

A GPU has room for one case at a time: there each process has one turn, first the one, then the
other. What a process imported is read from its sidecar line and must be the commit's engine.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import statistics
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from dashboard.asv_commits import checkout, engine_of, git_lines, remove_stale_worktrees
from dashboard.asv_errors import AsvFailedError, AsvRunError, RequestError
from dashboard.asv_pins import path_of
from dashboard.asv_runs import CPU, FOLDER, measuring_place
from dashboard.sides import PATIENCE_S, Side
from dashboard.words import case_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

ARENAS: Final = FOLDER / "pairs"
SUITES: Final = "benchmarks"


@dataclass(frozen=True, slots=True)
class Turns:
    """How two processes share a case: a turn each is a round."""

    turn_s: float
    least_samples: int  # of a turn
    rounds: tuple[int, int]  # at least, so that some rounds may be disturbed; at most
    enough_s: float  # after which no more than the least are measured

    @property
    def is_single(self) -> bool:
        """Whether each opens the case for itself."""
        return self.rounds == (1, 1)


ON_CPU: Final = Turns(turn_s=0.01, least_samples=1, rounds=(6, 200), enough_s=1.5)
ON_GPU: Final = Turns(turn_s=0.6, least_samples=10, rounds=(1, 1), enough_s=0.0)


@dataclass(frozen=True, slots=True)
class PairedCase:
    """A case, and how long it may take to open."""

    benchmark: str
    params: tuple[str, ...]
    patience_s: float

    @property
    def name(self) -> str:
        """Give asv's name of it."""
        return case_name(self.benchmark, ", ".join(self.params))

    def open(self, side: Side) -> None:
        """Have a process build it."""
        side.tell("open", benchmark=self.benchmark, params=list(self.params))

    def is_open(self, side: Side) -> bool:
        """Wait until it is built; False where the machine or the engine lacks it."""
        return "absent" not in side.hear(self.patience_s)


@dataclass(slots=True)
class Arena:
    """A machine that is held for a comparison, and the worktrees of it."""

    root: Path
    folder: Path
    environ: Mapping[str, str]
    locks: Sequence[int]
    turns: Turns
    _worktrees: ExitStack
    _paths: dict[str, str] = field(default_factory=dict)
    _listed: dict[str, Any] = field(default_factory=dict)

    def ratios(
        self, commits: tuple[str, str], patterns: Sequence[str], *, is_swapped: bool
    ) -> dict[str, float]:
        """Measure one pair; give the second commit's seconds over the first one's, by case.

        Parameters
        ----------
        patterns : regular expressions over the names of cases
        is_swapped : the second commit goes first

        Raises
        ------
        AsvRunError
            A process ran another engine than its commit's, ended early, or lacks a case that the
            other has; or no case matches.
        """
        cases, found = self._cases(patterns), {}
        sides = self._start(commits)
        try:
            for side in sides:
                side.hear()
            if not self.turns.is_single:
                _share_a_core(sides)
            for case in cases:
                base, head = take_turns(sides, case, self.turns, is_swapped=is_swapped)
                if len(base) != len(head):
                    lacking = commits[len(base) > len(head)]
                    raise AsvFailedError(
                        f"{case.name}: expected a time of both commits, got none of {lacking[:12]} "
                        "(only the other one has the case)"
                    )
                if base:
                    rounds = zip(base, head, strict=True)
                    found[case.name] = statistics.median(after / before for before, after in rounds)
        finally:
            for side in sides:
                side.end()
        self._check_engines(commits, sides)
        return found

    def _cases(self, patterns: Sequence[str]) -> list[PairedCase]:
        """Select cases as asv does; the suites are the checkout's, so they are listed once."""
        if not self._listed:
            lister = self._side(str(self.root), {})
            try:
                lister.hear()
                self._listed = lister.ask("list")["cases"]
            finally:
                lister.end()
        every = (
            PairedCase(name, cell, max(PATIENCE_S, one["timeout"]))
            for name, one in sorted(self._listed.items())
            for cell in itertools.product(*one["params"])
        )
        cases = [one for one in every if any(re.search(pattern, one.name) for pattern in patterns)]
        if not cases:
            raise RequestError(
                "bench: expected a regular expression that matches, got none that does"
            )
        return cases

    def _start(self, commits: tuple[str, str]) -> tuple[Side, Side]:
        """Start the two processes of a pair; both have one seed of hashes, the next another."""
        seed = str(uuid4().int % (1 << 32))
        told = [{"PYTHONHASHSEED": seed, "DDTREE_BENCH_COMMIT": commit} for commit in commits]
        base, head = (self._path(commit) for commit in commits)
        first = self._side(base, told[0])
        try:
            return first, self._side(head, told[1])
        except BaseException:
            first.end()
            raise

    def _side(self, path: str, told: Mapping[str, str]) -> Side:
        complaints = self.folder / f"{uuid4().hex}.txt"
        environ = {**self.environ, **told, "PYTHONPATH": path}
        return Side.start(self.root / SUITES, environ, self.locks, complaints)

    def _path(self, commit: str) -> str:
        """Make a commit's worktree when it is first measured."""
        if commit not in self._paths:
            source = self._worktrees.enter_context(engine_of(self.root, commit, isolated=True))
            self._paths[commit] = path_of(self.root, source)
        return self._paths[commit]

    def _check_engines(self, commits: tuple[str, str], sides: tuple[Side, Side]) -> None:
        """Refuse a pair in which a process ran other code than its commit's."""
        of_pid = dict(zip((side.process.pid for side in sides), commits, strict=True))
        for line in _lines(self.folder):
            commit = of_pid.get(line["pid"])
            if commit is None:
                continue
            tree = git_lines(self.root, "rev-parse", f"{commit}:engine")[0]
            ran = line["provenance"]["engine_tree"]
            if ran != tree or line["provenance"]["dirty"]:
                raise AsvRunError(
                    f"{line['benchmark']}: expected the engine of {commit[:12]}, got "
                    f"{str(ran)[:12]} (what ran is not what is compared)"
                )


def _share_a_core(sides: Sequence[Side]) -> None:
    """Have both run where the other does, so that who has the better core decides nothing."""
    if hasattr(os, "sched_setaffinity"):
        core = random.choice(sorted(os.sched_getaffinity(0)))  # noqa: S311 - another for each pair
        for side in sides:
            os.sched_setaffinity(side.process.pid, {core})


def take_turns(
    sides: tuple[Side, Side], case: PairedCase, turns: Turns, *, is_swapped: bool
) -> tuple[list[float], list[float]]:
    """Give the median of each turn of either side, none of a side that lacks the case."""
    medians: tuple[list[float], list[float]] = ([], [])
    order = (1, 0) if is_swapped else (0, 1)
    if turns.is_single:
        for one in order:
            case.open(sides[one])
            if case.is_open(sides[one]):
                medians[one].append(_turn(sides[one], case, turns))
                sides[one].ask("close")
        return medians
    for one in order:
        case.open(sides[one])
    present = [one for one in order if case.is_open(sides[one])]
    least, most = turns.rounds if len(present) == len(order) else (1, 1)
    began_s, number = time.monotonic(), 0
    while number < least or (number < most and time.monotonic() - began_s < turns.enough_s):
        for one in present if number % 2 == 0 else present[::-1]:
            medians[one].append(_turn(sides[one], case, turns))
        number += 1
    for one in present:
        sides[one].ask("close")
    return medians


def _turn(side: Side, case: PairedCase, turns: Turns) -> float:
    told = side.ask("take", case.patience_s, seconds=turns.turn_s, least=turns.least_samples)
    return float(statistics.median(told["samples_s"]))


@contextmanager
def arena(
    root: Path, *, profile: str, machine: str | None, echo: Callable[[str], None]
) -> Iterator[Arena]:
    """Hold the checkout and the device, and leave nothing behind."""
    root = checkout(root)
    with measuring_place(root, echo) as place, ExitStack() as worktrees:
        remove_stale_worktrees(root)
        run_id = f"pairs-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"
        folder = root / ARENAS / run_id
        folder.mkdir(parents=True)
        worktrees.callback(shutil.rmtree, folder, ignore_errors=True)
        told = {
            **os.environ,
            **place.environ,
            "DDTREE_BENCH_RUN_ID": run_id,
            "DDTREE_BENCH_PROFILE": profile,
            "DDTREE_BENCH_SIDECAR_DIR": str(folder),
        }
        if machine is not None:
            told["DDTREE_BENCH_MACHINE"] = machine
        turns = ON_CPU if place.device == CPU else ON_GPU
        yield Arena(root, folder, told, place.locks, turns, worktrees)


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
