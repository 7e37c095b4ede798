"""Run asv on this checkout or on a range of its commits, in the interpreter that runs us.

Without a range, the checkout itself is measured as it lies there, dirty or not, under the commit
at its HEAD. With a range, each commit gets a git worktree of its own and its engine is put first on
the path of the benchmark processes, so that what runs is what the result says; the sidecar proves
it. The benchmarks are always those of the invoking checkout: one definition for all commits of a
run, so that a change in a number is a change in the engine.

Nothing is installed and nothing outside `.asv/` is written. This module knows asv's command line
and result files, and nothing of the database.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from dashboard.asv_results import failed_cases

PROFILES = ("quick", "full")
RESULTS = Path(".asv") / "results"
WORKTREES = Path(".asv") / "worktrees"
MACHINE_LABEL = re.compile(r"\w[\w.-]*", re.ASCII)
OK, SOME_FAILED = 0, 2  # asv's exit statuses after which results were written
NOTHING_SELECTED = "No benchmarks selected"  # asv's last words where no name matches
LAST_LINES = 5  # of asv's output that an error message may quote


class AsvRunError(Exception):
    """asv could not be run as asked; the message is one line for the user."""


class NotACheckoutError(AsvRunError):
    """The folder is not the root of a git checkout with an asv.conf.json."""


class RequestError(AsvRunError):
    """A profile, regular expression or machine label that cannot be used."""


class UnknownRangeError(AsvRunError):
    """The commits do not exist, or the range holds none."""


class AsvFailedError(AsvRunError):
    """asv ended without writing results."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to measure."""

    root: Path  # of the checkout
    profile: str = "quick"
    commits: str | None = None  # git range or revision; None = the checkout as it lies there
    bench: str | None = None  # regular expression over benchmark names
    machine: str | None = None  # label; None = the one this checkout used before, or the host name

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
    exit_status: int  # asv's: 0, or 2 where a benchmark failed
    failed: tuple[str, ...]  # "<commit, 8 digits> <benchmark>(<params>)"


def run_asv(request: RunRequest, *, echo: Callable[[str], None] | None = None) -> AsvRun:
    """Run asv for each commit in turn and say what came of it.

    Parameters
    ----------
    request : RunRequest
    echo : callable, optional
        Called with each line asv prints, as it prints it.

    Raises
    ------
    NotACheckoutError, UnknownRangeError
        The request names a folder or commits that do not exist; nothing ran.
    AsvFailedError
        asv gave up before it wrote results.
    RequestError
        No benchmark matches.
    """
    root = _checkout(request.root)
    commits = _commits(root, request.commits)
    run_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid4().hex[:8]}"
    sidecar_dir = root / RESULTS / "telemetry"
    status, failed = OK, list[str]()
    for commit in commits:
        environ = _environ(request, run_id, commit, sidecar_dir)
        started_ms = time.time() * 1e3
        with _engine_of(root, commit, isolated=request.commits is not None) as source:
            environ["ASV_PYTHONPATH"] = str(source)
            status = max(status, _asv(root, _arguments(request, commit), environ, echo))
        cases = failed_cases(root / RESULTS, commit, started_ms)
        failed += [f"{commit[:8]} {case}" for case in cases]
    return AsvRun(root / RESULTS, sidecar_dir, run_id, commits, status, tuple(failed))


def _checkout(root: Path) -> Path:
    """Return the root, resolved; refuse a folder that asv could not run in."""
    root = root.resolve()
    if not (root / "asv.conf.json").is_file() or not (root / ".git").exists():
        raise NotACheckoutError(
            f"checkout: expected a git checkout with an asv.conf.json, got {root} "
            "(benchmarks are run from their repository)"
        )
    return root


def _commits(root: Path, text: str | None) -> tuple[str, ...]:
    """Return the full hashes of a revision or a range, oldest first."""
    if text is None:
        return (_git_lines(root, "rev-parse", "--verify", "HEAD")[0],)
    is_range = ".." in text or text.endswith(("^!", "^@"))
    try:
        if is_range:
            found = _git_lines(
                root, "rev-list", "--first-parent", "--reverse", "--end-of-options", text, "--"
            )
        else:
            revision = f"{text}^{{commit}}"
            found = _git_lines(root, "rev-parse", "--verify", "--end-of-options", revision)[-1:]
    except subprocess.CalledProcessError as error:
        raise UnknownRangeError(
            f"commits: expected a revision or a range of this repository, got {text!r} "
            f"(git: {_last_line(error.stderr)})"
        ) from error
    if not found:
        raise UnknownRangeError(f"commits: expected at least one commit, got none in {text!r}")
    return tuple(found)


@contextmanager
def _engine_of(root: Path, commit: str, *, isolated: bool) -> Iterator[Path]:
    """Yield a folder whose engine is the commit's: its own worktree, or the checkout itself."""
    if not isolated:
        yield root
        return
    worktree = root / WORKTREES / f"{commit[:12]}-{uuid4().hex[:8]}"
    worktree.parent.mkdir(parents=True, exist_ok=True)
    _git_lines(root, "worktree", "add", "--quiet", "--detach", str(worktree), commit)
    try:
        yield worktree
    finally:
        _git_lines(root, "worktree", "remove", "--force", str(worktree))


def _environ(request: RunRequest, run_id: str, commit: str, sidecar_dir: Path) -> dict[str, str]:
    """Return the environment that tells the benchmark processes what asv does not."""
    told = {
        "DDTREE_BENCH_RUN_ID": run_id,
        "DDTREE_BENCH_COMMIT": commit,
        "DDTREE_BENCH_PROFILE": request.profile,
        "DDTREE_BENCH_SIDECAR_DIR": str(sidecar_dir),
    }
    if request.machine is not None:
        told["DDTREE_BENCH_MACHINE"] = request.machine
    return {**os.environ, **told}


def _arguments(request: RunRequest, commit: str) -> list[str]:
    """Return asv's arguments; the machine file and its label are the asv plugin's business."""
    bench = [] if request.bench is None else ["--bench", request.bench]
    return [
        "run",
        "--environment",
        f"existing:{sys.executable}",
        "--set-commit-hash",
        commit,
        "--record-samples",
        "--launch-method",
        "spawn",
        "--show-stderr",
        *bench,
    ]


def _asv(
    root: Path,
    arguments: list[str],
    environ: Mapping[str, str],
    echo: Callable[[str], None] | None,
) -> int:
    """Run asv to its end and return its exit status; refuse one that wrote no results."""
    last = deque[str](maxlen=LAST_LINES)
    with subprocess.Popen(  # noqa: S603 - no shell; user text is one argument each
        [sys.executable, "-m", "asv", *arguments],
        cwd=root,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            text = line.rstrip("\n")
            if text.strip():
                last.append(text.strip(" ·"))
            if echo is not None:
                echo(text)
    if process.returncode not in (OK, SOME_FAILED):
        if last and last[-1] == NOTHING_SELECTED:
            raise RequestError(
                "bench: expected a regular expression that matches, got none that does"
            )
        raise AsvFailedError(
            f"asv run: expected exit status {OK} or {SOME_FAILED}, got {process.returncode} "
            f"(asv: {last[-1] if last else 'no output'})"
        )
    return process.returncode


def _git_lines(root: Path, *arguments: str) -> list[str]:
    git = shutil.which("git")
    if git is None:
        raise AsvRunError("git: expected it on the path, got none (commits are read with it)")
    outcome = subprocess.run(  # noqa: S603 - no shell; user text comes after --end-of-options
        [git, "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return outcome.stdout.splitlines()


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("fatal: ") if lines else "no message"
