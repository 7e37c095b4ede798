"""One call of asv: its command line, what its processes are told, and what came of it."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dashboard.asv_errors import AsvFailedError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WARDEN: Final = Path(__file__).with_name("asv_warden.py")
OK, SOME_FAILED = 0, 2  # asv's exit statuses after which results were written
NOTHING_SELECTED: Final = "No benchmarks selected"  # asv's last words where no name matches
JUST_DISCOVER: Final = "just-discover"  # asv's word for "list the benchmarks and run none"
LISTED_VARIABLE: Final = "DDTREE_BENCH_LISTED"  # the plugin's word for "the list is this code's"
LAST_LINES: Final = 5  # of asv's output that an error message may quote


@dataclass(frozen=True, slots=True)
class Asv:
    """asv on one commit of a checkout."""

    root: Path
    commit: str
    environ: Mapping[str, str]
    locks: Sequence[int]  # open files that asv's supervisor holds as long as anything runs
    echo: Callable[[str], None]

    def discover(self) -> Asv:
        """Have asv list the commit's benchmarks in its results folder; return one that reads it."""
        self.run([JUST_DISCOVER])
        return replace(self, environ={**self.environ, LISTED_VARIABLE: "1"})

    def run(self, patterns: Sequence[str]) -> int:
        """Measure what the patterns select and return asv's exit status, `OK` or `SOME_FAILED`.

        Raises
        ------
        RequestError
            The patterns select nothing.
        AsvFailedError
            asv gave up before it wrote results.
        """
        status, last = self._call(_arguments(self.commit, patterns))
        if status in {OK, SOME_FAILED}:
            return status
        if last and last[-1] == NOTHING_SELECTED:
            raise RequestError(
                "bench: expected a regular expression that matches, got none that does"
            )
        raise AsvFailedError(
            f"asv run: expected exit status {OK} or {SOME_FAILED}, got {status} "
            f"(asv: {last[-1] if last else 'no output'})"
        )

    def _call(self, arguments: Sequence[str]) -> tuple[int, Sequence[str]]:
        """Call asv, echo each line as it prints it; return its exit status and its last lines."""
        last = deque[str](maxlen=LAST_LINES)
        with subprocess.Popen(  # noqa: S603 - no shell; user text is one argument each
            [sys.executable, "-P", str(WARDEN), *arguments],
            cwd=self.root,
            env=dict(self.environ),
            stdin=subprocess.PIPE,  # closes with us, and asv ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            pass_fds=tuple(self.locks),
        ) as process:
            for line in process.stdout or ():
                text = line.rstrip("\n")
                if text.strip():
                    last.append(text.strip(" ·"))
                self.echo(text)
            status = process.wait()
        return status, list(last)


def _arguments(commit: str, patterns: Sequence[str]) -> list[str]:
    """Return asv's arguments; the machine file and its label are the asv plugin's business."""
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
        *(word for pattern in patterns for word in ("--bench", pattern)),
    ]
