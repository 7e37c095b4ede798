"""An asv plugin (see `plugins` in asv.conf.json): processes import torch ahead, several at a time.

asv starts a process for each case and round, and most of a short one is the import of torch on one
core. Here as many are started at once as there are cores, none of which knows its case yet. The
first one measures when all have imported and sleep; the others follow in turn::

    core 1   import torch │ case 1 │ case 2 │ import torch │ case 3 │ case 4
    core 2   import torch │ asleep │        │ import torch │ asleep │

So each case has a fresh process of its own as before, and nothing runs beside the one that
measures. The processes of a benchmark with a cache only hand on what was measured there, mostly
without torch, and are left to asv. `DDTREE_BENCH_STARTS_AHEAD` says another number of processes;
0 or 1 leaves all to asv.

A profile that shares a process (`Profile.shares_process`) has one that serves case after case, each
built anew, until one fails or the next round begins: what a case costs is then its own time, not
the start of a process and of its GPU. Those of the next rounds have imported by then and sleep. The
cases of a round are no independent samples of what the start of a process decides; the rounds of a
case are, as ever. `DDTREE_BENCH_SHARES_PROCESS` says 1 or 0 whatever the profile.

The suites are one checkout's, the engine may be an older commit's. Where a suite asks it for a name
that it does not have yet, the case is skipped, not failed: the commit lacks what is measured.
"""

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks._asv_waiting import READY, SERVES_VARIABLE
from benchmarks._regimes import PROFILE

COUNT_VARIABLE: Final = "DDTREE_BENCH_STARTS_AHEAD"
SHARES_VARIABLE: Final = "DDTREE_BENCH_SHARES_PROCESS"
MOST: Final = 8  # each holds some 300 MB
PLACE: Final = re.compile(r'^ *File "([^"]+)", line \d+', re.MULTILINE)  # in a traceback
LACKS: Final = re.compile(
    r"^(?:ImportError: cannot import name '(?P<name>\w+)' from '(?P<module>engine[\w.]*)'"
    r"|ModuleNotFoundError: No module named '(?P<whole>engine\.[\w.]+)')",
    re.MULTILINE,
)
SCRIPT: Final = Path(__file__).with_name("_asv_waiting.py")
LAST_WORDS_S: Final = 1.0  # between being asked to end and being ended
STDIN: Final = 0


class AheadError(Exception):
    """`DDTREE_BENCH_STARTS_AHEAD` is no number of processes."""


def setup() -> None:
    """Have asv start its processes ahead; asv calls it."""
    # Benchmark processes import this module too, and in a managed environment there is no asv.
    from asv import runner  # noqa: PLC0415

    count = num_ahead(os.environ)
    if shares_process(os.environ):
        runner.Spawner = partial(ServingSpawner, runner.Spawner, PROFILE.rounds)
    elif count > 1:
        runner.Spawner = partial(AheadSpawner, runner.Spawner, count)


def num_ahead(environ: Mapping[str, str]) -> int:
    """Return how many processes to start at once."""
    told = environ.get(COUNT_VARIABLE)
    if told is None:
        return min(num_cores(), MOST)
    if not told.isdecimal():
        raise AheadError(f"{COUNT_VARIABLE}: expected a number of processes, got {told!r}")
    return int(told)


def num_cores() -> int:
    """Return how many cores this process may use, which a scheduler or `taskset` may limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shares_process(environ: Mapping[str, str]) -> bool:
    """Return whether one process serves the cases of a round."""
    if environ.get(COUNT_VARIABLE) in {"0", "1"}:
        return False
    return environ.get(SHARES_VARIABLE, str(int(PROFILE.shares_process))) == "1"


def lacked_name(text: str, benchmark_dir: str) -> str | None:
    """Return what the engine lacks if a suite ended because it imports it; None if not so.

    What the engine itself fails to import is its failure, not a name that it does not have yet.
    """
    places = list(PLACE.finditer(text))
    if not places or not Path(places[-1][1]).is_relative_to(benchmark_dir):
        return None
    found = LACKS.search(text, places[-1].end())
    if found is None:
        return None
    return f"{found['module']}.{found['name']}" if found["name"] else found["whole"]


class AheadSpawner:
    """Stands in for asv's `Spawner`, and hands on to one what it does not do itself."""

    _told: Mapping[str, str] = {}

    def __init__(self, plain: type[Any], count: int, env: Any, benchmark_dir: str) -> None:
        self._plain = plain(env, benchmark_dir)
        self._env = env
        self._benchmark_dir = str(Path(benchmark_dir).resolve())
        self._count = count
        self._waiting: list[_Waiting] = []
        self._caches: set[str | None] = set()

    def preimport(self) -> tuple[bool, str]:
        """Import nothing in asv's own process."""
        outcome: tuple[bool, str] = self._plain.preimport()
        return outcome

    def interrupt(self) -> None:
        """Know that the user has interrupted asv."""
        self._plain.interrupt()

    def create_setup_cache(self, *arguments: Any) -> tuple[str | None, str | None]:
        """Have asv make a cache, and know the benchmarks with it by its folder."""
        outcome: tuple[str | None, str | None] = self._plain.create_setup_cache(*arguments)
        self._caches.add(outcome[0])
        return outcome

    def run(
        self,
        name: str,
        params_str: str,
        profile_path: str,
        result_file_name: str,
        timeout: float,
        cwd: str,
    ) -> tuple[str, int]:
        """Measure a case in the next process; return its output and exit status."""
        from asv.runner import BENCHMARK_RUN_SCRIPT  # noqa: PLC0415

        words = [name, params_str, profile_path, result_file_name]
        if cwd in self._caches:
            outcome: tuple[str, int] = self._plain.run(*words, timeout, cwd)
            return outcome
        self._end_round(name)
        if not self._waiting:
            self._waiting = self._start()
        command = [BENCHMARK_RUN_SCRIPT, "run", self._benchmark_dir, *words]
        text, status = self._measure(command, timeout, cwd)
        lacked = lacked_name(text, self._benchmark_dir) if status else None
        if lacked is None:
            return text, status
        Path(result_file_name).write_text("NaN", encoding="utf-8")  # asv's word for skipped
        return f"asv: skipped: the engine of this commit has no {lacked}\n", 0

    def _end_round(self, name: str) -> None:
        """Know which case comes; every process has one, whatever the round."""

    def _measure(self, command: list[str], timeout_s: float, folder: str) -> tuple[str, int]:
        """Give a case to the first of those that wait."""
        return self._waiting.pop(0).measure(command, timeout_s, folder)

    def close(self) -> None:
        """End those that nothing was left for."""
        for process in self._waiting:
            process.dismiss()
        self._plain.close()

    def _start(self) -> list["_Waiting"]:
        environ = {**os.environ, **self._env.env_vars, **self._told}
        started = [_Waiting.start(self._env, environ) for _ in range(self._count)]
        for process in started:
            process.await_ready()
        return started


class ServingSpawner(AheadSpawner):
    """Has one process serve a round, and the next one go on after a case that failed."""

    _told: Mapping[str, str] = {SERVES_VARIABLE: "1"}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._served: set[str] = set()  # by the first of those that are there

    def _end_round(self, name: str) -> None:
        if name in self._served:
            self._waiting.pop(0).dismiss()
            self._served.clear()
        self._served.add(name)

    def _measure(self, command: list[str], timeout_s: float, folder: str) -> tuple[str, int]:
        outcome = self._waiting[0].serve(command, timeout_s, folder)
        if outcome[1]:
            self._waiting.pop(0)
            self._served.clear()
        return outcome


@dataclass(slots=True)
class _Waiting:
    """A process that has a case as soon as it is told one."""

    process: subprocess.Popen[bytes]
    line: int  # to its standard input; closes with us, and it ends
    said: bytes = b""

    @classmethod
    def start(cls, env: Any, environ: Mapping[str, str]) -> "_Waiting":
        """Start one as asv's environment starts processes, but for its standard input."""
        reader, writer = os.pipe()
        with _stdin_of_children(reader):
            # -P: the script's folder holds suites, with names that are anybody's.
            process = env.run(
                ["-P", str(SCRIPT)], return_popen=True, redirect_stderr=True, env=dict(environ)
            )
        return cls(process, writer)

    def await_ready(self) -> None:
        """Wait until it has imported and sleeps, or has died."""
        said, _ = self._until_ready(None)
        self.said += said

    def measure(self, command: list[str], timeout_s: float, folder: str) -> tuple[str, int]:
        """Tell it its case and wait for its end; return its output and exit status."""
        from asv.util import TIMEOUT_RETCODE  # noqa: PLC0415

        status: int | None = None
        try:
            self._tell(json.dumps([folder, command]))
            said, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            said, status = self._end(), TIMEOUT_RETCODE
        except BaseException:
            self._end()
            raise
        text = (self.said + said).decode("utf-8", "replace")
        return text, self.process.returncode if status is None else status

    def serve(self, command: list[str], timeout_s: float, folder: str) -> tuple[str, int]:
        """Tell it a case and wait until it is done with it; as `measure`, but it lives on."""
        from asv.util import TIMEOUT_RETCODE  # noqa: PLC0415

        status = 0
        try:
            with suppress(BrokenPipeError):
                os.write(self.line, json.dumps([folder, command]).encode() + b"\n")
            said, is_ready = self._until_ready(timeout_s)
            if not is_ready:
                self.process.wait()
                os.close(self.line)
                status = self.process.returncode or 1  # it is to end for a failure alone
        except subprocess.TimeoutExpired as late:
            said, status = (late.output or b"") + self._end(), TIMEOUT_RETCODE
            os.close(self.line)
        except BaseException:
            self._end()
            raise
        text = (self.said + said).decode("utf-8", "replace")
        self.said = b""
        return text, status

    def dismiss(self) -> None:
        """Have it end without a case."""
        os.close(self.line)
        self.process.communicate()

    def _until_ready(self, timeout_s: float | None) -> tuple[bytes, bool]:
        """Give what it says until it is ready; False if it has died instead."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        said, output = b"", self._output.fileno()
        while not said.endswith(READY):
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            if not select.select([output], [], [], left_s)[0]:
                raise subprocess.TimeoutExpired(str(SCRIPT), timeout_s or 0.0, said)
            if not (part := os.read(output, 1 << 16)):
                return said, False
            said += part
        return said.removesuffix(READY), True

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError), open(self.line, "w", encoding="utf-8") as told:  # noqa: PTH123
            told.write(line + "\n")

    def _end(self) -> bytes:
        """End it with what it has started, as asv does; return its output."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                return self.process.communicate(timeout=LAST_WORDS_S)[0]
        return self.process.communicate()[0]

    @property
    def _output(self) -> Any:
        return self.process.stdout


@contextmanager
def _stdin_of_children(reader: int) -> Iterator[None]:
    """Give processes started meanwhile another standard input: asv's call has no word for it."""
    kept = os.dup(STDIN)
    os.dup2(reader, STDIN)
    os.close(reader)
    try:
        yield
    finally:
        os.dup2(kept, STDIN)
        os.close(kept)
