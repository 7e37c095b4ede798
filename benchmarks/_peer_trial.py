"""A rehearsal in processes of its own: who can take which cell, and is right in it.

A stock kernel that reads where it may not ends the CUDA context, and with it everything its process
would still have measured. So every contestant first runs here, in a child. A child that ends before
its time costs the contestant it ended in, and another child carries on behind it. Implementations
rehearse beside each other, because most of the time is their compilers'. Only those that came
through are built again, and timed, in the process that measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import torch

from benchmarks._device import DEVICE
from benchmarks._identity import SuiteError
from benchmarks._interleaved import Absent, Contestant
from benchmarks._peer_cells import PeerCell, mask_of
from benchmarks._peer_inputs import PeerInputs, build_inputs
from benchmarks._peers import PeerRefusedError, enter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BENCHMARKS: Final = Path(__file__).resolve().parent
PLAN: Final = "plan.json"
NEWS: Final = "news.jsonl"
DTYPE: Final = torch.bfloat16 if DEVICE == "cuda" else torch.float32
STALL_S: Final = 240.0  # without news; a build of a library's kernels takes a minute
POLL_S: Final = 0.1
FAULTED: Final = 3  # exit status of a child whose device no longer answers


@dataclass(frozen=True, slots=True)
class Job:
    """One implementation in one cell."""

    cell: PeerCell
    name: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a job: how far its result was from the definition, or why it is not measured."""

    error_rel: float | None = None
    reason: str | None = None


def rehearse(jobs: Sequence[Job], *, stall_s: float = STALL_S) -> dict[Job, Verdict]:
    """Run every job once in a child process; return what came of each.

    Raises
    ------
    SuiteError
        A child ended before it began a job: that is nobody's fault but ours.
    """
    by_name: dict[str, list[Job]] = {}
    for job in jobs:
        by_name.setdefault(job.name, []).append(job)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(partial(_rehearse_in_order, stall_s=stall_s), by_name.values()))
    found = {job: verdict for part in parts for job, verdict in part.items()}
    return {job: found[job] for job in jobs}


def _rehearse_in_order(jobs: Sequence[Job], *, stall_s: float) -> dict[Job, Verdict]:
    """Run jobs one after the other, in as many children as it takes."""
    found: dict[Job, Verdict] = {}
    remaining = list(jobs)
    while remaining:
        verdicts, blamed = _run_child(remaining, stall_s)
        if blamed is not None:
            verdicts[blamed[0]] = Verdict(reason=blamed[1])
        found |= verdicts
        remaining = [job for job in remaining if job not in verdicts]
    return found


def entries(
    cell: PeerCell, names: Sequence[str], verdicts: Mapping[Job, Verdict]
) -> list[Contestant | Absent]:
    """Build a cell's contestants in this process: those that came through the rehearsal."""
    inputs = build_inputs(cell, device=DEVICE, dtype=DTYPE)
    expected = {mask: inputs.expected(mask) for mask in sorted({mask_of(name) for name in names})}
    found: list[Contestant | Absent] = []
    for name in names:
        reason = verdicts[Job(cell, name)].reason
        if reason is None:
            try:
                entrant = enter(name, inputs, expected[mask_of(name)])
            except PeerRefusedError as refused:
                reason = str(refused)
            else:
                found.append(Contestant(name, entrant.body, entrant.facts))
                continue
        found.append(Absent(name, reason))
    return found


def _run_child(
    jobs: Sequence[Job], stall_s: float
) -> tuple[dict[Job, Verdict], tuple[Job, str] | None]:
    """Run one child; return what it found, and the job it ended in with the way it ended."""
    with tempfile.TemporaryDirectory() as folder:
        news = Path(folder) / NEWS
        news.touch()
        plan = json.dumps([asdict(job) for job in jobs])
        (Path(folder) / PLAN).write_text(plan, encoding="utf-8")
        with (Path(folder) / "output").open("w+b") as output:
            end = _waited(_started(Path(folder), output), news, stall_s)
            last_words = _last_line(output)
        verdicts: dict[Job, Verdict] = {}
        begun: Job | None = None
        for line in news.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            begun = None if "verdict" in entry else jobs[entry["job"]]
            if "verdict" in entry:
                verdicts[jobs[entry["job"]]] = Verdict(**entry["verdict"])
    if begun is None and not verdicts:
        raise SuiteError(f"rehearsal: expected a child to begin a job, got {end} ({last_words})")
    return verdicts, None if begun is None else (begun, f"{begun.name}: {end} ({last_words})")


def _started(folder: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a child with these benchmarks and the engine that this process imported.

    asv finds the benchmarks by a hook of its own and the engine by the path, where an older
    commit's may stand; so a link to the benchmarks comes first, then the path as it is here.
    """
    (folder / BENCHMARKS.name).symlink_to(BENCHMARKS)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.Popen(  # noqa: S603 - our own interpreter and files
        [sys.executable, "-P", "-m", "benchmarks._peer_trial", str(folder)],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def _waited(child: subprocess.Popen[bytes], news: Path, stall_s: float) -> str:
    """Wait for the child to end, kill it if it says nothing for too long; return how it ended."""
    size, changed_s = 0, time.monotonic()
    while child.poll() is None:
        time.sleep(POLL_S)
        if (now := news.stat().st_size) != size:
            size, changed_s = now, time.monotonic()
        if time.monotonic() - changed_s > stall_s:
            child.kill()
            child.wait()
            return f"its process said nothing for {stall_s:g} s"
    return f"its process ended with status {child.returncode}"


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "no output"


def _child(folder: Path) -> int:
    """Do the jobs of a plan in order, one line of news before each and one after it."""
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    jobs = [Job(PeerCell(**job["cell"]), job["name"]) for job in plan]
    with (folder / NEWS).open("a", encoding="utf-8", buffering=1) as file:
        for number, inputs, expected in _posed(jobs):
            file.write(json.dumps({"job": number}) + "\n")
            verdict = _tried(jobs[number], inputs, expected)
            file.write(json.dumps({"job": number, "verdict": asdict(verdict)}) + "\n")
            if verdict.reason is not None and not _device_answers():
                return FAULTED
    return 0


def _posed(jobs: Sequence[Job]) -> Iterator[tuple[int, PeerInputs, torch.Tensor]]:
    """Yield each job's number, operands and expected result; made once for jobs of one cell."""
    inputs: PeerInputs | None = None
    expected: dict[str, torch.Tensor] = {}
    for number, job in enumerate(jobs):
        if inputs is None or inputs.cell != job.cell:
            inputs, expected = None, {}  # freed before the next cell's are made
            inputs = build_inputs(job.cell, device=DEVICE, dtype=DTYPE)
        mask = mask_of(job.name)
        if mask not in expected:
            expected[mask] = inputs.expected(mask)
        yield number, inputs, expected[mask]


def _tried(job: Job, inputs: PeerInputs, expected: torch.Tensor) -> Verdict:
    try:
        return Verdict(error_rel=enter(job.name, inputs, expected).error_rel)
    except PeerRefusedError as refused:
        return Verdict(reason=str(refused))


def _device_answers() -> bool:
    """Say whether the device still works; an error of the kind that ends its context stays."""
    if DEVICE == "cpu":
        return True
    try:
        torch.cuda.synchronize()
        torch.ones(1, device=DEVICE).add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(_child(Path(sys.argv[1])))
