"""Run asv for as long as whoever started us lives; a script of its own, which imports nothing.

A run may be killed so that it can end nothing itself. Standard input tells: it closes with the run,
and then everything of this session is killed, asv and the benchmark in flight. asv gives each
benchmark process its own process group, so a signal to asv or to its group would leave one that
measures on, beside the next run. Locks that the run handed down are held until all are gone.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PROCESSES = Path("/proc")  # where there is none, only asv itself is killed
POLL_S = 0.02


def main() -> int:
    """Run asv with our arguments and return its exit status."""
    with (
        subprocess.Popen(  # noqa: S603 - no shell; the run's own arguments
            [sys.executable, "-m", "asv", *sys.argv[1:]], stdin=subprocess.DEVNULL
        ) as asv
    ):
        is_over = threading.Event()
        watch = threading.Thread(target=_end_with_the_run, args=(asv, is_over), daemon=True)
        watch.start()
        status = asv.wait()
        if is_over.is_set():
            watch.join()
    return status if status >= 0 else 128 - status  # as a shell tells of a signal


def _end_with_the_run(asv: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    is_over.set()
    asv.kill()
    while others := list(_others_of_session()):
        for pid in others:
            _kill(pid)
        time.sleep(POLL_S)


def _others_of_session() -> Iterator[int]:
    """Give the processes of this session that still run, without this one."""
    session = os.getsid(0)
    for folder in PROCESSES.glob("[0-9]*"):
        try:
            state, _, _, of_session = _fields(folder)
        except (OSError, ValueError):
            continue  # it ended meanwhile
        pid = int(folder.name)
        if int(of_session) == session and pid != os.getpid() and state != "Z":
            yield pid


def _fields(folder: Path) -> list[str]:
    """Return state, parent, process group and session; a name may hold blanks and brackets."""
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:4]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())
