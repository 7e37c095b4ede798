"""Tree attention on a GPU at the widths and sizes that are served, in bfloat16 (marker gpu).

Contexts up to 200k, 32 sequences, 129 tokens, 128 heads, every page size and layout. Errors are
against float64 and bounded by twice those of PyTorch in bfloat16.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.config import PAGE_SIZES
from engine.errors import BackendError
from engine.kernels import OPS, workspace_size
from engine.kernels.tree_attention.cases import bush, chain, star
from tests.attention_runs import (
    KERNEL_BACKENDS,
    ON_GPU,
    TRITON_BACKENDS,
    assert_as_near_as_pytorch,
    assert_close,
    captured,
    edges,
    far_apart,
    in_float64,
)
from tests.attention_runs import served_case as case

pytestmark = ON_GPU
OP = OPS["tree_attention"]
DTYPE = torch.bfloat16
TOLERANCE = OP.tolerance(DTYPE)
every_backend = pytest.mark.parametrize("backend", KERNEL_BACKENDS)

UNEVEN = case(
    "32-sequences",
    tuple(0 if n % 7 == 3 else n * n * 37 % 16384 for n in range(32)),
    tuple(bush(1 + n % 17, n) for n in range(32)),
)
SHAPES = (
    *(edges(page_size, hybrid=hybrid) for page_size in PAGE_SIZES for hybrid in (False, True)),
    UNEVEN,
    case("64k", (65536,), (bush(9, 3),), page_size=1),
    # One sequence, for which `cuda` has a kernel: also several blocks of rows, scores far from 0.
    case("one-short", (1000,), (bush(9, 12),), page_size=1),
    case("one-of-two-blocks", (5000,), (bush(17, 13),)),
    case("one-without-context", (0,), (bush(9, 14),)),
    case("one-huge-scores", (5000,), (bush(9, 10),), query_scale=3e3),
    case("200k", (200_000, 0), (bush(129, 4), chain(129))),
    case("200k-hybrid", (199_999, 31), (star(129), bush(65, 5)), page_size=1, hybrid=True),
    case("128-heads", (4097, 0), (bush(9, 6), star(4)), num_heads=128, page_size=16),
    case("64-heads", (16_383, 1), (bush(17, 7), (-1,)), num_heads=64, page_size=32),
    case("odd-heads", (300, 64), (bush(33, 8), bush(32, 9)), num_heads=12),
    case("any-mask", (1000, 0), (chain(129), chain(64)), page_size=1, sees="random"),
    case("huge-scores", (5000, 0), (bush(9, 10), chain(17)), query_scale=3e3),
    case("shared-pages", (5000, 4096, 4100), (bush(9, 11), chain(9), star(3)), shared_pages=64),
)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


def run(backend, arguments, **options):
    return OP.implementations[backend](**arguments, **options)


@every_backend
@every_shape
def test_the_error_is_at_most_twice_that_of_pytorch_and_repeats_to_the_bit(backend, shape):
    arguments = OP.inputs(shape, device="cuda", dtype=DTYPE)

    assert_as_near_as_pytorch(partial(run, backend), arguments, shape.query_scale)


@every_backend
def test_order_of_the_batch_does_not_matter(backend):
    arguments = OP.inputs(UNEVEN, device="cuda", dtype=DTYPE)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).cuda()
    names = ("q", "page_table", "context_lens", "ancestor_bits", "tree_sizes")
    permuted = arguments | {name: arguments[name][order] for name in names}

    straight, reordered = run(backend, arguments), run(backend, permuted)

    permutation = tuple(result[order] for result in straight)
    assert_close(reordered, permutation, TOLERANCE)
    if backend in TRITON_BACKENDS:  # where they cut depends on no other sequence
        assert all(torch.equal(a, b) for a, b in zip(permutation, reordered, strict=True))


# Lengths of one bucket: four sequences, up to 17 tokens, a page table for 20k rows.
ROUNDS = (
    ((20_000, 5, 0, 4096), (bush(17, 1), chain(3), star(17), (-1,))),
    ((0, 0, 0, 0), ((-1,), (-1,), (-1,), (-1,))),
    ((1, 19_999, 63, 64), (star(2), bush(16, 2), chain(17), bush(9, 3))),
    ((65, 127, 20_000, 20_000), (bush(9, 4), bush(9, 5), bush(9, 6), chain(9))),
)
TOKENS, NUM_PAGES, TABLE_WIDTH = 17, 720, 320
NEVER_READ = {"page_table": 2**31 - 1, "ancestor_bits": -1, "context_lens": 0, "tree_sizes": 1}


def fill(buffers, arguments):
    """Poison the buffers and write a call's operands into a corner of each."""
    for name, buffer in buffers.items():
        buffer.fill_(NEVER_READ.get(name, torch.nan))
        if name in arguments:
            buffer[tuple(slice(size) for size in arguments[name].shape)] = arguments[name]


@every_backend
@pytest.mark.parametrize("hybrid", [False, True], ids=["paged", "hybrid"])
def test_a_graph_serves_every_length_of_its_bucket(backend, hybrid):
    rounds = [
        OP.inputs(
            case(f"round{n}", lengths, trees, hybrid=hybrid, seed=n), device="cuda", dtype=DTYPE
        )
        for n, (lengths, trees) in enumerate(ROUNDS)
    ]
    shapes = {
        "q": (4, TOKENS, 8, 576), "kv_pages": (NUM_PAGES, 64, 576), "tree_kv": (4, TOKENS, 576),
        "page_table": (4, TABLE_WIDTH), "context_lens": (4,), "tree_sizes": (4,),
        "ancestor_bits": (4, TOKENS, 1),
    }  # fmt: skip
    held = {
        name: rounds[0][name].new_empty(shapes[name])
        for name in shapes
        if rounds[0][name] is not None
    }
    options = {name: rounds[0][name] for name in ("softmax_scale", "value_dim")}
    results = {
        "out": held["q"].new_empty(4, TOKENS, 8, 512),
        "lse": torch.empty(4, TOKENS, 8, device="cuda"),
    }
    if backend != "triton_serial":
        floats = workspace_size(**held, **options, backend=backend)
        results["workspace"] = torch.empty(floats, device="cuda")
    buffers = held | results
    fill(buffers, rounds[0])
    replay = captured(lambda: run(backend, buffers, **options), "cuda")

    for arguments in (*rounds, rounds[0]):
        fill(buffers, arguments)
        replay()
        want = OP.reference(**in_float64(arguments))
        T = want[0].shape[1]
        assert_close((buffers["out"][:, :T], buffers["lse"][:, :T]), want, TOLERANCE)
        assert (buffers["out"][:, T:] == 0).all()
        assert (buffers["lse"][:, T:] == -torch.inf).all()


@every_backend
@pytest.mark.parametrize("name", ["kv_pages", "q", "tree_kv", "out"])
def test_rows_beyond_two_to_the_31_elements_are_found(backend, name):
    shape = case(
        "far", (40, 17, 33), (bush(5, 1), chain(3), star(4)), hybrid=name == "tree_kv", seed=6
    )
    arguments = OP.inputs(shape, device="cuda", dtype=DTYPE)
    room = {"out": arguments["q"].new_zeros(3, 5, 8, 512)}
    expected = OP.reference(**in_float64(arguments))

    actual = run(backend, arguments | {name: far_apart((arguments | room)[name])})

    assert_close(actual, expected, TOLERANCE)


@every_backend
def test_rows_that_begin_anywhere_are_read_or_refused(backend):
    arguments = OP.inputs(replace(edges(16, hybrid=False), row_gap=1), device="cuda", dtype=DTYPE)
    expected = OP.reference(**in_float64(arguments))

    try:
        actual = run(backend, arguments)
    except BackendError as error:
        assert "multiples of" in str(error)  # noqa: PT017 - one of two good answers
    else:
        assert_close(actual, expected, TOLERANCE)


MEMCHECK = "compute-sanitizer"


@pytest.mark.parametrize(
    ("planted", "finding"),
    [([], "ERROR SUMMARY: 0 errors"), (["planted"], "Invalid __global__ read")],
    ids=["clean", "planted"],
)
def test_memcheck_finds_what_is_planted_and_nothing_else(planted, finding):
    tool = shutil.which(MEMCHECK) or shutil.which(MEMCHECK, path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip(f"{MEMCHECK} is not installed")
    # Calls that fail without touching memory, such as a look for a driver function, are no finding.
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--padding", "4096"]
    command.append(sys.executable)

    outcome = subprocess.run(
        [*command, "-m", "tests.memcheck_attention", *planted],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    report = outcome.stdout + outcome.stderr
    if "Device not supported" in report:
        pytest.skip(f"{MEMCHECK} cannot reach this machine's device")
    assert finding in report, report[-4000:]
    assert (outcome.returncode == 0) == (not planted), report[-4000:]
