"""Sums onto a stream and its norm: the reference against plain sums, the kernel against both.

As attention_runs.py says, the Triton backend runs in Triton's interpreter, which test_choose_experts
starts for this file as well, and on a CUDA device.
"""

import math

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, add_norm
from tests.attention_runs import INTERPRETED, captured, not_interpreted
from tests.op_runs import every_dtype, every_kernel_run, runs_of

OP = OPS["add_norm"]
CASES = {case.name: case for case in OP.cases}
RUNS = runs_of(OP)
every_run, every_case = RUNS.every_run, RUNS.every_case


def rounded(value, dtype):
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def by_hand(arguments):
    """Totals and norms in plain Python; every sum is rounded, a norm is not."""
    x, weights, dtype = arguments["x"], arguments["norm_weight"].tolist(), arguments["x"].dtype
    totals, norms = [], []
    for m, row in enumerate(x.tolist()):
        added = [one[m].tolist() for one in arguments["addends"]]
        sums = [rounded(sum(values), dtype) for values in zip(*added, strict=True)]
        total = [rounded(a + b, dtype) for a, b in zip(row, sums, strict=True)] if sums else row
        mean = sum(value * value for value in total) / len(total)
        scale = 1 / math.sqrt(mean + arguments["eps"])
        totals.append(total)
        norms.append([value * scale * w for value, w in zip(total, weights, strict=True)])
    return torch.tensor(totals, dtype=torch.float64), torch.tensor(norms, dtype=torch.float64)


@every_case
@every_run
@every_dtype
def test_every_backend_gives_what_the_definition_says(case, device, backend, dtype):
    arguments = OP.inputs(case, device=device, dtype=dtype)
    total, normed = by_hand(OP.inputs(case, dtype=dtype))

    got = OP.implementations[backend](**arguments)

    assert torch.equal(got[0].cpu().double(), total)
    error = (got[1].cpu().double() - normed).norm(dim=-1) / normed.norm(dim=-1)
    assert error.max() <= OP.tolerance(dtype).output_rel


@every_run
def test_nothing_that_is_read_is_written(device, backend):
    arguments = OP.inputs(CASES["strided"], device=device)
    before = [one.clone() for one in (arguments["x"], *arguments["addends"])]

    OP.implementations[backend](**arguments)

    for one, kept in zip((arguments["x"], *arguments["addends"]), before, strict=True):
        assert torch.equal(one, kept)


@every_run
def test_rows_to_which_nothing_is_added_are_returned_themselves(device, backend):
    arguments = OP.inputs(CASES["nothing-added"], device=device)

    total, _ = OP.implementations[backend](**arguments)

    assert total is arguments["x"]


@every_run
def test_what_is_no_number_stays_none(device, backend):
    arguments = OP.inputs(CASES["two"], device=device)
    arguments["addends"][1][4, 7] = torch.nan

    total, normed = OP.implementations[backend](**arguments)

    assert total[4, 7].isnan()
    assert normed[4].isnan().all()
    assert not torch.cat((normed[:4], normed[5:])).isnan().any()


@every_run
def test_no_rows_give_no_rows(device, backend):
    arguments = OP.inputs(CASES["odd"], device=device)
    none = {"x": arguments["x"][:0], "addends": (arguments["addends"][0][:0],)}

    total, normed = OP.implementations[backend](**arguments | none)

    assert total.shape == normed.shape == (0, 37)


@every_kernel_run
def test_a_graph_replays_other_rows(device):
    arguments = OP.inputs(CASES["two"], device=device)
    got = {}

    def body():
        got["total"], got["normed"] = OP.implementations["triton"](**arguments)

    replay = captured(body, device)
    for seed in (5, 6):
        arguments["x"].copy_(torch.randn(9, 32, generator=torch.Generator().manual_seed(seed)))
        total, normed = OP.reference(**arguments)

        replay()

        assert torch.equal(got["total"], total)
        torch.testing.assert_close(got["normed"], normed, rtol=1e-5, atol=1e-5)


if INTERPRETED:

    def test_triton_refuses_float64():
        with pytest.raises(BackendError, match="bfloat16, float16 or float32 rows, got torch"):
            OP.implementations["triton"](**OP.inputs(CASES["odd"], dtype=torch.float64))


if not INTERPRETED:

    def test_triton_refuses_a_cpu():
        with pytest.raises(BackendError, match="expected CUDA tensors, got cpu ones"):
            OP.implementations["triton"](**OP.inputs(CASES["odd"]))


@not_interpreted
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"addends": (torch.ones(2, 8),) * 3}, "addends: expected at most 2, got 3"),
        ({"addends": (torch.ones(2, 7),)}, r"addend: expected shape \[2, 8\], got \[2, 7\]"),
        ({"addends": (torch.ones(2, 8).double(),)}, "addend: expected dtype float32, got"),
        ({"norm_weight": torch.ones(7)}, r"norm_weight: expected shape \[8\], got \[7\]"),
        ({"x": torch.ones(2, 0)}, "x: expected rows of at least one number"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    arguments = {"x": torch.ones(2, 8), "addends": (), "norm_weight": torch.ones(8), "eps": 1e-6}

    with pytest.raises(ShapeError, match=message):
        add_norm(**arguments | changes, backend="reference")


@not_interpreted
def test_cost_counts_what_is_read_and_written_once():
    assert OP.cost(CASES["two"], itemsize=2).bytes == (9 * 5 + 1) * 32 * 2
    assert OP.cost(CASES["nothing-added"], itemsize=2).bytes == (3 * 2 + 1) * 32 * 2
