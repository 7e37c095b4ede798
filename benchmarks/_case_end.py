"""What is left to do when a case is done: at the exit of its process, or before its next case.

Most processes measure one case, and asv lets them exit. One that serves several cases in turn
(`_asv_waiting`) ends each of them here, and gives back what it held on the GPU.
Importing this module imports no torch.
"""

import atexit
import gc
import os
import sys
from collections.abc import Callable
from typing import Final

SERVES_VARIABLE: Final = "DDTREE_BENCH_SERVES"  # "1" in a process that serves several cases

_left: list[Callable[[], object]] = []


def at_case_end(call: Callable[[], object]) -> None:
    """Have `call` called once when the case is done."""
    if os.environ.get(SERVES_VARIABLE) == "1":
        _left.append(call)
    else:
        atexit.register(call)


def end_case() -> None:
    """Do what is left of the case that this process just served; the next one finds it gone."""
    while _left:
        _left.pop(0)()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
