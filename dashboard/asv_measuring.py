"""The loop of a run: each commit, each of its units that is not finished yet."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dashboard.asv_commits import engine_of
from dashboard.asv_errors import AsvFailedError, RequestError
from dashboard.asv_journal import keep_results
from dashboard.asv_pins import path_of
from dashboard.asv_process import LISTED_VARIABLE, Asv
from dashboard.asv_results import failed_cases
from dashboard.asv_units import declared, units_of, whole
from dashboard.words import count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from dashboard.asv_journal import Journal
    from dashboard.asv_progress import Progress
    from dashboard.asv_units import Unit


@dataclass(frozen=True, slots=True)
class _Side:
    """A commit that is being measured."""

    number: int  # among the commits of the run
    asv: Asv
    units: list[Unit]


@dataclass(slots=True)
class Measuring:
    """A run under way."""

    root: Path
    results_dir: Path
    environ: Mapping[str, str]
    locks: Sequence[int]
    journal: Journal
    progress: Progress
    bench: str | None
    is_isolated: bool  # each commit in a worktree of its own
    is_divided: bool  # into units; else a commit is one call of asv
    is_in_turns: (
        bool  # each unit of all commits before the next unit; else each commit before the next
    )
    on_results: Callable[[], None]
    failed: list[str] = field(default_factory=list)
    left: str | None = None  # by the time limit, in words
    _gave_up: list[AsvFailedError] = field(default_factory=list)
    _has_matches: bool = False
    _is_stored: bool = True
    _is_listed: bool = False  # asv's list is that of this checkout

    def measure(self, commits: Sequence[str], run_id: str) -> None:
        """Measure what is not finished; forget the journal once nothing is left."""
        numbered = dict(zip(commits, range(len(commits)), strict=True))
        groups = [commits] if self.is_in_turns else [[commit] for commit in commits]
        for group in groups:
            if self.left is not None:
                left = len(commits) - numbered[group[0]]
                self.left += f" and {count_text(left, 'commit')}"
                break
            todo = {one: numbered[one] for one in group if not self.journal.is_complete(one)}
            self._measure_commits(todo, run_id)
            for commit in group:
                self._count(commit)
        if self._gave_up and not (self.progress.num_measured or self.progress.num_kept):
            raise self._gave_up[-1]
        if not self._has_matches and self.left is None:
            self.journal.forget()
            raise RequestError(
                "bench: expected a regular expression that matches, got none that does"
            )
        if self.left is None and not self._gave_up:
            self.journal.forget()

    def _measure_commits(self, numbered: Mapping[str, int], run_id: str) -> None:
        with ExitStack() as worktrees:
            opened = [self._side(*one, worktrees) for one in numbered.items()]
            sides = [side for side in opened if side is not None]
            self._take_turns(sides, run_id)
        for side in sides:
            if all(self.journal.has(side.asv.commit, unit) for unit in side.units):
                self.journal.complete(side.asv.commit, run_id)

    def _side(self, commit: str, number: int, worktrees: ExitStack) -> _Side | None:
        """Lay out a commit's code and find its units; None where asv gave up."""
        environ = {**self.environ, "DDTREE_BENCH_COMMIT": commit}
        source = worktrees.enter_context(engine_of(self.root, commit, isolated=self.is_isolated))
        try:
            environ["ASV_PYTHONPATH"] = self._path(source)
            asv, units = self._units(
                Asv(self.root, commit, environ, self.locks, self.progress.echo)
            )
        except AsvFailedError as error:
            self._give_up(commit, error)
            return None
        return _Side(number, asv, units)

    def _take_turns(self, sides: Sequence[_Side], run_id: str) -> None:
        """Measure what is not finished, a unit of each side before the next unit.

        Which side goes first alternates, so that a drift of the machine favours none of two.
        """
        todo: dict[str, list[tuple[_Side, Unit]]] = {}
        for side in sides:
            left = [unit for unit in side.units if not self.journal.has(side.asv.commit, unit)]
            self.progress.num_kept += len(side.units) - len(left)
            for unit in left:
                todo.setdefault(unit.key, []).append((side, unit))
        rounds = [
            turn if place % 2 == 0 else turn[::-1] for place, turn in enumerate(todo.values())
        ]
        turns = [one for turn in rounds for one in turn]
        for place, (side, unit) in enumerate(turns):
            commit, later = side.asv.commit, turns[place + 1 :]
            if not self.progress.has_time_for(unit):
                self.left = f"{count_text(len(turns) - place, 'benchmark')} of {commit[:8]}"
                self._store()
                return
            self.progress.tell(side.number, commit, side.units, side.units.index(unit))
            self._measure_unit(side.asv, unit, run_id)
            if not unit.has_more_in(other for _, other in later):
                self._store()

    def _path(self, source: Path) -> str:
        """Return where a commit's processes look first: its code, then what it pins."""
        return path_of(self.root, source) if self.is_isolated else str(source)

    def _units(self, asv: Asv) -> tuple[Asv, list[Unit]]:
        """Return what to call, and for what; asv imports all benchmarks to find them, so once.

        The benchmarks of several commits are this checkout's for all of them: then once for all.
        """
        if self.is_divided:
            return asv.discover(), units_of(declared(self.results_dir), self.bench)
        if self.is_isolated:
            if not self._is_listed:
                told = {**asv.environ, "ASV_PYTHONPATH": str(self.root)}
                replace(asv, environ=told).discover()
                self._is_listed = True
            asv = replace(asv, environ={**asv.environ, LISTED_VARIABLE: "1"})
        return asv, [whole(self.bench)]

    def _measure_unit(self, asv: Asv, unit: Unit, run_id: str) -> None:
        started_s = time.monotonic()
        keep_results(self.root / ".asv", self.results_dir, asv.commit)
        entry = self.journal.begin(asv.commit, unit, run_id)
        try:
            asv.run(unit.patterns)
        except RequestError:
            return  # an undivided commit of which nothing matches
        except AsvFailedError as error:
            self._give_up(asv.commit, error, unit)
            return
        seconds = time.monotonic() - started_s
        among = unit.cases if unit.benchmarks else None
        cases = failed_cases(self.results_dir, asv.commit, entry.started_ms, among)
        self.journal.end(entry, seconds, cases)
        self.progress.measured(unit, seconds)
        self._is_stored = False

    def _store(self) -> None:
        """Hand on what asv has written; the cases of a part to come would read as skipped."""
        if not self._is_stored:
            self.on_results()
            self._is_stored = True

    def _give_up(self, commit: str, error: AsvFailedError, unit: Unit | None = None) -> None:
        """Go on with the rest; the journal stays, so the same command tries this again."""
        self._gave_up.append(error)
        self.failed.append(f"{commit[:8]} {unit.label if unit else 'all benchmarks'}: {error}")

    def _count(self, commit: str) -> None:
        """Add what is known of a commit once its units are done, or were before."""
        entries = self.journal.of_commit(commit)
        self._has_matches = self._has_matches or bool(entries)
        self.failed += [f"{commit[:8]} {case}" for entry in entries for case in entry.failed]
