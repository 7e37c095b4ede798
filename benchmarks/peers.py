"""One layer's verify attention beside stock kernels: same inputs, one process, cold caches.

Each cell gives all implementations the same queries, rows and pages, bfloat16, of one rank's Kimi
K2.6 (latent rows of 576 elements). Ours and the peers that take a tree get a random tree a
sequence; peers that know chains only get a causal chain of the same size, which moves the same
bytes. What is timed is the replay of a captured call, from its first kernel's start to its last
one's end; plans and scheduling metadata are made before. Nobody is timed before its result agreed
with the op's definition.

There are cases in the full profile on a machine with CUDA's driver, or where `DDTREE_BENCH_PEERS`
names a folder of peers. asv chooses which of them it hands on; all are measured, by one process for
the module. `DDTREE_BENCH_PEERS_TABLE` names a file that gets them as a table.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from benchmarks._interleaved import Absent, Stored, _InterleavedSuite
from benchmarks._peer_cells import PeerCell, has_cuda_driver, implementations
from benchmarks._peer_table import Row, table
from benchmarks._regimes import PROFILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks._interleaved import Contestant
    from benchmarks._peer_trial import Job, Verdict

TABLE_VARIABLE: Final = "DDTREE_BENCH_PEERS_TABLE"
PAGE_SIZES: Final = [1, 64]
K64: Final = 65536
K185: Final = 189440
NAMES: Final = implementations(PROFILE.name, has_driver=has_cuda_driver())

Found = dict[tuple[Any, ...], Stored]


class _Peers(_InterleavedSuite):
    """What the suites here share; no two of them have a case in common."""

    version: ClassVar[str] = "1"
    param_names: ClassVar[list[str]] = [
        *("num_heads", "tree_tokens", "context_tokens", "num_seqs", "page_size", "page_order"),
        "implementation",
    ]
    uneven: ClassVar[bool] = False
    verdicts: Mapping[Job, Verdict]  # of the rehearsal

    def cells(self) -> list[PeerCell]:
        """Return what is measured, each cell with all implementations."""
        return [self.cell(*group) for group in itertools.product(*self.axes()[:-1])]

    def cell(self, *group: Any) -> PeerCell:
        """Return the cell of a group."""
        named = dict(zip(self.param_names[:-1], group, strict=True))
        return PeerCell(**named, uneven=self.uneven)

    def contestants(self, group: Any) -> Sequence[Contestant | Absent]:
        """Build those of a cell that came through the rehearsal."""
        from benchmarks._peer_trial import entries  # noqa: PLC0415 - imports torch

        return entries(self.cell(*group), self.axes()[-1], self.verdicts)

    def setup_cache(self) -> Found:
        """Measure all suites of this module; asv knows a cache by the line of this method."""
        return measured_together([suite() for suite in SUITES])


def measured_together(suites: Sequence[_Peers]) -> Found:
    """Rehearse and measure the cases of several suites in this process; write the table."""
    from benchmarks._device import DEVICE  # noqa: PLC0415 - imports torch

    if DEVICE == "cpu":
        absent = Absent("peers", "peers are compared on a GPU, and there is none")
        cases = (case for suite in suites for case in itertools.product(*suite.axes()))
        return {case: Stored(absent=absent) for case in cases}
    return rehearsed_and_measured(suites)


def rehearsed_and_measured(suites: Sequence[_Peers]) -> Found:
    """Rehearse the cases of several suites in child processes, then measure them in this one."""
    from benchmarks._peer_trial import Job, rehearse  # noqa: PLC0415 - imports torch

    jobs = [
        Job(cell, name) for suite in suites for cell in suite.cells() for name in suite.axes()[-1]
    ]
    verdicts = rehearse(jobs)
    found: Found = {}
    rows: list[Row] = []
    for suite in suites:
        suite.verdicts = verdicts
        measured = suite.measured()
        found |= measured
        rows += [_row(suite, case, stored, verdicts) for case, stored in measured.items()]
    path = os.environ.get(TABLE_VARIABLE)
    if path:
        Path(path).write_text(table(rows), encoding="utf-8")
    return found


def _row(
    suite: _Peers, case: tuple[Any, ...], stored: Stored, verdicts: Mapping[Job, Verdict]
) -> Row:
    """Return a case as a row of the table."""
    from benchmarks._peer_trial import Job  # noqa: PLC0415 - imports torch

    cell, name = suite.cell(*case[:-1]), str(case[-1])
    if stored.absent is not None:
        return Row(cell, name, reason=stored.absent.reason)
    line, error_rel = stored.line or {}, verdicts[Job(cell, name)].error_rel
    return Row(cell, name, line["samples_s"], line["bytes"], line["flops"], error_rel)


def all_cells() -> list[PeerCell]:
    """Return the cells of all suites, whoever is measured in them."""
    return [cell for suite in SUITES for cell in suite().cells()]


_together: Callable[..., Any] = _Peers.setup_cache


class Contexts(_Peers):
    """9 tokens of 8 heads over contexts of 1k to 185k."""

    version = "1"
    setup_cache = _together
    contexts: ClassVar = [1024, 4096, 16384, 32768, K64, 131072, K185]
    params: ClassVar = ([8], [9], contexts, [1], PAGE_SIZES, ["shuffled"], NAMES)


class Tokens(_Peers):
    """From one tree token to 65, 8 heads at 64k."""

    version = "1"
    setup_cache = _together
    params: ClassVar = ([8], [1, 17, 33, 65], [K64], [1], PAGE_SIZES, ["shuffled"], NAMES)


class Heads(_Peers):
    """64 heads at 64k: eight ranks' worth on one."""

    version = "1"
    setup_cache = _together
    params: ClassVar = ([64], [1, 9, 17], [K64], [1], PAGE_SIZES, ["shuffled"], NAMES)


class AllHeads(_Peers):
    """128 heads at 64k, a token each."""

    version = "1"
    setup_cache = _together
    params: ClassVar = ([128], [1], [K64], [1], PAGE_SIZES, ["shuffled"], NAMES)


class LongTree(_Peers):
    """33 tokens of 8 heads at 185k."""

    version = "1"
    setup_cache = _together
    params: ClassVar = ([8], [33], [K185], [1], PAGE_SIZES, ["shuffled"], NAMES)


class Batches(_Peers):
    """2 to 32 sequences of 4k, 9 tokens of 8 heads each."""

    version = "1"
    setup_cache = _together
    params: ClassVar = ([8], [9], [4096], [2, 8, 32], PAGE_SIZES, ["shuffled"], NAMES)


class UnevenBatch(_Peers):
    """32 sequences of 2k to 30k, 16k on average."""

    version = "1"
    setup_cache = _together
    uneven = True
    params: ClassVar = ([8], [9], [16384], [32], PAGE_SIZES, ["shuffled"], NAMES)


class InOrder(_Peers):
    """9 tokens of 8 heads at 64k again, the pages of the sequence in order."""

    version = "1"
    setup_cache = _together
    params: ClassVar = ([8], [9], [K64], [1], PAGE_SIZES, ["in_order"], NAMES)


SUITES: Final = (Contexts, Tokens, Heads, AllHeads, LongTree, Batches, UnevenBatch, InOrder)
