"""Measure commits in turns on one machine, each with its own engine, apart from stored results.

Every commit has a worktree; the benchmarks are those of the invoking checkout. asv runs in a folder
of its own below `.asv/`, so that a re-run of a few cases replaces no stored result. What a process
imported is read from its sidecar line and must be the commit's engine.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from dashboard.asv_commits import checkout, engine_of, git_lines, remove_stale_worktrees
from dashboard.asv_errors import AsvRunError
from dashboard.asv_process import LISTED_VARIABLE, Asv
from dashboard.asv_runs import FOLDER, measuring_place
from dashboard.words import case_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

ARENAS: Final = FOLDER / "pairs"
DEFINITIONS: Final = "benchmarks"
CONFIGURATION: Final = "asv.conf.json"


@dataclass(slots=True)
class Arena:
    """A machine that is held for a comparison, and the worktrees of it."""

    root: Path
    folder: Path
    environ: dict[str, str]
    locks: Sequence[int]
    echo: Callable[[str], None]
    _worktrees: ExitStack
    _known: dict[str, Asv] = field(default_factory=dict)
    _listed: str | None = None

    def measure(self, commit: str, patterns: Sequence[str]) -> dict[str, float]:
        """Measure cases of a commit once; give the median of its processes by case, in seconds.

        Raises
        ------
        AsvRunError
            A process ran another engine than the commit's, or asv gave up.
        """
        telemetry = self.folder / "telemetry" / uuid4().hex
        asv = self._asv(commit)
        told = {**asv.environ, "DDTREE_BENCH_SIDECAR_DIR": str(telemetry)}
        replace(asv, environ=told).run(patterns)
        tree = git_lines(self.root, "rev-parse", f"{commit}:engine")[0]
        processes: dict[str, list[float]] = defaultdict(list)
        for line in _lines(telemetry):
            name = case_name(line["benchmark"], ", ".join(line["params"]))
            ran = line["provenance"]["engine_tree"]
            if ran != tree or line["provenance"]["dirty"]:
                raise AsvRunError(
                    f"{name}: expected the engine of {commit[:12]}, got {str(ran)[:12]} "
                    "(what ran is not what is compared)"
                )
            processes[name].append(float(line["median_s"]))
        return {name: statistics.median(medians) for name, medians in processes.items()}

    def _asv(self, commit: str) -> Asv:
        """Make a commit's worktree when it is first measured."""
        if commit not in self._known:
            source = self._worktrees.enter_context(engine_of(self.root, commit, isolated=True))
            told = {
                **self.environ,
                "ASV_PYTHONPATH": str(source),
                "DDTREE_BENCH_COMMIT": commit,
            }
            asv = Asv(self.folder, commit, told, self.locks, self.echo)
            # The definitions are the checkout's for every commit, so that one discovery does.
            self._listed = self._listed or asv.discover().environ[LISTED_VARIABLE]
            listed = {**told, LISTED_VARIABLE: self._listed}
            self._known[commit] = replace(asv, environ=listed)
        return self._known[commit]


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
        _furnish(root, folder)
        worktrees.callback(shutil.rmtree, folder, ignore_errors=True)
        told = {
            **os.environ,
            **place.environ,
            "DDTREE_BENCH_RUN_ID": run_id,
            "DDTREE_BENCH_PROFILE": profile,
        }
        if machine is not None:
            told["DDTREE_BENCH_MACHINE"] = machine
        yield Arena(root, folder, told, place.locks, echo, worktrees)


def _furnish(root: Path, folder: Path) -> None:
    """Make a folder in which asv runs this checkout's benchmarks and writes its own results."""
    folder.mkdir(parents=True)
    configuration = json.loads((root / CONFIGURATION).read_text(encoding="utf-8"))
    configuration["repo"] = str(root)
    (folder / CONFIGURATION).write_text(json.dumps(configuration), encoding="utf-8")
    (folder / DEFINITIONS).symlink_to(root / DEFINITIONS, target_is_directory=True)
    known = root / FOLDER / "machine.json"
    if known.is_file():
        (folder / FOLDER).mkdir()
        shutil.copy(known, folder / FOLDER / "machine.json")


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
