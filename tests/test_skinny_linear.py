"""Products of few rows: the reference against plain loops, the kernel against the reference.

The kernel is CUDA C++: it runs on a device only (marker gpu).
"""

import math
from itertools import product

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, skinny_linear
from engine.kernels.skinny_linear import MOST_ROWS, _problem
from engine.kernels.skinny_linear.cuda_skinny import cut_of
from tests.attention_runs import ON_GPU, captured

OP = OPS["skinny_linear"]
CASES = {case.name: case for case in OP.cases}
every_case = pytest.mark.parametrize("case", OP.cases, ids=lambda case: case.name)
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])


def rounded(value, dtype):
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def activated(row, arguments, dtype):
    """What one row is when it is multiplied, in plain Python."""
    if arguments["norm_weight"] is not None:
        mean = sum(value * value for value in row) / len(row)
        scale = 1 / math.sqrt(mean + arguments["eps"])
        weights = arguments["norm_weight"].tolist()
        return [rounded(value * scale * w, dtype) for value, w in zip(row, weights, strict=True)]
    if arguments["is_gated"]:
        half = len(row) // 2
        gates = [rounded(value, dtype) for value in row[:half]]
        ups = [rounded(value, dtype) for value in row[half:]]
        silus = [rounded(value / (1 + math.exp(-value)), dtype) for value in gates]
        return [rounded(silu * up, dtype) for silu, up in zip(silus, ups, strict=True)]
    return row


def by_hand(arguments):
    """The products in float64, of rows that were activated in plain Python."""
    x, weight = arguments["x"], arguments["weight"]
    rows = x.double().flatten(0, -2).tolist()
    made = torch.tensor(
        [activated(row, arguments, weight.dtype) for row in rows], dtype=torch.float64
    )
    whole = made.view(*x.shape[:-1], -1) @ weight.double().transpose(-1, -2)
    if not arguments["gates_out"]:
        return whole
    gating = {"norm_weight": None, "is_gated": True}
    rows = [activated(row, gating, weight.dtype) for row in whole.flatten(0, -2).tolist()]
    return torch.tensor(rows, dtype=torch.float64).view(*whole.shape[:-1], -1)


def row_errors(got, wanted):
    return (got.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_reference_is_the_definition(case, dtype):
    arguments = OP.inputs(case, dtype=dtype)

    got = OP.reference(**arguments)

    assert got.data_ptr() == arguments["out"].data_ptr()
    assert row_errors(got, by_hand(arguments)).max() <= OP.tolerance(dtype).output_rel


@every_case
@on_gpu
def test_the_kernel_gives_what_the_reference_gives_and_nothing_else(case, device):
    arguments = OP.inputs(case, device=device, dtype=torch.bfloat16)
    expected = OP.reference(**OP.inputs(case, dtype=torch.bfloat16)).double()
    torch.cuda.synchronize()

    got = OP.implementations["cuda"](**arguments)

    tolerance = OP.tolerance(torch.bfloat16).output_rel
    assert row_errors(got.cpu(), expected).max() <= tolerance
    if case.gap:
        assert arguments["out"]._base[..., -case.gap :].isnan().all()


@pytest.mark.parametrize("case", OP.production, ids=lambda case: case.name)
@on_gpu
def test_the_kernel_repeats_to_the_bit_on_the_shapes_that_are_served(case, device):
    arguments = OP.inputs(case, device=device, dtype=torch.bfloat16)
    expected = OP.reference(**arguments).double()
    torch.cuda.synchronize()

    first = OP.implementations["cuda"](**arguments).clone()

    assert row_errors(first, expected).max() <= OP.tolerance(torch.bfloat16).output_rel
    assert torch.equal(OP.implementations["cuda"](**arguments), first)


@on_gpu
def test_a_chain_of_launches_reads_what_the_one_before_wrote(device):
    """Each launch may start before the one ahead has ended; a graph of them replays other rows."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(512, 512, generator=generator).to(device).bfloat16() / 512**0.5
               for _ in range(20)]  # fmt: skip
    x = torch.zeros(9, 512, dtype=torch.bfloat16, device=device)
    ends = {}

    def chain(backend):
        y = x
        for weight in weights:
            y = skinny_linear(y, weight, backend=backend)
        ends[backend] = y

    torch.cuda.synchronize()
    replay = captured(lambda: chain("cuda"), device)
    for _ in range(5):
        x.copy_(torch.randn(9, 512, generator=generator))
        chain("reference")

        replay()

        assert row_errors(ends["cuda"], ends["reference"].double()).max() <= 0.05


@on_gpu
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(MOST_ROWS + 1, 64), "weight": torch.zeros(3, 64)}, "at most 32 rows"),
        ({"x": torch.zeros(2, 40), "weight": torch.zeros(3, 40)}, "inputs in multiples of 32"),
        ({"x": torch.zeros(2, 65)[:, 1:], "weight": torch.zeros(3, 64)}, "expected x to begin at"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_run(device, changes, message):
    operands = {name: one.to(device).bfloat16() for name, one in changes.items()}
    if "begin" in message:  # a conversion closes the gap
        operands["x"] = torch.zeros(2, 65, device=device).bfloat16()[:, 1:]

    with pytest.raises(BackendError, match=message):
        skinny_linear(**operands, backend="cuda")


def test_the_kernel_refuses_a_cpu():
    with pytest.raises(BackendError, match="expected a GPU of one of the architectures"):
        OP.implementations["cuda"](**OP.inputs(CASES["odd"], dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 3, 64)}, "x, weight: expected both of 2 dims or both of 3"),
        ({"x": torch.zeros(2, 63)}, r"x: expected shape \[1, any, 64\], got \[1, 2, 63\]"),
        ({"x": torch.zeros(2, 64).double()}, "x: expected dtype float32, got"),
        ({"is_gated": True}, r"x: expected shape \[1, any, 128\]"),
        ({"gates_out": True}, "weight: expected an even number of outputs, got 3"),
        ({"norm_weight": torch.ones(63)}, r"norm_weight: expected shape \[64\]"),
        ({"out": torch.zeros(2, 4)}, r"out: expected shape \[1, 2, 3\]"),
        ({"out_dtype": torch.bfloat16}, "out_dtype: expected torch.float32 or torch.float32, got"),
        (
            {"norm_weight": torch.ones(64), "is_gated": True},
            "norm_weight: expected None beside a gate",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    arguments = {"x": torch.zeros(2, 64), "weight": torch.zeros(3, 64)} | changes

    with pytest.raises(ShapeError, match=message):
        skinny_linear(**arguments, backend="reference")


@pytest.mark.parametrize("case", OP.production, ids=lambda case: case.name)
def test_a_block_fits_every_machine_with_a_turn_to_read_and_one_to_fill(case):
    heads = (case.num_heads,) if case.num_heads else ()
    width, x_dtype = case.num_inputs, torch.float32 if case.is_wide_in else torch.bfloat16
    norm_weight = torch.empty(width, dtype=torch.bfloat16, device="meta")
    for rows, arch in product((1, 9, 17, MOST_ROWS), (90, 100, 120)):
        shape = (*heads, rows, 2 * width if case.is_gated else width)
        problem = _problem(
            x=torch.empty(shape, dtype=x_dtype, device="meta"),
            weight=norm_weight.expand(*heads, case.num_outputs, width),
            norm_weight=norm_weight if case.is_normalised else None,
            is_gated=case.is_gated,
            gates_out=case.gates_out,
        )

        cut = cut_of(problem, arch)

        assert cut.stages >= 2
        assert cut.shared_bytes <= (98 if arch == 120 else 226) * 1024
        assert not cut.chunk % (64 * cut.warps)


def test_no_rows_give_no_rows():
    got = skinny_linear(torch.zeros(0, 64), torch.zeros(3, 64), backend="reference")

    assert got.shape == (0, 3)


def test_cost_counts_what_is_read_and_written_once():
    case = CASES["gated-wide"]

    read, written = 40 * 96 * 2 + 9 * 2 * 96 * 4, 9 * 40 * 2
    assert OP.cost(case, itemsize=2).bytes == read + written
    assert OP.cost(case, itemsize=2).flops == 2 * 9 * 40 * 96
