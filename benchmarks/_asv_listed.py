"""An asv plugin (see `plugins` in asv.conf.json): one discovery serves several calls of asv.

asv finds the benchmarks anew whenever it is called, in a process that imports all of them and
torch. Who calls it for one benchmark after the other on unchanged code says so in
`DDTREE_BENCH_LISTED`: then the list that the first call left in the results folder is used.
"""

import os
from typing import Any, Final

LISTED_VARIABLE: Final = "DDTREE_BENCH_LISTED"


def setup() -> None:
    """Have asv read its own list if it is of this code; asv calls it."""
    if os.environ.get(LISTED_VARIABLE) != "1":
        return
    # Benchmark processes import this module too, and in a managed environment there is no asv.
    from asv.benchmarks import Benchmarks  # noqa: PLC0415

    def listed(cls: Any, /, conf: Any, *_: Any, regex: Any = None, **__: Any) -> Any:
        return cls.load(conf, regex=regex)

    Benchmarks.discover = classmethod(listed)
