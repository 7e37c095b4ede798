"""An asv plugin (see `plugins` in asv.conf.json): the checkout has its own machine file.

asv keeps machines in the home directory and asks about a new one, so it stops on a fresh home
without a terminal, and a changing host name starts new series. Here the file is
`.asv/machine.json`, filled in without asking. The label is `DDTREE_BENCH_MACHINE`; without it, the
one machine the file knows, whatever the host is called by now; else the host name. Benchmark
processes find the label in that variable, because asv does not tell them.
"""

import os
import platform
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

MACHINE_FILE: Final = Path(".asv") / "machine.json"
LABEL_VARIABLE: Final = "DDTREE_BENCH_MACHINE"


def setup() -> None:
    """Point asv at the machine file and make sure that it knows this machine; asv calls it."""
    # Benchmark processes import this module too, and in a managed environment there is no asv.
    from asv.machine import Machine, MachineCollection  # noqa: PLC0415
    from asv.util import load_json  # noqa: PLC0415

    path = MACHINE_FILE.resolve()
    MachineCollection.get_machine_file_path = staticmethod(lambda: str(path))
    content = load_json(str(path), MachineCollection.api_version) if path.is_file() else {}
    known = sorted(content.keys() - {"version"})
    label = os.environ.get(LABEL_VARIABLE) or (known[0] if len(known) == 1 else platform.node())
    Machine.hardcoded_machine_name = label
    if label not in known:
        MachineCollection.save(label, {**Machine.get_defaults(), "machine": label})
    Machine.load = _telling(Machine.load)


def _telling(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return asv's `Machine.load`, made to tell benchmark processes which machine it chose."""

    @wraps(load)
    def load_and_tell(*args: Any, **kwargs: Any) -> Any:
        machine = load(*args, **kwargs)
        os.environ[LABEL_VARIABLE] = machine.machine
        return machine

    return load_and_tell
