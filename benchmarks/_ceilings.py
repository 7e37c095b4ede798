"""The machine's best rates, measured in the process that measures the case.

Read bandwidth is a streaming reduction over more memory than any cache holds: a kernel that only
reads beats a copy, so a copy's rate is no ceiling. The matmul rate is a burst of a few products,
because sustained ones fall under the power cap and would make the floor too kind. Best of several
runs: a ceiling is what the machine can do, not what it usually does. Factors are random: a GPU
multiplies constants at a lower power and so at a higher rate than any real case.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from benchmarks._device import DEVICE

RUNS: Final = 4
CPU_READ_BYTES: Final = 128 << 20
CPU_MATMUL_SIZE: Final = 768
CUDA_READ_BYTES: Final = 4 << 30
CUDA_READ_SHARE: Final = 8  # at most one part in this many of the free memory
CUDA_MATMUL_SIZE: Final = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best rates against which the floor of a case is computed."""

    read_bytes_per_s: float | None
    matmul_flops_per_s: float | None
    source: str  # "measured" or "datasheet"
    dtype: str | None  # of the matmul


@cache
def measure_ceilings() -> Ceilings:
    """Measure both rates on the device of this run, on the threads it runs with; once a process."""
    if DEVICE == "cpu":
        return _measure_cpu()
    ceilings = _measure_cuda()
    torch.cuda.empty_cache()
    return ceilings


def _measure_cpu() -> Ceilings:
    data = torch.ones(CPU_READ_BYTES // 4)
    a = torch.randn(CPU_MATMUL_SIZE, CPU_MATMUL_SIZE)
    read_s = _best_wall_s(data.sum)
    matmul_s = _best_wall_s(lambda: a @ a)
    return Ceilings(
        CPU_READ_BYTES / read_s, 2 * CPU_MATMUL_SIZE**3 / matmul_s, "measured", "float32"
    )


def _best_wall_s(body: Callable[[], object]) -> float:
    times_s = []
    for _ in range(RUNS):
        started_s = time.perf_counter()
        body()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)


def _measure_cuda() -> Ceilings:
    from benchmarks._streaming_read import SPAN, streaming_read  # noqa: PLC0415 - needs Triton

    free_bytes, _ = torch.cuda.mem_get_info()
    programs = min(CUDA_READ_BYTES, free_bytes // CUDA_READ_SHARE) // 4 // SPAN
    data = torch.randn(programs * SPAN, device="cuda")
    a = torch.randn(CUDA_MATMUL_SIZE, CUDA_MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    read_s = _best_cuda_s(lambda: streaming_read(data))
    matmul_s = _best_cuda_s(lambda: torch.mm(a, a, out=product))
    return Ceilings(
        data.nbytes / read_s, 2 * CUDA_MATMUL_SIZE**3 / matmul_s, "measured", "bfloat16"
    )


def _best_cuda_s(body: Callable[[], object]) -> float:
    """Return the best time between two events; in milliseconds of work launch gaps are nothing."""
    body()
    times_ms: list[float] = []
    for _ in range(RUNS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        body()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return min(times_ms) / 1e3
