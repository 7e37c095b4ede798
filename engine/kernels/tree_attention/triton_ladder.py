"""Three ways of making tree attention fast, each of which can be switched on by itself.

What lies between the serial exhibit and a fast kernel, as switches of one kernel over the same
building blocks:

- `read_once`: a tile of rows is read once, its leading dims are values and, transposed, keys, and
  the next tile loads meanwhile; off, a tile is gathered as keys, then again as values.
- `split`: the rows of a sequence are divided over programs, a second kernel merges the partial
  results; off, one program walks all of them.
- `packed`: tokens x heads share the rows of a tile, and so one read of the cache; off, each head
  has programs of its own.

Whoever measures what each is worth sees nothing else change, but that a tile read once may be
larger than one gathered. All off is the exhibit. Not a choice for production.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from engine.errors import BackendError
from engine.kernels.machine import arch_of, num_sms
from engine.kernels.operands import room
from engine.kernels.tree_attention import tiles
from engine.kernels.tree_attention.problem import refuse_fp8, refuse_splits
from engine.kernels.tree_attention.triton_split import merge_kernel
from engine.kernels.triton_device import on_device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from engine.kernels.tree_attention.problem import Problem

# Rows and keys of a tile, stages of the loop over the tree, warps, stages of the one over the
# prefix. The shape follows from `read_once` and the machine alone, so that `split` and `packed`
# change nothing else: gathered tiles are the exhibit's, whose values leave no room for a second
# stage; of those read once, the wide one was the fastest of ten on an H200.
_GATHERED = (16, 32, 1, 8, 1)
_WIDE = (16, 64, 2, 4, 2)
_NARROW = (16, 32, 2, 8, 2)  # 99 KB of shared memory
_SIZE_NAMES = ("BLOCK_ROWS", "BLOCK_KEYS", "TREE_STAGES", "num_warps", "num_stages")
WIDE_ARCHS = (90, 100)  # sm_90, sm_100
PROGRAMS_PER_SM = 2
MIN_SPLIT_ROWS = 64  # below this a split costs more in merging than it saves
MERGE_WARPS = 4
BLOCK_SPLITS = 16  # partial rows a merging program has in flight
_TWO_BYTES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Switches:
    """Which of the three are on."""

    read_once: bool
    split: bool
    packed: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, its grid, its arguments in order and by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    meta: Mapping[str, Any]


@triton.jit
def ladder_kernel(
    q_ptr,  # [N, T, H, D]
    kv_ptr,  # [P, L, D]
    table_ptr,  # [N, max_pages] int32
    context_ptr,  # [N]
    bits_ptr,  # [N, T, W] int32
    tree_sizes_ptr,  # [N]
    tree_ptr,  # [N, T, D] where HYBRID
    out_ptr,  # [num_splits, N, T, H, VALUE_DIM], of one split: the result
    lse_ptr,  # [num_splits, N, T, H] float32
    T, H, num_splits, scale,
    stride_q_sequence, stride_q_token, stride_q_head,
    stride_page, stride_row,
    stride_table, stride_bits_sequence, stride_bits_token,
    stride_tree_sequence, stride_tree_row,
    stride_out_split, stride_out_sequence, stride_out_token, stride_out_head,
    stride_lse_split, stride_lse_sequence, stride_lse_token, stride_lse_head,
    PACKED: tl.constexpr, PAGE_SIZE: tl.constexpr, HYBRID: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr, SCORE_DIMS: tl.constexpr, READ_ONCE: tl.constexpr,
    TREE_STAGES: tl.constexpr,
):  # fmt: skip
    """Write out and lse of one block of rows of one sequence, over one split of its rows."""
    sequence = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    lanes = tl.arange(0, BLOCK_ROWS)
    if PACKED:
        first_row = tl.program_id(1) * BLOCK_ROWS  # row = token * H + head
        first_token = first_row // H
        tokens, heads = (first_row + lanes) // H, (first_row + lanes) % H
    else:
        first_token = tl.program_id(1) // H * BLOCK_ROWS
        tokens, heads = first_token + lanes, lanes * 0 + tl.program_id(1) % H
    context_len = tl.load(context_ptr + sequence).to(tl.int32)
    tree_size = tl.load(tree_sizes_ptr + sequence).to(tl.int32)
    num_tiles = tiles.count(context_len, tree_size, first_token, BLOCK_KEYS)
    tiles_per_split = tl.cdiv(num_tiles, num_splits)
    first_tile = tl.program_id(2) * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)

    rows = tokens.to(tl.int64)
    q_rows = q_ptr + sequence * stride_q_sequence
    q_rows += rows[:, None] * stride_q_token + heads[:, None].to(tl.int64) * stride_q_head
    out, lse = tiles.walk(
        q_rows, tokens,
        kv_ptr, table_ptr + sequence * stride_table, tree_ptr + sequence * stride_tree_sequence,
        bits_ptr + sequence * stride_bits_sequence,
        context_len, tree_size, first_tile, last_tile, scale,
        stride_page, stride_row, stride_tree_row, stride_bits_token,
        PAGE_SIZE, HYBRID, BLOCK_ROWS, BLOCK_KEYS, VALUE_DIM, ROPE_DIM,
        SCORE_DIMS, READ_ONCE, TREE_STAGES,
    )  # fmt: skip

    # A split that saw nothing stores 0 and lse -inf, which the merge weighs with 0.
    stored = tokens < T
    out_rows = out_ptr + split * stride_out_split + sequence * stride_out_sequence
    out_rows += rows[:, None] * stride_out_token + heads[:, None].to(tl.int64) * stride_out_head
    out_rows += tl.arange(0, VALUE_DIM)[None, :]
    tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=stored[:, None])
    lse_rows = lse_ptr + split * stride_lse_split + sequence * stride_lse_sequence
    lse_rows += rows * stride_lse_token + heads.to(tl.int64) * stride_lse_head
    tl.store(lse_rows, lse, mask=stored)


def run(problem: Problem, switches: Switches) -> None:
    """Write `out` and `lse` in one launch, or in two if the rows are split."""
    tiles.check(problem, "ladder")
    refuse_fp8(problem, "ladder")
    if problem.q.device.type == "cuda" and problem.q.dtype not in _TWO_BYTES:
        raise BackendError(
            f"ladder: expected bfloat16 or float16 rows on CUDA, got {problem.q.dtype} "
            "(tiles read once must fit in registers)"
        )
    if not switches.split:
        refuse_splits(problem, "a ladder without split")
    with on_device(problem.q.device):
        for launch in launches(problem, switches, arch_of(problem.q.device)):
            launch.kernel[launch.grid](*launch.arguments, **launch.meta)


def launches(problem: Problem, switches: Switches, arch: int) -> tuple[Launch, ...]:
    """Return what is launched for a problem on an architecture, 90 for sm_90, in order."""
    if not switches.split:
        strides = (0, *problem.out.stride()[:3], 0, *problem.lse.stride())
        return (_walk(problem, switches, arch, 1, (problem.out, problem.lse), strides),)
    N, T, H, _ = problem.q.shape
    num_splits = choose_num_splits(problem, switches, arch)
    partial_out, partial_lse = _partial_results(problem, num_splits)
    strides = (*partial_out.stride()[:4], *partial_lse.stride())
    # Rows are few, so on a device each has its own program; the interpreter pays by the program.
    block_rows = 1 if arch else 16
    merge = Launch(
        merge_kernel,
        (-(-N * T * H // block_rows), 1),
        (
            partial_out, partial_lse, problem.out, problem.lse, T, H, N * T * H, num_splits,
            *problem.out.stride()[:3], *problem.lse.stride(),
        ),
        {
            "VALUE_DIM": problem.value_dim, "BLOCK_DIMS": problem.value_dim,
            "BLOCK_ROWS": block_rows, "BLOCK_SPLITS": BLOCK_SPLITS, "num_warps": MERGE_WARPS,
        },
    )  # fmt: skip
    results = (partial_out, partial_lse)
    return (_walk(problem, switches, arch, num_splits, results, strides), merge)


def choose_num_splits(problem: Problem, switches: Switches, arch: int) -> int:
    """Splits that fill the device, but leave no split under MIN_SPLIT_ROWS rows.

    A function of N, H, T, the capacity of the page table and the number of SMs.
    """
    if not switches.split:
        return 1
    if problem.num_splits is not None:
        return problem.num_splits
    programs = len(problem.q) * num_blocks(problem, switches, arch)
    filling = PROGRAMS_PER_SM * num_sms(problem.q.device) // programs
    return max(1, min(filling, problem.capacity // MIN_SPLIT_ROWS))


def programs(problem: Problem, switches: Switches) -> int:
    """Programs of the launch that reads the rows."""
    arch = arch_of(problem.q.device)
    blocks = num_blocks(problem, switches, arch)
    return len(problem.q) * blocks * choose_num_splits(problem, switches, arch)


def num_blocks(problem: Problem, switches: Switches, arch: int) -> int:
    """Blocks of rows a sequence has: of tokens x heads, or of tokens for each head."""
    _, T, H, _ = problem.q.shape
    block_rows = tile_sizes(problem, switches, arch)["BLOCK_ROWS"]
    return -(-T * H // block_rows) if switches.packed else H * -(-T // block_rows)


def tile_sizes(problem: Problem, switches: Switches, arch: int) -> dict[str, int]:
    """Sizes of the tiles, warps and stages on an architecture (90 is sm_90)."""
    read_once = _WIDE if arch in WIDE_ARCHS else _NARROW
    sizes = read_once if switches.read_once else _GATHERED
    return {
        **dict(zip(_SIZE_NAMES, sizes, strict=True)),
        "VALUE_DIM": problem.value_dim,
        "ROPE_DIM": problem.rope_dim,
        "SCORE_DIMS": problem.value_dim,
        "READ_ONCE": switches.read_once,
    }


def _walk(
    problem: Problem,
    switches: Switches,
    arch: int,
    num_splits: int,
    results: tuple[Tensor, Tensor],
    strides: tuple[int, ...],
) -> Launch:
    """Return the launch that reads the rows; `strides` of out and lse begin with the split's."""
    N, T, H, _ = problem.q.shape
    tree, stride_tree_sequence, stride_tree_row = tiles.tree_rows(problem)
    arguments = (
        problem.q, problem.kv_pages, problem.page_table, problem.context_lens,
        problem.ancestor_bits, problem.tree_sizes, tree, *results,
        T, H, num_splits, problem.softmax_scale * tiles.LOG2_E.value,
        *problem.q.stride()[:3],
        *problem.kv_pages.stride()[:2],
        problem.page_table.stride(0), *problem.ancestor_bits.stride()[:2],
        stride_tree_sequence, stride_tree_row,
        *strides,
    )  # fmt: skip
    meta = {
        "PACKED": switches.packed,
        "PAGE_SIZE": problem.page_size,
        "HYBRID": problem.tree_kv is not None,
        **tile_sizes(problem, switches, arch),
    }
    grid = (N, num_blocks(problem, switches, arch), num_splits)
    return Launch(ladder_kernel, grid, arguments, meta)


def _partial_results(problem: Problem, num_splits: int) -> tuple[Tensor, Tensor]:
    """Room for partial out and lse, in the caller's workspace if there is one."""
    num_rows, reason = num_splits * problem.lse.numel(), f" ({num_splits} splits)"
    size, num_outputs = num_rows * (problem.value_dim + 1), num_rows * problem.value_dim
    flat = room(problem.workspace, size, problem.q.device, reason=reason)
    shape = (num_splits, *problem.out.shape)
    return flat[:num_outputs].view(shape), flat[num_outputs:].view(shape[:-1])
