"""What asv's processes import before they know their case; started ahead by `_asv_ahead`.

A script. It says when it is ready, waits for a line on standard input, and then is asv's own
script for a benchmark. If asv ends first, the input closes and the process ends too. Nothing of
this repository is imported before the line: whose engine runs is decided as in any other process.

A process that is done leaves when all exit functions have run: to take torch down in good order
takes the interpreter a third of a second.
"""

import atexit
import importlib
import json
import os
import runpy
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

LIBRARIES: Final = ("asv_runner.run", "torch")  # asv's script imports the first, suites the other
READY: Final = b"ready for a case\n"


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
    """Import, wait, and become what the line says."""
    departure = Departure()
    atexit.register(departure.leave)
    _search_as_asv_does()
    for name in LIBRARIES:
        with suppress(ImportError):  # the benchmark that needs it says so better
            importlib.import_module(name)
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), READY)
    line = sys.stdin.readline()
    if line:
        folder, arguments = json.loads(line)
        os.chdir(folder)
        sys.argv = arguments
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    departure.is_done = True


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
