"""What each Triton backend of tree attention launches for a problem, ready to be compiled.

The arguments of a launch are found by the names of the kernel's parameters, which all kernels of
this op share, so that a kernel is listed by its tile sizes alone.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from engine.kernels.tree_attention import tiles, triton_ladder, triton_serial, triton_split
from engine.kernels.tree_attention.triton_ladder import Switches
from engine.kernels.triton_build import triton_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.kernels.op import Kernel
    from engine.kernels.tree_attention.problem import Problem


def serial(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the one kernel of `triton_serial`."""
    if problem.is_fp8:
        return ()  # refused
    return (_kernel(triton_serial.serial_kernel, problem, tiles.per_head(problem), arch),)


def split(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernels of `triton_split`: the one that reads the rows, the one that merges."""
    if problem.is_fp8 and not triton_split.packed(problem, arch)["READ_ONCE"]:
        return ()  # refused
    merges = (
        triton_split.merge_tiles(problem, num_splits) | {"BLOCK_ROWS": 1}  # as on a device
        for num_splits in (triton_split.FEW_SPLITS, triton_split.FEW_SPLITS + 1)
    )
    return (
        _kernel(triton_split.split_kernel, problem, triton_split.packed(problem, arch), arch),
        *(_kernel(triton_split.merge_kernel, problem, merge, arch) for merge in merges),
    )


def ladder(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernels of the ladder; without `split` only the result's dtype is another."""
    if problem.q.dtype == torch.float32 or problem.is_fp8:
        return ()  # refused on a device, or everywhere
    ways = itertools.product((False, True), repeat=2)
    switches = (Switches(read_once=one, split=True, packed=two) for one, two in ways)
    found = (one for way in switches for one in triton_ladder.launches(problem, way, arch))
    return tuple(triton_kernel(one.kernel, one.arguments, one.meta, arch) for one in found)


def _kernel(function: Any, problem: Problem, meta: Mapping[str, Any], arch: int) -> Kernel:
    layout = {"PAGE_SIZE": problem.page_size, "HYBRID": problem.tree_kv is not None}
    constants = {name: value for name, value in layout.items() if name in function.arg_names}
    meta = {**constants, **meta}
    values = _values(problem)
    runtime = [values[name] for name in function.arg_names if name not in meta]
    return triton_kernel(function, runtime, meta, arch)


def _values(problem: Problem) -> dict[str, Any]:
    """Return the value of every parameter the kernels of this op have, by its name."""
    N, T, H, _ = problem.q.shape
    tree, stride_tree_sequence, stride_tree_row = tiles.tree_rows(problem)
    partial = torch.empty(0, dtype=torch.float32)
    return {
        "q_ptr": problem.q,
        "kv_ptr": problem.kv_pages,
        "table_ptr": problem.page_table,
        "context_ptr": problem.context_lens,
        "bits_ptr": problem.ancestor_bits,
        "tree_sizes_ptr": problem.tree_sizes,
        "tree_ptr": tree,
        "out_ptr": problem.out,
        "lse_ptr": problem.lse,
        "partial_out_ptr": partial,
        "partial_lse_ptr": partial,
        "N": N,
        "T": T,
        "H": H,
        "num_rows": N * T * H,
        "num_splits": problem.num_splits or triton_split.choose_num_splits(problem),
        "scale": problem.softmax_scale * tiles.LOG2_E.value,
        **_strides("q", problem.q, ("sequence", "token", "head")),
        "stride_page": problem.kv_pages.stride(0),
        "stride_row": problem.kv_pages.stride(1),
        "stride_table": problem.page_table.stride(0),
        **_strides("bits", problem.ancestor_bits, ("sequence", "token")),
        "stride_tree_sequence": stride_tree_sequence,
        "stride_tree_row": stride_tree_row,
        **_strides("out", problem.out, ("sequence", "token", "head")),
        **_strides("lse", problem.lse, ("sequence", "token", "head")),
    }


def _strides(name: str, tensor: torch.Tensor, dims: tuple[str, ...]) -> dict[str, int]:
    return {f"stride_{name}_{dim}": tensor.stride(index) for index, dim in enumerate(dims)}
