"""Run asv on this checkout or on a range of its commits, in the interpreter that runs us.

Without a range, the checkout itself is measured as it lies there, dirty or not, under the commit
at its HEAD. With a range, each commit gets a git worktree of its own and its engine is put first on
the path of the benchmark processes, so that what runs is what the result says; the sidecar proves
it. The benchmarks are always those of the invoking checkout: one definition for all commits of a
run, so that a change in a number is a change in the engine.

asv is called a unit at a time (`asv_units`), one run at a time in a checkout and on a device
(`locks`). What a killed run has finished is kept for the same command (`asv_journal`).

Nothing is installed and nothing outside `.asv/` is written but locks. This module knows asv's
command line and result files, and nothing of the database.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from dashboard.asv_commits import checkout, code_digest, commits_of, remove_stale_worktrees
from dashboard.asv_errors import RequestError
from dashboard.asv_journal import Durations, Journal
from dashboard.asv_measuring import Measuring
from dashboard.asv_progress import Progress
from dashboard.doctor import RunRecord, findings_of, write_record
from dashboard.gpus import VISIBLE, chosen_gpu
from dashboard.locks import device_lock, held
from dashboard.words import count_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROFILES: Final = ("quick", "history", "full")
UNDIVIDED: Final = (
    "history"  # a commit takes a minute, and each call of asv seconds before it starts
)
FOLDER: Final = Path(".asv")
RESULTS: Final = FOLDER / "results"
TELEMETRY: Final = RESULTS / "telemetry"
CHECKOUT_LOCK: Final = FOLDER / "run.lock"
CPU: Final = "cpu"
MACHINE_LABEL: Final = re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to measure."""

    root: Path  # of the checkout
    profile: str = "quick"
    commits: str | None = None  # git range or revision; None = the checkout as it lies there
    bench: str | None = None  # regular expression over benchmark names
    machine: str | None = None  # label; None = the one this checkout used before, or the host name
    time_limit_s: float | None = None  # start nothing that would not end within; None = no limit
    in_turns: bool = False  # a benchmark of each commit before the next one; else commit by commit
    restart: bool = False  # measure again what an unfinished run of the same command has

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise RequestError(
                f"profile: expected one of {', '.join(PROFILES)}, got {self.profile!r} "
                "(which cases to run)"
            )
        if self.machine is not None and not MACHINE_LABEL.fullmatch(self.machine):
            raise RequestError(
                f"machine: expected letters, digits, '.', '_' and '-', got {self.machine!r} "
                "(it names a folder of results)"
            )
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise RequestError(f"time limit: expected more than 0 s, got {self.time_limit_s}")
        try:
            re.compile(self.bench or "")
        except re.error as error:
            raise RequestError(
                f"bench: expected a regular expression, got {self.bench!r} ({error})"
            ) from error


@dataclass(frozen=True, slots=True)
class AsvRun:
    """What was measured; results and sidecar are on disk."""

    results_dir: Path
    sidecar_dir: Path
    run_id: str
    commits: tuple[str, ...]  # oldest first, 40 hex digits
    failed: tuple[str, ...]  # "<commit, 8 digits> <benchmark>(<params>)", of earlier calls too
    num_measured: int  # units measured by this call
    num_kept: int  # units that an unfinished run of the same command had measured
    left: str | None  # what the time limit left for the next call, in words
    findings: tuple[str, ...]  # the doctor's, as stored with the run


def run_asv(
    request: RunRequest,
    *,
    echo: Callable[[str], None] = lambda _: None,
    on_results: Callable[[], None] = lambda: None,
) -> AsvRun:
    """Run asv for each commit in turn, a unit at a time, and say what came of it.

    Parameters
    ----------
    request : RunRequest
    echo : called with each line for the user: what asv prints, as it prints it, and how far we are
    on_results : called whenever asv has written results, so that no later end loses them

    Raises
    ------
    NotACheckoutError, UnknownRangeError
        The request names a folder or commits that do not exist; nothing ran.
    AsvFailedError
        asv gave up before it wrote results, whatever it was asked for.
    RequestError
        No benchmark matches.
    """
    root = checkout(request.root)
    commits = commits_of(root, request.commits)
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"
    with measuring_place(root, echo) as place:
        if num_stale := remove_stale_worktrees(root):
            echo(f"removed {count_text(num_stale, 'worktree')} of a run that was killed")
        findings = _examined(root, request, run_id, place.device, echo)
        measuring = Measuring(
            root=root,
            results_dir=root / RESULTS,
            environ=_environ(request, run_id, root / TELEMETRY) | place.environ,
            locks=place.locks,
            journal=_journal(root, request, place.device, echo),
            progress=Progress(
                Durations.open(root / FOLDER, f"{request.profile} {place.device}"),
                num_commits=len(commits),
                time_limit_s=request.time_limit_s,
                echo=echo,
            ),
            bench=request.bench,
            is_isolated=request.commits is not None,
            is_divided=request.profile != UNDIVIDED,
            is_in_turns=request.in_turns,
            on_results=on_results,
        )
        measuring.measure(commits, run_id)
    return AsvRun(
        results_dir=root / RESULTS,
        sidecar_dir=root / TELEMETRY,
        run_id=run_id,
        commits=commits,
        failed=tuple(measuring.failed),
        num_measured=measuring.progress.num_measured,
        num_kept=measuring.progress.num_kept,
        left=measuring.left,
        findings=findings,
    )


def _examined(
    root: Path, request: RunRequest, run_id: str, device: str, echo: Callable[[str], None]
) -> tuple[str, ...]:
    """Have the doctor look before anything runs, and store what it found with the run."""
    findings = findings_of(root)
    record = RunRecord(
        run_id, request.profile, request.commits, request.bench, request.machine, device
    )
    write_record(root / TELEMETRY, record, findings)
    lines = tuple(finding.line for finding in findings)
    for line in lines:
        echo(f"doctor: {line}")
    return lines


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run measures."""

    device: str  # the GPU's UUID, or "cpu"
    environ: dict[str, str]  # what makes the benchmarks use it
    locks: tuple[int, ...]


@contextmanager
def measuring_place(root: Path, echo: Callable[[str], None]) -> Iterator[Place]:
    """Hold the checkout, whose result files asv writes over, and the device."""
    with chosen_gpu(os.environ) as gpu:
        device, environ = (CPU, {}) if gpu is None else (gpu.uuid, {VISIBLE: gpu.visible})
    with (
        held(root / CHECKOUT_LOCK, f"the checkout {root}", echo) as one,
        held(device_lock(device), f"the device {device}", echo) as other,
    ):
        yield Place(device, environ, (one, other))


def _environ(request: RunRequest, run_id: str, sidecar_dir: Path) -> dict[str, str]:
    """Return the environment that tells the benchmark processes what asv does not."""
    told = {
        "DDTREE_BENCH_RUN_ID": run_id,
        "DDTREE_BENCH_PROFILE": request.profile,
        "DDTREE_BENCH_SIDECAR_DIR": str(sidecar_dir),
    }
    if request.machine is not None:
        told["DDTREE_BENCH_MACHINE"] = request.machine
    return {**os.environ, **told}


def _journal(root: Path, request: RunRequest, device: str, echo: Callable[[str], None]) -> Journal:
    """Open what an unfinished run of the same command, on the same code and device, has left."""
    command = {
        "profile": request.profile,
        "commits": request.commits,
        "bench": request.bench,
        "machine": request.machine,
        "device": device,
        "python": sys.executable,
        "code": code_digest(root, with_engine=request.commits is None),
    }
    journal = Journal.open(root / FOLDER, command, root / RESULTS)
    if request.restart:
        journal.forget()
    if journal.entries:
        began = min(entry.started_ms for entry in journal.entries.values()) / 1e3
        echo(
            f"going on with the run of {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M} UTC, "
            "which did not end: what it measured is kept (--restart measures all again)"
        )
    return journal
