"""Grouped experts on a GPU at the widths and sizes that are served, in bfloat16 (marker gpu).

384 experts of a TP8 rank of Kimi K2, packed and plain, 1 to 1024 rows. Errors are against float64
and bounded by twice those of PyTorch in bfloat16.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.kernels import OPS, GroupedExpertsCase, experts_workspace_size
from engine.kernels.grouped_experts.cases import INT4, PLAIN, expert_ids
from engine.layers import SwiGlu
from engine.quantized import Int4GroupWeight, dense
from tests.attention_runs import ON_GPU, captured

pytestmark = ON_GPU
OP = OPS["grouped_experts"]
DTYPE = torch.bfloat16
RANK = GroupedExpertsCase("rank", "", 9, 384, 8, 7168, 256, INT4)
EIGHT = replace(RANK, num_rows=1024, num_experts=8, top_k=4, stored=PLAIN)
SHAPES = [
    *(replace(RANK, num_rows=rows) for rows in (1, 2, 9, 17, 33, 65, 256, 1024)),
    *(replace(RANK, num_rows=rows, stored=PLAIN, num_experts=64) for rows in (1, 9, 65, 1024)),
    *(replace(RANK, num_rows=rows, routing="one") for rows in (9, 65, 1024)),
    *(replace(EIGHT, routing=routing) for routing in ("spread", "ends", "repeated")),
    replace(RANK, num_rows=65, padding_rows=40, row_gap=8),
    replace(RANK, inner=2048, num_experts=16),
    replace(RANK, inner=2048, num_experts=64),  # few tokens an expert, several turns of down
    replace(RANK, num_rows=5, hidden=1024, row_gap=8),
    replace(RANK, num_rows=9, routing="repeated"),
]
RUNS = [
    (case, name)
    for case in SHAPES
    for name in ("triton", "cuda")
    if name != "cuda" or case.stored == INT4
]


def title(case):
    shape = f"{case.num_rows}x{case.top_k}of{case.num_experts}-{case.inner}"
    return f"{shape}-{case.stored}-{case.routing}-{case.padding_rows}"


def eager(arguments):
    """Every product in bfloat16, one expert after the other."""
    out = arguments["x"].new_zeros(arguments["x"].shape, dtype=torch.float32)
    ids = arguments["expert_ids"]
    for expert in ids[ids >= 0].unique().tolist():
        weights = []
        for name in ("gate", "up", "down"):
            values, scale = arguments[name][expert], arguments.get(f"{name}_scale")
            stored = values if scale is None else Int4GroupWeight(values, scale[expert])
            weights.append(dense(stored, DTYPE))
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        factors = arguments["expert_weights"][rows, choices, None]
        out.index_add_(0, rows, SwiGlu(*weights)(arguments["x"][rows]) * factors)
    return out.to(DTYPE)


def exact(arguments):
    wide = {
        name: value.double()
        for name, value in arguments.items()
        if value.is_floating_point() and "scale" not in name
    }
    return OP.reference(**arguments | wide)


def error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("case", "backend"), RUNS, ids=[f"{title(case)}-{name}" for case, name in RUNS]
)
def test_errors_stay_within_twice_those_of_bfloat16_products(case, backend):
    arguments = OP.inputs(case, device="cuda", dtype=DTYPE)
    expected = exact(arguments)

    out = OP.implementations[backend](**arguments)

    assert out.isfinite().all()
    assert error(out, expected) <= 2 * error(eager(arguments), expected)
    assert torch.equal(out, OP.implementations[backend](**arguments))


@pytest.mark.parametrize(
    ("stored", "backend"), [(INT4, "triton"), (PLAIN, "triton"), (INT4, "cuda")]
)
@pytest.mark.parametrize("num_rows", [1, 9, 65])
def test_a_graph_replays_any_routing_in_poisoned_buffers(num_rows, stored, backend):
    case = replace(RANK, num_rows=num_rows, stored=stored, num_experts=32, is_one_expert=True)
    arguments = OP.inputs(case, device="cuda", dtype=DTYPE)
    out = torch.empty_like(arguments["x"])
    size = experts_workspace_size(**arguments, backend=backend)
    workspace = torch.empty(size, device="cuda")
    call = partial(OP.implementations[backend], **arguments, out=out, workspace=workspace)
    replay = captured(call, "cuda")

    for routing, seed in (("spread", 1), ("one", 2), ("repeated", 3), ("ends", 4), ("spread", 5)):
        arguments["expert_ids"].copy_(expert_ids(replace(case, routing=routing, seed=seed)))
        out.fill_(torch.nan)
        workspace.fill_(torch.nan)
        replay()

        assert torch.equal(out, OP.implementations[backend](**arguments))
        assert error(out, exact(arguments)) <= OP.tolerance(DTYPE).output_rel


@pytest.mark.parametrize("num_rows", [9, 256])
def test_channels_that_stand_out_do_not_drown_the_others(num_rows):
    arguments = OP.inputs(replace(RANK, num_rows=num_rows), device="cuda", dtype=DTYPE)
    arguments["x"][:, ::701] *= 300.0
    expected = exact(arguments)

    out = OP.implementations["cuda"](**arguments)

    assert error(out, expected) <= 2 * error(eager(arguments), expected)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_row_that_is_no_number_stays_none_and_spares_the_others(number):
    arguments = OP.inputs(replace(RANK, num_rows=9), device="cuda", dtype=DTYPE)
    clean = OP.implementations["cuda"](**arguments)
    arguments["x"][3, 5000] = number

    out = OP.implementations["cuda"](**arguments)

    assert not out[3].isfinite().any()
    others = [row for row in range(9) if row != 3]
    assert torch.equal(out[others], clean[others])
