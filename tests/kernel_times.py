"""What an op's kernels take in several checkouts, in turns: the command behind figures in a log.

    python -m tests.kernel_times --against ../before --implementations cuda triton_split
    python -m tests.kernel_times --fp8 --cells 8x9-c1024-b1-p1-shuffled '^64x9-c65536'
    python -m tests.kernel_times --op grouped_experts --cells 9 33
    python -m tests.kernel_times --against .
    python -m tests.kernel_times --profile

Each checkout, dirty or not, has a process with its engine, this one's too; inputs, clock and flush
are those of the suites here. A cell is built by one process after the other, and no result is timed
that differs from the op's definition. Then a round is a turn of each, in an order that alternates:
runs that do not count, then samples, caches cold, a graph's replay each; on a CPU a call by the
wall, which says nothing of a kernel. A difference is that of the medians of turns of one round:
the mean of its logarithm and Student's 95 % interval; `--against .` tells what it is of equal code.
The floor is that of a case, at rates that are measured here.
`--profile` has Nsight Compute look at one launch here, and times nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks._interleaved import visiting_order
from dashboard.asv_commits import git_lines
from dashboard.asv_errors import AsvRunError, RequestError
from dashboard.gpus import VISIBLE, chosen_gpu
from dashboard.locks import device_lock, held
from dashboard.sides import Side
from tests.kernel_cells import DEFAULT_CELLS, cells_of
from tests.kernel_profile import ProfileError, profiled, table
from tests.kernel_table import HERE, Checkout, Race, Timing, body, head, kept

ROOT = Path(__file__).resolve().parent.parent
WORKER = [sys.executable, "-P", "-m", "tests.kernel_worker"]
ROUNDS, SAMPLES = 15, 5


@contextmanager
def named(name):
    """Say whose process failed."""
    try:
        yield
    except AsvRunError as error:
        raise AsvRunError(f"{name}: {error}") from error


@contextmanager
def measuring():
    """Hold the device; yield the environment of who measures on it, and the lock's file."""
    with chosen_gpu(os.environ) as gpu:
        device, told = ("cpu", {}) if gpu is None else (gpu.uuid, {VISIBLE: gpu.visible})
    with held(device_lock(device), f"the device {device}", say) as lock:
        yield {**os.environ, **told}, lock


def say(line):
    sys.stderr.write(f"{line}\n")


def environment(environ, checkout, folder):
    """Put a link to a checkout's engine first on the path, and what is here behind it."""
    engine = checkout.resolve() / "engine"
    if not (engine / "__init__.py").is_file():
        raise RequestError(f"checkout: expected a folder with an engine, got {checkout}")
    folder.mkdir()
    (folder / "engine").symlink_to(engine)
    return {**environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def start(environ, lock, complaints):
    """Start a process; its first answer says that it has imported what it needs."""
    with complaints.open("wb") as file:
        process = subprocess.Popen(
            WORKER, bufsize=0, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=file, start_new_session=True, pass_fds=(lock,),
        )  # fmt: skip
    return Side(process, process.stdin, process.stdout, complaints)


def examined(name, folder, about):
    """Say which commit's engine a process has imported; refuse another one's than the folder's."""
    expected = folder.resolve() / "engine"
    if about["folder"] != str(expected):
        raise AsvRunError(f"{name}: expected the engine of {expected}, got {about['folder']}")
    try:
        (commit,) = git_lines(folder, "rev-parse", "HEAD")
    except subprocess.CalledProcessError:
        commit = "no commit"
    return Checkout(name, commit, about["engine_tree"], about["dirty"] is not False)


def race(sides, cell, told, asked):
    """Build a cell in all processes, then let them take turns."""
    names = asked.implementations
    known = {}
    for name, side in sides.items():
        with named(name):
            known[name] = side.ask("open", op=asked.op, cell=told, names=names, is_fp8=asked.fp8)
    floor = sides[HERE].ask("floor")
    taken = {name: [] for name in sides}
    order = list(sides)
    for number in range(asked.rounds):
        for index in visiting_order(len(order), number):
            with named(order[index]):
                taken[order[index]].append(sides[order[index]].ask("take", count=asked.samples))
    return [Race(cell, name, *_of(name, known, taken), floor) for name in names]


def _of(implementation, known, taken):
    """Give the timings of an implementation by checkout, and where there are none the reasons."""
    found = {name: one[implementation] for name, one in known.items()}
    timings = {
        name: Timing(
            [turn["samples_s"][implementation] for turn in taken[name]],
            one["error_rel"],
            taken[name][-1]["validity"][implementation],
        )
        for name, one in found.items()
        if "absent" not in one
    }
    return timings, {name: one["absent"] for name, one in found.items() if "absent" in one}


def timed(asked, cells, environ, lock, folder):
    """Time all cells in all checkouts and print the table; say whether nothing is missing."""
    folders = {HERE: ROOT} | {str(path): path for path in asked.against}
    with ExitStack() as ends:
        sides = {}
        for number, (name, path) in enumerate(folders.items()):
            own = folder / str(number)
            sides[name] = start(environment(environ, path, own), lock, own / "complaints.txt")
            ends.callback(sides[name].end)
        abouts = {}
        for name, side in sides.items():
            with named(name):
                side.hear()  # that it has imported what it needs
                abouts[name] = side.ask("about")
        checkouts = [examined(name, folders[name], about) for name, about in abouts.items()]
        device = abouts[HERE]["device"]
        asked.implementations = asked.implementations or default_names(device)
        races = [one for cell, told in cells.items() for one in race(sides, cell, told, asked)]
    sys.stdout.write("\n".join([*head(device, checkouts, asked), "", *body(races)]) + "\n")
    if asked.json is not None:
        found = json.dumps(kept(device, checkouts, races, asked), indent=1)
        asked.json.write_text(found + "\n", encoding="utf-8")
    return not any(one.absent for one in races)


def default_names(device):
    return ["reference" if device["kind"] == "cpu" else "cuda"]


def looked_at(asked, cells, environ, folder):
    """Profile one launch of each implementation in each cell here, and print what it says."""
    environ = environment(environ, ROOT, folder / HERE)
    for cell, told in cells.items():
        for name in asked.implementations or ["cuda"]:
            plan = {"op": asked.op, "cell": told, "name": name, "is_fp8": asked.fp8}
            command = [*WORKER, "launch", json.dumps(plan)]
            launches = profiled(command, folder / "ncu.csv", env=environ)
            sys.stdout.write(f"{asked.op}, {cell}, {name}\n\n{table(launches)}\n\n")


def parser():
    found = argparse.ArgumentParser(prog="python -m tests.kernel_times")
    found.add_argument("--op", choices=DEFAULT_CELLS, default="tree_attention")
    found.add_argument("--against", type=Path, nargs="+", default=[], metavar="CHECKOUT")
    found.add_argument(
        "--cells", nargs="+", help="labels as benchmarks/peers.py has them, or parts"
    )
    found.add_argument("--implementations", nargs="+", metavar="NAME")
    found.add_argument("--fp8", action="store_true", help="cached rows in fp8")
    found.add_argument("--rounds", type=int, default=ROUNDS)
    found.add_argument("--samples", type=int, default=SAMPLES, help="of a turn")
    found.add_argument("--json", type=Path, help="a file for all samples")
    found.add_argument("--profile", action="store_true", help="by ncu, in place of times")
    return found


def main(arguments=None):
    asked = parser().parse_args(arguments)
    if asked.rounds < 2 or asked.samples < 1:
        parser().error("rounds, samples: expected at least 2 and 1 (an interval needs two rounds)")
    try:
        texts = asked.cells or DEFAULT_CELLS[asked.op]
        cells = cells_of(asked.op, texts, is_fp8=asked.fp8)
        with measuring() as (environ, lock), tempfile.TemporaryDirectory() as folder:
            if asked.profile:
                looked_at(asked, cells, environ, Path(folder))
                return 0
            return 0 if timed(asked, cells, environ, lock, Path(folder)) else 1
    except (AsvRunError, ProfileError) as error:
        say(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
