"""A kernel that reads memory once and keeps next to nothing: the read ceiling of a GPU."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types; an annotation other than constexpr does not compile.

from typing import Final

import torch
import triton
import triton.language as tl

TILE: Final = 4096
TILES: Final = 16  # walked by one program, so that its loads stay in flight
SPAN: Final = TILE * TILES


def streaming_read(data: torch.Tensor) -> torch.Tensor:
    """Return partial sums of `data`, reading it once.

    Parameters
    ----------
    data : [n] float32, contiguous, n a multiple of SPAN
    """
    sums = torch.empty(data.numel() // SPAN, device=data.device)
    _read_kernel[(sums.numel(),)](data, sums, tile=TILE, tiles=TILES, num_warps=8)
    return sums


@triton.jit
def _read_kernel(data, sums, tile: tl.constexpr, tiles: tl.constexpr):  # noqa: ANN001, ANN202
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([tile], tl.float32)
    for i in range(tiles):
        total += tl.load(data + (program * tiles + i) * tile + tl.arange(0, tile))
    tl.store(sums + program, tl.sum(total, 0))
