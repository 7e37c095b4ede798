"""One side of a comparison: a process with a commit's engine, which is told what to do.

The process is `benchmarks/_side.py`; questions and answers are JSON objects, a line each.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, Self

from dashboard.asv_errors import AsvFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SCRIPT: Final = "_side.py"
PATIENCE_S: Final = 300.0  # for an answer, where nobody says otherwise
LAST_WORDS: Final = 2000  # bytes of its complaints


@dataclass(slots=True)
class Side:
    """A process, what it said that nobody has read, and the file of its complaints."""

    process: subprocess.Popen[bytes]
    questions: IO[bytes]
    answers: IO[bytes]
    complaints: Path
    _said: bytes = b""

    @classmethod
    def start(
        cls, benchmarks: Path, environ: Mapping[str, str], locks: Sequence[int], complaints: Path
    ) -> Self:
        """Start one and go on while it imports; its first answer says that it has.

        Parameters
        ----------
        benchmarks : folder of the suites
        environ : its `PYTHONPATH` begins with the commit's code
        locks : open files that it holds as long as it runs, even where we are killed
        complaints : file for what suites print, and for the traceback that ends it
        """
        with complaints.open("wb") as file:
            process = subprocess.Popen(  # noqa: S603 - no shell
                [sys.executable, "-P", str(benchmarks / SCRIPT)],
                bufsize=0,
                env=dict(environ),
                stdin=subprocess.PIPE,  # closes with us, and it ends
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                pass_fds=tuple(locks),
            )
        if process.stdin is None or process.stdout is None:
            raise AsvFailedError("benchmark process: expected pipes to it, got none")
        return cls(process, process.stdin, process.stdout, complaints)

    def tell(self, do: str, **what: object) -> None:
        """Ask; `hear` has the answer."""
        with suppress(BrokenPipeError):  # its end is heard of with its last words
            self.questions.write(json.dumps({"do": do, **what}).encode() + b"\n")

    def hear(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for the answer to what was asked.

        Raises
        ------
        AsvFailedError
            The process ended, or takes too long.
        """
        end_s = time.monotonic() + timeout_s
        while b"\n" not in self._said:
            left_s = max(0.0, end_s - time.monotonic())
            if not select.select([self.answers], [], [], left_s)[0]:
                raise self._failure(f"expected an answer within {timeout_s:.0f} s, got none")
            part = os.read(self.answers.fileno(), 1 << 16)
            if not part:
                raise self._failure("expected an answer, got its end")
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, do: str, timeout_s: float = PATIENCE_S, **what: object) -> dict[str, Any]:
        """Ask and wait."""
        self.tell(do, **what)
        return self.hear(timeout_s)

    def end(self) -> None:
        """End it, with all that it started."""
        self.questions.close()
        self.answers.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _failure(self, text: str) -> AsvFailedError:
        """Say what went wrong, with the last line of its complaints."""
        self.end()
        with self.complaints.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return AsvFailedError(f"benchmark process: {text} ({lines[-1] if lines else 'no reason'})")
