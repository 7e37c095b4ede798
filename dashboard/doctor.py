"""What will make results noisy or wrong on this machine; nothing is changed.

`read_host` and `read_gpu` look, `host_findings` and `gpu_findings` judge. A run stores what was
found before it began as `<run id>.run` beside its sidecar in `.asv/results/telemetry`: one JSON
object, not called `.json`, because asv reads every such file below its results.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dashboard.asv_commits import DEFINITIONS, ENGINE, git_lines
from dashboard.asv_errors import AsvRunError
from dashboard.doctor_finding import Finding, Level
from dashboard.doctor_gpu import gpu_findings, read_gpu
from dashboard.gpus import VISIBLE, chosen_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RECORD_SCHEMA: Final = 1
MOST_LOAD: Final = 0.5  # processes that want to run, on average over a minute
MOST_NAMES: Final = 3  # of changed files in a message
DRIVER: Final = Path("/dev/nvidiactl")
NO_ANSWER: Final = Finding(
    Level.UNKNOWN,
    "driver",
    "expected NVML to name the GPU, got no answer (nobody can say what disturbs it)",
    "nvidia-smi",
)
GOVERNORS: Final = "devices/system/cpu/cpu*/cpufreq/scaling_governor"


@dataclass(frozen=True, slots=True)
class HostReadings:
    """What the checkout and the operating system say."""

    is_checkout: bool
    is_shallow: bool
    changed: tuple[str, ...]  # files of engine and benchmarks that differ from HEAD
    governors: frozenset[str]  # of the processors; empty where the system names none
    load: float


def findings_of(root: Path) -> list[Finding]:
    """Look at this machine and this checkout, and say what was found, the worst first."""
    found = host_findings(read_host(root))
    with chosen_gpu(os.environ) as gpu:
        if gpu is not None:
            found += gpu_findings(read_gpu(gpu))
        elif DRIVER.exists() and os.environ.get(VISIBLE) is None:
            found.append(NO_ANSWER)
    order = list(Level)
    return sorted(found, key=lambda one: order.index(one.level))


def read_host(root: Path, *, system: Path = Path("/sys")) -> HostReadings:
    """Look at a checkout and at the operating system."""
    try:
        shallow = git_lines(root, "rev-parse", "--is-shallow-repository")
        paths = (ENGINE, *DEFINITIONS)
        changed = git_lines(root, "status", "--porcelain", "--untracked-files=all", "--", *paths)
    except (AsvRunError, subprocess.CalledProcessError):
        shallow, changed = [], []
    governors = (path.read_text(encoding="utf-8").strip() for path in system.glob(GOVERNORS))
    return HostReadings(
        is_checkout=bool(shallow),
        is_shallow=shallow == ["true"],
        changed=tuple(line[3:] for line in changed),
        governors=frozenset(governors),
        load=os.getloadavg()[0],
    )


def host_findings(found: HostReadings) -> list[Finding]:
    """Say what makes results of this host and checkout noisy or wrong."""
    return [*_checkout(found), *_processors(found)]


def _checkout(found: HostReadings) -> Iterator[Finding]:
    if not found.is_checkout:
        yield Finding(
            Level.WRONG,
            "checkout",
            "expected a git checkout, got none here (results belong to commits)",
            "git clone",
        )
    if found.is_shallow:
        yield Finding(
            Level.WRONG,
            "shallow clone",
            "expected the whole history, got a part (results are ordered by it)",
            "git fetch --unshallow",
        )
    if found.changed:
        names = ", ".join(found.changed[:MOST_NAMES])
        rest = len(found.changed) - MOST_NAMES
        yield Finding(
            Level.WRONG,
            "dirty tree",
            f"expected the files of HEAD, got changes in {names}"
            f"{f' and {rest} more' if rest > 0 else ''} (results stay out of the history)",
            "git stash --include-untracked",
        )


def _processors(found: HostReadings) -> Iterator[Finding]:
    slow = sorted(found.governors - {"performance"})
    if slow:
        yield Finding(
            Level.NOISY,
            "CPU governor",
            f"expected performance, got {', '.join(slow)} (clocks follow the load)",
            "sudo cpupower frequency-set --governor performance",
        )
    if found.load > MOST_LOAD:
        yield Finding(
            Level.NOISY,
            "load",
            f"expected an idle machine, got a load of {found.load:.1f} over the last minute",
            "ps -eo pid,user,pcpu,args --sort=-pcpu | head",
        )


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What is stored of one invocation of `run` beside its sidecar."""

    run_id: str
    profile: str
    commits: str | None
    bench: str | None
    machine: str | None
    device: str  # a GPU's UUID, or "cpu"


def write_record(folder: Path, record: RunRecord, findings: Sequence[Finding]) -> Path:
    """Write what a run is and what was found before it began."""
    path = folder / f"{record.run_id}.run"
    content = {
        "schema": RECORD_SCHEMA,
        **asdict(record),
        "started_at": datetime.now(UTC).timestamp(),
        "findings": [asdict(finding) for finding in findings],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, allow_nan=False, indent=1), encoding="utf-8")
    return path
