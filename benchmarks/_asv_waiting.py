"""What asv's processes import before they know their case; started ahead by `_asv_ahead`.

A script. It says when it is ready, waits for a line on standard input, and then is asv's own
script for a benchmark. If asv ends first, the input closes and the process ends too. Nothing of
this repository is imported before the line: whose engine runs is decided as in any other process.

A process that is done leaves when all exit functions have run: to take torch down in good order
takes the interpreter a third of a second. One that serves (`DDTREE_BENCH_SERVES`) says that it is
ready again after each case, and ends with the first that fails.
"""

import atexit
import importlib
import json
import os
import runpy
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LIBRARIES: Final = ("asv_runner.run", "torch")  # asv's script imports the first, suites the other
READY: Final = b"ready for a case\n"
SERVES_VARIABLE: Final = "DDTREE_BENCH_SERVES"  # as `_case_end` has it, which is not imported yet
CASE_END: Final = "benchmarks._case_end"


@dataclass(slots=True)
class Departure:
    """The last exit function, as it is the first to be registered."""

    is_done: bool = False

    def leave(self) -> None:
        """End the process, unless it has an error to tell of."""
        if self.is_done:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def main() -> None:
    """Import, wait, and become what the line says; again and again where this process serves."""
    departure = Departure()
    atexit.register(departure.leave)
    _search_as_asv_does()
    for name in LIBRARIES:
        with suppress(ImportError):  # the benchmark that needs it says so better
            importlib.import_module(name)
    _say_ready()
    while line := sys.stdin.readline():
        _measure(*json.loads(line))
        if os.environ.get(SERVES_VARIABLE) != "1":
            break
        _end_case()
        _say_ready()
    departure.is_done = True


def _say_ready() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(sys.stdout.fileno(), READY)


def _measure(folder: str, arguments: list[str]) -> None:
    """Be asv's script for a benchmark."""
    os.chdir(folder)
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _end_case() -> None:
    """Have our suites end the case, if it was one, and leave its folder, which asv removes."""
    module = sys.modules.get(CASE_END)
    if module is not None:
        module.end_case()
    os.chdir(Path(__file__).parent)


def _search_as_asv_does() -> None:
    """Find libraries where asv's script will: it drops PYTHONPATH where nobody gave it another."""
    told = os.environ.get("ASV_PYTHONPATH")
    if told is not None:
        sys.path[:0] = [one for one in told.split(os.pathsep) if one not in sys.path]
    elif "PYTHONPATH" in os.environ:
        dropped = os.environ["PYTHONPATH"].split(os.pathsep)
        sys.path[:] = [one for one in sys.path if one not in dropped]


if __name__ == "__main__":
    main()
