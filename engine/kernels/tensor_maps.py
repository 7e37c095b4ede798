"""How copies of whole boxes find what they copy: CUtensorMap of words [E, outputs, width].

Of int4 weights [E, outputs, inputs / 8], of the pages of a cache [P, L, D / 2]. Knows the driver's
layout of a map and no kernel.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.errors import BackendError

if TYPE_CHECKING:
    from torch import Tensor

MAP_BYTES = 128
WORD_BYTES = 4
LINE_WORDS = 32  # of a box's row: 128 bytes, whose pieces of 16 are exchanged
MOST_MAPS = 4096  # that are kept: four a layer


def tensor_map(words: Tensor, rows: int) -> bytes:
    """Return the map of boxes of `rows` outputs and 32 words, one expert's or one page's.

    An expert that stands for all (steps of 0) is the only one of its map.
    """
    num_experts, outputs, width = words.shape
    expert_step, row_step = (words.stride(dim) * words.itemsize for dim in (0, 1))
    if num_experts == 1 or expert_step == 0:
        num_experts, expert_step = 1, outputs * row_step
    return box_map(words.data_ptr(), (width, outputs, num_experts), (row_step, expert_step), rows)


def expert_step(words: Tensor) -> int:
    """Return what an expert's number counts in the map: 0 where one stands for all."""
    return int(words.shape[0] > 1 and words.stride(0) > 0)


@lru_cache(maxsize=MOST_MAPS)
def box_map(address: int, sizes: tuple[int, ...], steps: tuple[int, ...], rows: int) -> bytes:
    """Return the map of boxes of 32 words in `rows` rows: words, rows, and what rows lie in.

    Sizes begin with the words of a row; steps are in bytes, the one between words left out.
    """
    from cuda.bindings import driver  # noqa: PLC0415 - only where a GPU is

    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    status, found = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_INT32,
        len(sizes),
        address,
        [u64(size) for size in sizes],
        [u64(step) for step in steps],
        [u32(size) for size in (LINE_WORDS, rows, 1)],
        [u32(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise BackendError(
            f"backend cuda: expected words that boxes can be copied of, got sizes {sizes} "
            f"with steps of {steps} bytes ({status.name})"
        )
    return ctypes.string_at(found.getPtr(), MAP_BYTES)
