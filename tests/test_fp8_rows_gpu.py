"""Tree attention over fp8 rows on a GPU, at the widths and sizes that are served (marker gpu).

Errors are against float64 and bounded by twice those of PyTorch in bfloat16 over the same numbers.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.config import PAGE_SIZES
from engine.errors import BackendError
from engine.kernels import OPS, workspace_size
from engine.kernels.tree_attention.cases import bush, chain, star
from tests.attention_runs import (
    KERNEL_BACKENDS,
    ON_GPU,
    READS_FP8,
    assert_as_near_as_pytorch,
    assert_close,
    captured,
    eager,
    errors,
    far_apart,
    in_float64,
    served_case,
)
from tests.attention_runs import edges as edges_of

pytestmark = ON_GPU
OP = OPS["tree_attention"]
DTYPE = torch.bfloat16
BACKENDS = [name for name in KERNEL_BACKENDS if name in READS_FP8]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
case, edges = partial(served_case, is_fp8=True), partial(edges_of, is_fp8=True)

SHAPES = (
    *(edges(page_size, hybrid=hybrid) for page_size in PAGE_SIZES for hybrid in (False, True)),
    case("strided", (500, 64), (bush(9, 1), chain(3)), page_size=16, row_gap=16),
    *(
        case(f"{tokens}-tokens", (1000, 63), (bush(tokens, 1), (-1,)), page_size=1)
        for tokens in (1, 2, 3, 4, 5, 6, 8)
    ),
    case("32-sequences", tuple(n * n * 37 % 16384 for n in range(32)),
         tuple(bush(1 + n % 17, n) for n in range(32))),
    case("200k", (200_000, 0), (bush(129, 4), chain(129))),
    case("128-heads", (4097, 0), (bush(9, 6), star(4)), num_heads=128, page_size=16),
    case("any-mask", (1000, 0), (chain(129), chain(64)), page_size=1, sees="random"),
    case("huge-scores", (5000, 0), (bush(9, 10), chain(17)), query_scale=3e3),
    case("shared-pages", (5000, 4096, 4100), (bush(9, 11), chain(9), star(3)), shared_pages=64),
)  # fmt: skip


def run(backend, arguments, **options):
    return OP.implementations[backend](**arguments, **options)


def poked(first, last, numbers):
    """A call whose rows hold `numbers` as their bytes [first, last)."""
    arguments = OP.inputs(
        case("poked", (700,), (bush(9, 3),), page_size=1), device="cuda", dtype=DTYPE
    )
    rows = arguments["kv_pages"]
    rows[..., first:last] = numbers(rows[..., first:last].clone())
    return arguments


@every_backend
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_error_is_at_most_twice_that_of_pytorch_and_repeats_to_the_bit(backend, shape):
    arguments = OP.inputs(shape, device="cuda", dtype=DTYPE)

    assert_as_near_as_pytorch(partial(run, backend), arguments, shape.query_scale)


@every_backend
def test_numbers_below_the_normal_ones_of_fp8_count(backend):
    def large(scales):
        return torch.full_like(scales.view(torch.float32), 64.0).view(torch.uint8)

    arguments = poked(512, 528, large)
    arguments["kv_pages"][..., :512] &= 0x87  # exponent 0

    assert_close(
        run(backend, arguments), OP.reference(**in_float64(arguments)), OP.tolerance(DTYPE)
    )


@every_backend
def test_a_scale_need_not_be_a_power_of_two(backend):
    def uneven(scales):
        numbers = scales.view(torch.float32)
        factors = torch.rand(numbers.shape, generator=torch.Generator().manual_seed(0)) + 0.5
        return (numbers * factors.to(numbers)).view(torch.uint8)

    arguments = poked(512, 528, uneven)
    expected = OP.reference(**in_float64(arguments))
    found = run(backend, arguments)

    # A scaled number is rounded, in one backend to the dtype of the queries, as PyTorch does.
    _, eager_lse_error = errors(eager(arguments), expected)
    assert_close(found, expected, replace(OP.tolerance(DTYPE), lse_abs=eager_lse_error))


@every_backend
def test_what_is_far_below_the_greatest_score_counts_beside_a_row_without_value(backend):
    arguments = poked(0, 0, lambda rows: rows)
    arguments["context_lens"][:] = 60  # all in one tile
    query, rows = arguments["q"], arguments["kv_pages"]
    query[:], query[..., 512] = 0, 1
    rotated = rows[..., 528:].view(DTYPE)
    first = arguments["page_table"][0, 0]
    rotated[..., 0] = (12 - 17) / arguments[
        "softmax_scale"
    ]  # nats, 2^24.5 times less than the first
    rotated[first, 0, 0] = 12 / arguments["softmax_scale"]
    rows[first, 0, :512] = 0

    out, _ = run(backend, arguments)

    expected, _ = OP.reference(**in_float64(arguments))
    assert (out - expected).norm() < OP.tolerance(DTYPE).output_rel * expected.norm()


@every_backend
@pytest.mark.parametrize(
    "row_bytes", [(5, 6, [0x7F]), (5, 6, [0xFF]), (516, 520, [0, 0, 0xC0, 0x7F])]
)
def test_what_is_no_number_and_seen_is_not_hidden(backend, row_bytes):
    first, last, numbers = row_bytes
    arguments = poked(0, 0, lambda rows: rows)
    page = arguments["page_table"][0, 333]
    arguments["kv_pages"][page, 0, first:last] = torch.tensor(numbers, dtype=torch.uint8)

    out, lse = run(backend, arguments)

    assert out.isnan().all()
    assert lse.isnan().all()


@every_backend
@pytest.mark.parametrize("name", ["kv_pages", "tree_kv"])
def test_rows_beyond_two_to_the_31_bytes_are_found(backend, name):
    shape = case("far", (40, 17, 33), (bush(5, 1), chain(3), star(4)), hybrid=name == "tree_kv")
    arguments = OP.inputs(shape, device="cuda", dtype=DTYPE)
    expected = OP.reference(**in_float64(arguments))

    actual = run(backend, arguments | {name: far_apart(arguments[name])})

    assert_close(actual, expected, OP.tolerance(DTYPE))


def fill(held, arguments):
    """Write a call's operands into a corner of each buffer."""
    for name, buffer in held.items():
        if torch.is_tensor(buffer):
            buffer[tuple(slice(size) for size in arguments[name].shape)] = arguments[name]


@every_backend
def test_a_graph_serves_other_lengths_and_rows(backend):
    rounds = [
        OP.inputs(case("", lengths, (bush(9, 1), star(9)), seed=n), device="cuda", dtype=DTYPE)
        for n, lengths in enumerate(((5000, 0), (64, 4097), (1, 5000)))
    ]
    rows = sum(len(arguments["kv_pages"]) for arguments in rounds)
    held = {name: one.clone() if torch.is_tensor(one) else one for name, one in rounds[0].items()}
    held |= {
        "kv_pages": rounds[0]["kv_pages"].new_full((rows, 64, 656), 0xFF),
        "page_table": rounds[0]["page_table"].new_full((2, 100), 2**31 - 1),
    }
    floats = workspace_size(**held, backend=backend)
    results = {
        "out": torch.empty(2, 9, 8, 512, dtype=DTYPE, device="cuda"),
        "lse": torch.empty(2, 9, 8, device="cuda"),
        "workspace": torch.empty(floats, device="cuda"),
    }
    fill(held, rounds[0])
    replay = captured(lambda: run(backend, held, **results), "cuda")

    for arguments in (*rounds, rounds[0]):
        fill(held, arguments)
        replay()
        expected = OP.reference(**in_float64(arguments))
        assert_close((results["out"], results["lse"]), expected, OP.tolerance(DTYPE))


@pytest.mark.parametrize("backend", [name for name in KERNEL_BACKENDS if name not in READS_FP8])
def test_a_backend_without_kernels_for_fp8_rows_says_who_has_them(backend):
    arguments = OP.inputs(edges(64, hybrid=False), device="cuda", dtype=DTYPE)

    with pytest.raises(BackendError, match=f"{backend}: .*got fp8 rows .reference, triton_split"):
        run(backend, arguments)


@every_backend
def test_rows_that_begin_anywhere_are_refused(backend):
    shape = replace(edges(16, hybrid=False), row_gap=1)

    with pytest.raises(BackendError, match="begin at, and step by, multiples of"):
        run(backend, OP.inputs(shape, device="cuda", dtype=DTYPE))
