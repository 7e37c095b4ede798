"""The process that reads NVML while a case runs, and the handle by which the case holds it.

A process of its own neither takes the interpreter from a body that is bound by its launches nor
waits for it. It starts before the window and reads until it is told to stop::

    case      start ─ settle ─ open ─── window ─── close ─ stop
    sampler        └ import ┴ read · read · read · read · ┘

It writes a JSON line for each reading into a file without a name, so that nothing fills up and
nothing is lost when it hangs in a driver and must be killed. It ends when its input does, which is
also what it sees of a case that was killed. It imports no torch and has no context on the GPU.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from benchmarks._nvml import PROBES, Nvml, NvmlMissingError, Probe, compute_pids, open_nvml
from benchmarks._readings import PERIOD_S, PROCESSES, Reading

ROOT: Final = Path(__file__).resolve().parent.parent
PROCESS_PERIOD: Final = 5  # readings from one look at the processes to the next
STOP_S: Final = 1.0  # after which a sampler that does not end is killed


class Sampler:
    """A sampler that runs; made by `sampling`."""

    def __init__(self, process: subprocess.Popen[bytes], lines: IO[bytes]) -> None:
        self._process = process
        self._lines = lines

    @property
    def is_starting(self) -> bool:
        """Whether it may still come to its first reading."""
        return self._num_bytes == 0 and self._process.poll() is None

    def stop(self) -> list[Reading]:
        """End the process and return all it read; whatever it hangs in, this returns."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver may hold it even then
                self._process.wait(STOP_S)
        text = os.pread(self._lines.fileno(), self._num_bytes, 0)
        whole = text[: text.rfind(b"\n") + 1]
        return [reading_of(json.loads(line)) for line in whole.splitlines()]

    @property
    def _num_bytes(self) -> int:
        return os.fstat(self._lines.fileno()).st_size


@contextmanager
def sampling(gpu_uuid: str) -> Iterator[Sampler]:
    """Start a sampler of the device with this UUID; it ends with the block at the latest."""
    with tempfile.TemporaryFile() as lines:
        process = subprocess.Popen(  # noqa: S603 - this interpreter and this module
            [sys.executable, "-m", "benchmarks._sampler", gpu_uuid],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=lines,
        )
        sampler = Sampler(process, lines)
        try:
            yield sampler
        finally:
            sampler.stop()


def reading_of(line: Mapping[str, Any]) -> Reading:
    """Return the reading that a line of a sampler stands for."""
    pids = line["pids"]
    return Reading(
        at_s=line["at_s"],
        values=line["values"],
        refused=tuple(line["refused"]),
        pids=None if pids is None else tuple(pids),
    )


class _Reader:
    """Reads all probes at once; what NVML refused once is not asked again."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._probes = list(PROBES)
        self._refused: list[str] = []
        self._count = 0

    def line(self) -> dict[str, Any]:
        """Return the next reading."""
        values: dict[str, float] = {}
        for probe in list(self._probes):
            self._read(probe, values)
        pids = self._pids() if self._count % PROCESS_PERIOD == 0 else None
        self._count += 1
        now_s = time.monotonic()
        return {"at_s": now_s, "values": values, "refused": self._refused, "pids": pids}

    def _read(self, probe: Probe, values: dict[str, float]) -> None:
        found = probe.read(self._nvml)
        if found is None:
            self._probes.remove(probe)
            self._refused += probe.names
        else:
            values.update(zip(probe.names, found, strict=True))

    def _pids(self) -> list[int] | None:
        if PROCESSES in self._refused:
            return None
        pids = compute_pids(self._nvml)
        if pids is None:
            self._refused.append(PROCESSES)
        return pids


def _sample(gpu_uuid: str) -> None:
    """Write a line each period until the input ends."""
    with open_nvml(gpu_uuid) as nvml:
        reader = _Reader(nvml)
        while True:
            os.write(sys.stdout.fileno(), json.dumps(reader.line()).encode() + b"\n")
            if select.select([sys.stdin], [], [], PERIOD_S)[0]:
                return


if __name__ == "__main__":
    with suppress(NvmlMissingError):  # the case knows by itself, or sees that nothing was read
        _sample(sys.argv[1])
