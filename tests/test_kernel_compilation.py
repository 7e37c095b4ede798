"""Every kernel of the op table compiles without a GPU for each machine it declares, and fits it.

The op table is walked: what its backends launch for its production cases in bfloat16 and float32,
on each of their architectures. Without `--exhaustive` pages of 1, 64 and 128 rows stand for all,
of 1 and 64 for CUDA C++, and of grouped experts the fewest tokens and the most.
Shared memory is what a launch asks for and what the cubin says, the stack is the cubin's.
Kernels that no backend lists are looked for in the sources.
"""

import ast
import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import engine.kernels
from engine.kernels import (
    OPS,
    AddNormCase,
    AttendWindowCase,
    ChooseExpertsCase,
    DraftTreeCase,
    GreedyTokensCase,
    GroupedExpertsCase,
    HeadRowsCase,
    KeepRowsCase,
    Kernel,
    LikeliestTokensCase,
    MlaRowsCase,
    SkinnyLinearCase,
    WalkTreeCase,
)

triton = pytest.importorskip("triton")  # comes with the package on Linux

from triton import language as tl  # noqa: E402 - needs Triton

from engine.kernels.triton_build import triton_kernel  # noqa: E402

KIB = 1024
SHARED_LIMIT = {90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}  # opt-in shared memory of a block
RESERVED = 1 * KIB  # that the system takes of every block and the limits leave out
STACK_LIMIT = 32  # bytes a thread; a few registers at a loop's edge, nothing a tile spills
# Kernels that may spill, by name and architecture: bytes of stack a thread, and why.
SPILLS = {
    ("split_kernel", 90): (256, "tall tiles, around the few tiles of a tree"),
    ("tree_attention_fp8", 90): (64, "what is read of a piece once a tile, beside 72 fp8 rows"),
    **{
        ("ladder_kernel", arch): (640, "where pages have more rows than one; an exhibit")
        for arch in (90, 100)
    },
}
OTHER_CASES = (
    *(GroupedExpertsCase, ChooseExpertsCase, MlaRowsCase, SkinnyLinearCase, AddNormCase),
    *(HeadRowsCase, KeepRowsCase, AttendWindowCase, DraftTreeCase, WalkTreeCase),
    *(LikeliestTokensCase, GreedyTokensCase),
)
EXHIBITS = ("triton_serial", "ladder")  # measured, not served
# Of attention: a page's size only finds addresses there, and `cuda` has the kernels of both.
CUDA = ("cuda", "cuda_mma")
# Most and fewest tokens; a choice among all, and among the experts of groups; a rank's heads; each
# kind of product; of attention what merges in a launch of its own, and what reads fp8.
SHORT_CASES = (
    *("rank-int4-9", "rank-int4-1024", "rank-plain-1", "kimi-9", "deepseek-9", "mla-8-9"),
    *("values-9", "queries-9", "output-17", "shared-9", "down-9", "kimi-9-2"),
    *("tree-64", "tree-512", "walk-65", "kimi-1-1", "kimi-keep-1"),
    *("whole-64", "rank-512", "whole-9", "8x129-page64", "8x9-page64-fp8"),
)
PACKAGE = Path(engine.kernels.__file__).parent
CUDA_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def pytest_generate_tests(metafunc):
    if "built" in metafunc.fixturenames:
        found = listed_kernels(is_exhaustive=metafunc.config.getoption("--exhaustive"))
        metafunc.parametrize("built", found.values(), ids=found.keys())


def listed_kernels(*, is_exhaustive):
    """What the backends of every op launch, once for each piece of different code, by a name."""
    found = {}
    for op in OPS.values():
        for case, dtype in itertools.product(op.production, (torch.bfloat16, torch.float32)):
            names = [name for name in op.archs if is_exhaustive or in_short(name, case, dtype)]
            arguments = op.inputs(case, dtype=dtype) if names else {}
            for name in names:
                for kernel in all_archs(op, name, arguments):
                    title = f"{name}-{kernel.name}-{dtype}-{case.name}-sm_{kernel.arch}"
                    found.setdefault((kernel.name, kernel.arch, kernel.key), (title, kernel))
    return dict(found.values())


def in_short(name, case, dtype):
    """Whether the run without `--exhaustive` takes this backend, case and dtype."""
    if isinstance(case, OTHER_CASES):
        return dtype == torch.bfloat16 and case.name in SHORT_CASES
    if case.is_fp8:
        is_one = case.page_size == 64 and case.hybrid == (name in CUDA)
        return is_one and dtype == torch.bfloat16 and name in ("triton_split", "cuda")
    if name in EXHIBITS or dtype == torch.float32:
        is_both = name in EXHIBITS and dtype == torch.float32
        return case.page_size == 1 and not case.hybrid and not is_both
    if name in CUDA:
        return name == "cuda" and (case.page_size, case.hybrid) in ((1, False), (64, True))
    # Shorter than a tile, as long, longer, of few rows; and beside a scratch.
    is_longer = case.page_size == 128 and case.name.startswith("8x9-")
    return case.page_size == 64 or ((case.page_size == 1 or is_longer) and not case.hybrid)


def all_archs(op, name, arguments):
    return [kernel for arch in op.archs[name] for kernel in op.kernels(name, arch, **arguments)]


def memory_used(cubin, name, folder):
    """Bytes of stack a thread and of static shared memory a block of one function of a cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [CUOBJDUMP, "-res-usage", path]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(rf"Function {name}:\s+REG:\d+ STACK:(\d+) SHARED:(\d+)", report)
    stack, shared = map(int, found)
    return stack, shared - RESERVED


def kernels_in_sources():
    """Names of all functions that are launched: `*_kernel` under a jit, `__global__` in CUDA."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                decorators = [ast.unparse(one) for one in node.decorator_list]
                found |= {node.name for one in decorators if one.startswith("triton.jit")}
    for path in PACKAGE.rglob("*.cu*"):
        found |= set(CUDA_KERNEL.findall(path.read_text(encoding="utf-8")))
    return found


def misfits(kernel, folder):
    """What speaks against a kernel on its architecture, in words; empty if it fits."""
    binary = kernel.compile()
    limit, found = SHARED_LIMIT[kernel.arch], []
    stack, static = memory_used(binary.cubin, kernel.name, folder)
    if static + binary.shared_bytes > limit:
        found.append(f"{static + binary.shared_bytes} bytes of shared memory, of {limit}")
    allowed, _ = SPILLS.get((kernel.name, kernel.arch), (STACK_LIMIT, ""))
    if stack > allowed:
        found.append(f"{stack} bytes of stack a thread, of {allowed}")
    return found


def test_a_kernel_fits_the_machine(built, tmp_path):
    assert misfits(built, tmp_path) == []


def test_every_kernel_in_the_sources_is_listed_by_a_backend():
    listed = {
        kernel.name
        for op in OPS.values()
        for case in (op.production[0], *(one for one in op.production if one.name in SHORT_CASES))
        for name in op.archs
        for kernel in all_archs(op, name, op.inputs(case, dtype=torch.bfloat16))
    }

    assert kernels_in_sources() == listed


def test_every_op_has_a_backend_on_every_architecture():
    for op in OPS.values():
        archs = [
            arch for name, archs in op.archs.items() if name in op.implementations for arch in archs
        ]
        assert set(archs) == set(SHARED_LIMIT), op.name


def test_every_allowed_spill_has_a_reason_and_a_kernel():
    assert {name for name, _ in SPILLS} <= kernels_in_sources()
    assert all(reason for _, reason in SPILLS.values())


@triton.jit
def greedy(x_ptr, SIZE: tl.constexpr):
    """Keep more in registers than there are."""
    at = tl.arange(0, SIZE)
    square = at[:, None] * SIZE + at[None, :]
    x = tl.load(x_ptr + square)
    tl.store(x_ptr + square, tl.dot(x, tl.trans(x)).to(x.dtype))


def test_a_kernel_that_is_too_large_is_found(tmp_path):
    kernel = triton_kernel(greedy, [torch.empty(0).half()], {"SIZE": 128, "num_warps": 2}, 120)
    binary = kernel.compile()
    larger = replace(binary, shared_bytes=99 * KIB + 1)

    found = misfits(replace(kernel, compile=lambda: larger), tmp_path)

    assert found[0] == "101377 bytes of shared memory, of 101376"
    assert re.fullmatch(r"\d{2,} bytes of stack a thread, of 32", found[1])


def test_a_kernel_of_a_backend_is_known_by_more_than_its_name():
    op = OPS["tree_attention"]
    case = op.production[0]
    one, other = (
        op.kernels("triton_split", 90, **op.inputs(replace(case, page_size=size)))[0]
        for size in (16, 32)
    )

    assert isinstance(one, Kernel)
    assert one.key != other.key
